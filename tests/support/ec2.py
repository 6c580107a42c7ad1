"""A stack of EC2 pods declared against a recorder: each resource with its inputs and what Pulumi is told of it.

Modules that use this call `need_pulumi_aws` first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pulumi
from pulumi.runtime import MockCallArgs, MockResourceArgs, Mocks
from pulumi.runtime.mocks import MockMonitor

from components.deployment import Deployment
from components.described import Described
from components.pods.keys import new_key
from components.settings import SECRETS

HOST_KEY, HOST_KEY_PUBLIC = new_key()
CLIENT_KEY, CLIENT_KEY_PUBLIC = new_key()
SUBNET, VPC = "subnet-0123456789abcdef0", "vpc-0fedcba9876543210"
PUBLIC_IP, PRIVATE_IP = "198.51.100.7", "10.0.0.5"
TODAYS_AMI = {"x86_64": "ami-0aaaaaaaaaaaaaaaa", "arm64": "ami-0bbbbbbbbbbbbbbbb"}
EC2 = {"instanceType": "g6e.xlarge", "region": "eu-central-1", "sshCidr": "203.0.113.7/32", "volumeGiB": 200}
# How Pulumi's protocol marks a secret value: sdk/python/lib/pulumi/runtime/rpc.py.
SECRET_SIGNATURE, SECRET_VALUE = "4dabf18193072939515e22adb298388d", "1b47061264138c4ac30d75fd1eb44270"


@dataclass(frozen=True)
class Declared:
    """One resource. `provider`, `after`, `reads` and `deleted_with` name resources.

    It comes after those that are named to Pulumi, and after those whose outputs are among its inputs: these it `reads`.
    """

    type: str
    name: str
    inputs: dict[str, Any]
    provider: str
    after: frozenset[str]
    reads: frozenset[str]
    ignored: tuple[str, ...]
    secret_outputs: tuple[str, ...]
    delete_before_replace: bool
    deleted_with: str
    retained: bool
    replaced_on: tuple[str, ...]


@dataclass
class Cloud(Mocks):
    """What AWS and the dynamic providers answer; and what AWS was asked beside the resources."""

    todays_ami: Mapping[str, str] = field(default_factory=lambda: TODAYS_AMI)
    asked: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    """The types of the resources, in their order."""

    def new_resource(self, args: MockResourceArgs) -> tuple[str | None, dict[Any, Any]]:
        self.made.append(args.typ)
        found: Mapping[str, Mapping[str, Any]] = {
            "command:remote:Command": {"stdout": '{"revision": 1}'},
            "pulumi-python:dynamic/lora-pods:ReachedPod": {
                "machine": "0123 reached",
                "plugin_host_key": "ssh-rsa AAAA",
            },
            "pulumi-python:dynamic/lora-pods:HostKey": {"private_key": HOST_KEY, "public_key": HOST_KEY_PUBLIC},
            "aws:ec2/instance:Instance": {"privateIp": PRIVATE_IP},
            "aws:ec2/eip:Eip": {"publicIp": PUBLIC_IP, "allocationId": "eipalloc-1"},
        }
        return f"{args.name}-id", {**args.inputs, **found.get(args.typ, {})}

    def call(self, args: MockCallArgs) -> tuple[dict[Any, Any], list[tuple[str, str]] | None]:
        if args.token.startswith("pulumi:pulumi:"):
            return {"outputs": {}}, []
        self.asked.append((args.token, dict(args.args), _name(args.provider)))
        if args.token == "aws:ssm/getParameter:getParameter":
            architecture = args.args["name"].split("/")[5]
            return {"value": self.todays_ami[architecture]}, []
        if args.token == "aws:index/getPartition:getPartition":
            china = self.asked[-1][2].startswith("aws-cn-")
            return {"partition": "aws-cn" if china else "aws"}, []
        assert args.token == "aws:ec2/getSubnet:getSubnet"
        return {"id": args.args["id"], "vpcId": VPC}, []


class Monitor(MockMonitor):
    """Pulumi's own mock of its engine, which forgets what a program says of a resource beside the inputs."""

    def __init__(self, cloud: Cloud) -> None:
        super().__init__(cloud)
        self.declared: dict[str, Declared] = {}

    def RegisterResource(self, request: Any) -> Any:
        answer = super().RegisterResource(request)  # type: ignore[no-untyped-call]
        if request.type != "pulumi:pulumi:Stack":
            self.declared[answer.urn] = Declared(
                request.type,
                request.name,
                _inputs(request),
                _name(request.provider),
                frozenset(map(_name, request.dependencies)),
                frozenset(_name(urn) for found in request.propertyDependencies.values() for urn in found.urns),
                tuple(request.ignoreChanges),
                tuple(request.additionalSecretOutputs),
                request.deleteBeforeReplace,
                _name(request.deletedWith),
                request.retainOnDelete,
                tuple(request.replaceOnChanges),
            )
        return answer


@dataclass(frozen=True)
class Plan:
    declared: tuple[Declared, ...]
    asked: list[tuple[str, dict[str, Any], str]]
    engines: dict[str, Any]

    def one(self, kind: str, base: str | None = None) -> Declared:
        """The resource whose type ends in `kind`, of one pod."""
        found = [
            item
            for item in self.declared
            if item.type.endswith(f":{kind}") and (base is None or item.name.startswith(f"{base}-"))
        ]
        assert len(found) == 1, [item.name for item in found]
        return found[0]

    def of_aws(self) -> list[Declared]:
        return [item for item in self.declared if item.type.startswith("aws:")]


def plan(config: Any, stack: str = "acme", *, preview: bool = False, cloud: Cloud | None = None) -> Plan:
    """What a stack file declares, sorted by type and name."""
    cloud = cloud or Cloud()
    monitor = Monitor(cloud)
    asyncio.set_event_loop(asyncio.new_event_loop())
    pulumi.runtime.set_mocks(cloud, project="lora-pods", stack=stack, preview=preview, monitor=monitor)
    keys = {f"lora-pods:{key}": str(value) for key, value in config.items()}
    pulumi.runtime.set_all_config(keys, [f"lora-pods:{key}" for key in SECRETS if key in config])
    engines: dict[str, Any] = {}

    def run() -> pulumi.Output[None]:
        deployment = Deployment("lora-pods", Described(config, stack), stack)
        return pulumi.Output.from_input(deployment.engines).apply(lambda found: engines.update(found or {}))

    try:
        pulumi.runtime.test(run)()  # type: ignore[no-untyped-call]
    finally:
        pulumi.runtime.set_all_config({}, [])
    declared = sorted(monitor.declared.values(), key=lambda item: (item.type, item.name))
    return Plan(tuple(declared), cloud.asked, engines)


def opened(value: Any) -> Any:
    """The value of a secret; it has to be one."""
    assert value[SECRET_SIGNATURE] == SECRET_VALUE
    return value["value"]


def _inputs(request: Any) -> dict[str, Any]:
    inputs: dict[str, Any] = pulumi.runtime.rpc.deserialize_properties(request.object)
    return inputs


def _name(reference: str) -> str:
    """The name of a resource by its URN, or by the provider's reference `<URN>::<id>`."""
    return reference.split("::", 3)[3].split("::")[0] if reference else ""
