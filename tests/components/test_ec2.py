"""`ec2` pods as they are declared: every resource with every argument, and what of it a change may touch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulumi
import pytest

from components.core.errors import UserError
from components.core.ssh_key import fingerprint
from tests.components.test_graph import project
from tests.components.test_settings import Config
from tests.support.ec2 import (
    CLIENT_KEY,
    CLIENT_KEY_PUBLIC,
    EC2,
    HOST_KEY,
    HOST_KEY_PUBLIC,
    PRIVATE_IP,
    PUBLIC_IP,
    SUBNET,
    TODAYS_AMI,
    VPC,
    Cloud,
    opened,
    plan,
)
from tests.support.pulumi_aws import need_pulumi_aws

need_pulumi_aws()

from components.pods.ec2 import aws_name  # noqa: E402
from components.pods.keys import new_key  # noqa: E402

__all__ = ["project"]

pytestmark = [
    pytest.mark.usefixtures("project"),
    # pulumi-aws warns of a class of its own that nobody here uses.
    pytest.mark.filterwarnings("ignore:aws.ec2/:DeprecationWarning"),
]

BASE = "org/base"
NAME = "lora-pods-acme-org-base-58c52390"
TAGS = {"Name": NAME, "lora-pods:stack": "acme", "lora-pods:base": BASE}
ANYWHERE = {"cidrBlocks": ["0.0.0.0/0"], "ipv6CidrBlocks": ["::/0"]}
AMI_PARAMETER = "/aws/service/deeplearning/ami/{}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"


def pod(base: str = BASE, engine: dict[str, Any] | None = None, **ec2: Any) -> dict[str, Any]:
    return {"base": base, "ec2": {**EC2, **ec2}, "engine": {"vllm": {"version": "0.33.0"}, **(engine or {})}}


def stack_file(*pods: dict[str, Any], **more: Any) -> Config:
    return Config({"pods": list(pods) or [pod()], "models": [], "sshPrivateKey": CLIENT_KEY, **more})


def tcp(port: int, description: str, **networks: Any) -> dict[str, Any]:
    return {"protocol": "tcp", "fromPort": port, "toPort": port, "description": description, **networks}


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    warned: list[str] = []
    monkeypatch.setattr(pulumi.log, "warn", lambda text, **_: warned.append(text))
    return warned


def test_every_resource_and_every_argument() -> None:
    planned = plan(stack_file())
    assert [(item.type, item.name, item.inputs) for item in planned.of_aws()] == [
        ("aws:ec2/eip:Eip", "org/base-address", {"domain": "vpc", "tags": TAGS}),
        (
            "aws:ec2/eipAssociation:EipAssociation",
            "org/base-association",
            {"allocationId": "eipalloc-1", "instanceId": "org/base-instance-id"},
        ),
        (
            "aws:ec2/instance:Instance",
            "org/base-instance",
            {
                "ami": TODAYS_AMI["x86_64"],
                "instanceType": "g6e.xlarge",
                "keyName": NAME,
                "vpcSecurityGroupIds": ["org/base-security-group-id"],
                "metadataOptions": {"httpEndpoint": "enabled", "httpTokens": "required", "httpPutResponseHopLimit": 1},
                "rootBlockDevice": {
                    "volumeType": "gp3",
                    "volumeSize": 200,
                    "encrypted": True,
                    "deleteOnTermination": True,
                    "tags": TAGS,
                },
                "userData": planned.one("Instance").inputs["userData"],
                "tags": TAGS,
            },
        ),
        (
            "aws:ec2/keyPair:KeyPair",
            "org/base-key-pair",
            {"keyName": NAME, "publicKey": CLIENT_KEY_PUBLIC, "tags": TAGS},
        ),
        (
            "aws:ec2/securityGroup:SecurityGroup",
            "org/base-security-group",
            {
                "namePrefix": f"{NAME}-",
                "description": "A pod of lora-pods",
                "ingress": [tcp(22, "SSH", cidrBlocks=["203.0.113.7/32"])],
                "egress": [tcp(443, "HTTPS", **ANYWHERE), tcp(80, "HTTP, for the system", **ANYWHERE)],
                "tags": TAGS,
            },
        ),
        (
            "aws:ec2transitgateway/instanceState:InstanceState",
            "org/base-state",
            {"instanceId": "org/base-instance-id", "state": "running"},
        ),
    ]
    # What is skipped is of the package's own choice.
    provider = {key: value for key, value in planned.one("aws").inputs.items() if not key.startswith("skip")}
    assert provider == {"region": "eu-central-1"}
    assert planned.asked == [
        ("aws:ssm/getParameter:getParameter", {"name": AMI_PARAMETER.format("x86_64")}, "aws-eu-central-1")
    ]


def test_types_and_names_of_all_that_an_ec2_pod_is() -> None:
    """They are in every stack's state: a change here is a migration, with an alias and a line in docs/naming.md."""
    planned = plan(stack_file(store="s3://acme/bundles"))
    assert [(item.type, item.name) for item in planned.declared if item.type.split(":")[0] != "command"] == [
        ("aws:ec2/eip:Eip", "org/base-address"),
        ("aws:ec2/eipAssociation:EipAssociation", "org/base-association"),
        ("aws:ec2/instance:Instance", "org/base-instance"),
        ("aws:ec2/keyPair:KeyPair", "org/base-key-pair"),
        ("aws:ec2/securityGroup:SecurityGroup", "org/base-security-group"),
        ("aws:ec2transitgateway/instanceState:InstanceState", "org/base-state"),
        ("aws:iam/instanceProfile:InstanceProfile", "org/base-profile"),
        ("aws:iam/role:Role", "org/base-role"),
        ("aws:iam/rolePolicy:RolePolicy", "org/base-store"),
        ("lora-pods:index:Deployment", "lora-pods"),
        ("lora-pods:index:GpuPod", "org/base"),
        ("lora-pods:index:PlacedBundles", "org/base"),
        ("lora-pods:index:VllmEngine", "org/base"),
        ("pulumi-python:dynamic/lora-pods:BundleUpload", "org/base-upload"),
        ("pulumi-python:dynamic/lora-pods:HostKey", "org/base-host-key"),
        ("pulumi-python:dynamic/lora-pods:ReachedPod", "org/base-reach"),
        ("pulumi:providers:aws", "aws-eu-central-1"),
    ]


def test_cloud_init_installs_the_host_key_and_no_other_and_the_state_has_it_encrypted() -> None:
    instance = plan(stack_file()).one("Instance")
    first, config = opened(instance.inputs["userData"]).split("\n", 1)
    assert first == "#cloud-config"
    assert json.loads(config) == {
        "ssh_deletekeys": True,
        "ssh_keys": {"ed25519_private": HOST_KEY, "ed25519_public": HOST_KEY_PUBLIC},
        "package_update": True,
        "packages": ["python3-venv", "python3-dev"],
    }
    assert instance.secret_outputs == ("userData",)
    assert plan(stack_file()).one("HostKey").secret_outputs == ("private_key",)


def test_no_private_key_is_anywhere_but_in_secrets() -> None:
    planned = plan(stack_file(store="s3://acme/bundles"))
    for item in planned.declared:
        inputs = dict(item.inputs)
        if item.type == "command:remote:Command":
            opened(inputs.pop("connection"))
        if item.type == "aws:ec2/instance:Instance":
            opened(inputs.pop("userData"))
        for key in (HOST_KEY, CLIENT_KEY):
            assert key.splitlines()[1] not in json.dumps(inputs)


def test_the_first_connection_is_pinned_and_waits_for_the_machine() -> None:
    planned = plan(stack_file())
    reach = planned.one("ReachedPod")
    assert reach.inputs["connection"] == {
        "address": PUBLIC_IP,
        "port": 22,
        "user": "ubuntu",
        "hostKey": HOST_KEY_PUBLIC,
        "credential": "config:sshPrivateKey",
    }
    assert reach.inputs["patience"] == 600
    assert {"org/base-state", "org/base-association"} <= reach.after
    (prepare,) = [item for item in planned.declared if item.name == "org/base-prepare"]
    identity = json.loads(prepare.inputs["stdin"])["identity"]
    assert identity == f"{fingerprint(HOST_KEY_PUBLIC)} org/base-instance-id 0123 reached"


def test_nothing_on_the_machine_is_undone_by_hand() -> None:
    """All of it goes with the machine, also where somebody else ended it: then a destroy would wait for it in vain."""
    on_it = [item for item in plan(stack_file()).declared if item.type.split(":")[-1] in ("Command", "BundleUpload")]
    assert len(on_it) == 5
    assert {(item.deleted_with, item.retained) for item in on_it} == {("org/base-instance", True)}


def test_a_rotated_key_makes_another_key_pair_and_nothing_else_of_aws() -> None:
    private, public = new_key()
    before, after = plan(stack_file()), plan(stack_file(sshPrivateKey=private))
    changed = [(old, new) for old, new in zip(before.of_aws(), after.of_aws(), strict=True) if old != new]
    ((old, new),) = changed
    assert old.type == "aws:ec2/keyPair:KeyPair"
    assert {**old.inputs, "publicKey": public} == new.inputs
    assert new.delete_before_replace, "its name is the old one's"
    instance = after.one("Instance")
    assert "org/base-key-pair" in instance.after, "an instance cannot be made before its key pair"
    assert "org/base-key-pair" not in instance.reads, "and a key pair that is replaced would replace it"


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("RSA", ["-t", "rsa", "-b", "2048"]), ("PEM", ["-t", "rsa", "-b", "2048", "-m", "PEM"])],
)
def test_rsa_keys_are_taken_as_well(keygen: Callable[..., tuple[str, str]], kind: str, arguments: list[str]) -> None:
    private, public = keygen(*arguments)
    assert plan(stack_file(sshPrivateKey=private)).one("KeyPair").inputs["publicKey"] == public


def test_a_key_that_ec2_does_not_take_is_told_before_anything_is_declared(
    keygen: Callable[..., tuple[str, str]],
) -> None:
    private, _ = keygen("-t", "ecdsa")
    cloud = Cloud()
    with pytest.raises(UserError) as caught:
        plan(stack_file(sshPrivateKey=private), cloud=cloud)
    assert str(caught.value) == (
        "lora-pods:sshPrivateKey is neither an Ed25519 nor an RSA key, and EC2 takes no others: make one with "
        "`ssh-keygen -t ed25519`"
    )
    assert cloud.made == ["lora-pods:index:Deployment"]


def test_todays_ami_is_for_instances_that_are_made_later() -> None:
    assert plan(stack_file()).one("Instance").ignored == ("userData", "associatePublicIpAddress", "ami")


def test_an_ami_that_is_named_is_another_machine_when_it_changes() -> None:
    planned = plan(stack_file(pod(ami="ami-0123456789abcdef0")))
    assert planned.one("Instance").inputs["ami"] == "ami-0123456789abcdef0"
    assert planned.one("Instance").ignored == ("userData", "associatePublicIpAddress")
    assert planned.asked == []


def test_an_arm_instance_has_the_arm_ami() -> None:
    planned = plan(stack_file(pod(instanceType="g5g.xlarge")))
    assert planned.one("Instance").inputs["ami"] == TODAYS_AMI["arm64"]
    assert planned.asked[0][1] == {"name": AMI_PARAMETER.format("arm64")}


def test_two_pods_of_a_region_share_a_provider() -> None:
    planned = plan(stack_file(pod(), pod("org/other")))
    assert [item.name for item in planned.declared if item.type == "pulumi:providers:aws"] == ["aws-eu-central-1"]
    assert {item.provider for item in planned.of_aws()} == {"aws-eu-central-1"}
    assert {item.inputs["keyName"] for item in planned.of_aws() if "keyName" in item.inputs} == {
        NAME,
        aws_name("acme", "org/other"),
    }


def test_regions_and_profiles_have_a_provider_each() -> None:
    pods = [pod(), pod("org/us", region="us-east-1"), pod("org/ops", profile="ops")]
    planned = plan(stack_file(*pods))
    providers = {item.name: item.inputs for item in planned.declared if item.type == "pulumi:providers:aws"}
    assert {name: (inputs["region"], inputs.get("profile")) for name, inputs in providers.items()} == {
        "aws-eu-central-1": ("eu-central-1", None),
        "aws-us-east-1": ("us-east-1", None),
        "aws-ops-eu-central-1": ("eu-central-1", "ops"),
    }
    assert planned.one("Instance", "org/us").provider == "aws-us-east-1"
    assert planned.one("Instance", "org/ops").provider == "aws-ops-eu-central-1"
    assert sorted(provider for _, _, provider in planned.asked) == sorted(providers)


@pytest.mark.parametrize(
    ("region", "store", "bundles"),
    [
        ("eu-central-1", "s3://acme/bundles", "arn:aws:s3:::acme/bundles/sha256/*"),
        ("eu-central-1", "s3://acme", "arn:aws:s3:::acme/sha256/*"),
        ("cn-north-1", "s3://acme/bundles", "arn:aws-cn:s3:::acme/bundles/sha256/*"),
        ("eu-central-1", "s3://acme/a*b", "arn:aws:s3:::acme/a${*}b/sha256/*"),
    ],
)
def test_with_a_store_an_instance_may_read_its_bundles_and_nothing_else(region: str, store: str, bundles: str) -> None:
    planned = plan(stack_file(pod(region=region), store=store))
    name = f"{NAME}-{region}"
    assert planned.one("Instance").inputs["iamInstanceProfile"] == name
    assert planned.one("InstanceProfile").inputs == {"name": name, "role": name, "tags": TAGS}
    role = planned.one("Role").inputs
    assert {**role, "assumeRolePolicy": json.loads(role["assumeRolePolicy"])} == {
        "name": name,
        "assumeRolePolicy": {
            "Version": "2012-10-17",
            "Statement": [
                {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
            ],
        },
        "tags": TAGS,
    }
    policy = planned.one("RolePolicy").inputs
    assert {**policy, "policy": json.loads(policy["policy"])} == {
        "name": "store",
        "role": name,
        "policy": {
            "Version": "2012-10-17",
            "Statement": [{"Effect": "Allow", "Action": "s3:GetObject", "Resource": bundles}],
        },
    }


@pytest.mark.parametrize("more", [{}, {"store": "s3://acme?endpoint=https://minio.example:9000"}])
def test_without_a_store_of_aws_an_instance_has_no_rights(more: dict[str, Any]) -> None:
    planned = plan(stack_file(**more))
    assert [item.name for item in planned.of_aws() if item.type.startswith("aws:iam")] == []
    assert "iamInstanceProfile" not in planned.one("Instance").inputs


@pytest.mark.parametrize(
    ("endpoint", "ports"),
    [("https://minio.example:9000", [443, 80, 9000]), ("https://minio.example", [443, 80]), ("http://m:80", [443, 80])],
)
def test_an_instance_gets_out_to_the_port_of_the_store(endpoint: str, ports: list[int]) -> None:
    group = plan(stack_file(store=f"s3://acme?endpoint={endpoint}")).one("SecurityGroup")
    assert [rule["fromPort"] for rule in group.inputs["egress"]] == ports


def test_the_engine_is_open_to_whom_is_named() -> None:
    engine = {"listen": "0.0.0.0", "port": 8001}
    planned = plan(stack_file(pod(engine=engine, engineCidr="10.0.0.0/8"), apiKey="k" * 20))
    assert planned.one("SecurityGroup").inputs["ingress"] == [
        tcp(22, "SSH", cidrBlocks=["203.0.113.7/32"]),
        tcp(8001, "The engine", cidrBlocks=["10.0.0.0/8"]),
    ]
    assert planned.engines[BASE]["endpoint"] == f"http://{PUBLIC_IP}:8001/v1"


def test_an_engine_on_loopback_is_reached_there() -> None:
    engine = plan(stack_file()).engines[BASE]
    assert (engine["endpoint"], engine["ssh"]) == ("http://127.0.0.1:8000/v1", f"ubuntu@{PUBLIC_IP}")


def test_the_world_is_let_in_where_it_is_written_so_and_told_once(warned: list[str]) -> None:
    told = "ec2.sshCidr of org/base is 0.0.0.0/0: the whole internet may try to log in. Name the network it is for."
    open_to_all = stack_file(pod(sshCidr="0.0.0.0/0"))
    (rule,) = plan(open_to_all).one("SecurityGroup").inputs["ingress"]
    assert rule == tcp(22, "SSH", cidrBlocks=["0.0.0.0/0"])
    assert warned == []
    plan(open_to_all, preview=True)
    assert warned == [told]


def test_nobody_is_warned_of_a_network(warned: list[str]) -> None:
    plan(stack_file(), preview=True)
    assert warned == []


def test_in_a_subnet_the_security_group_is_of_its_vpc() -> None:
    planned = plan(stack_file(pod(subnetId=SUBNET)))
    assert planned.one("SecurityGroup").inputs["vpcId"] == VPC
    assert planned.one("Instance").inputs["subnetId"] == SUBNET
    assert "associatePublicIpAddress" not in planned.one("Instance").inputs
    assert ("aws:ec2/getSubnet:getSubnet", {"id": SUBNET}, "aws-eu-central-1") in planned.asked


def test_without_a_public_address_it_is_reached_at_its_private_one() -> None:
    planned = plan(stack_file(pod(subnetId=SUBNET, publicIp=False, user="admin")))
    assert [item.name for item in planned.of_aws() if "eip" in item.type] == []
    assert planned.one("Instance").inputs["associatePublicIpAddress"] is False
    connection = planned.one("ReachedPod").inputs["connection"]
    assert (connection["address"], connection["user"]) == (PRIVATE_IP, "admin")


def test_a_spot_instance_can_be_stopped() -> None:
    assert plan(stack_file(pod(spot=True))).one("Instance").inputs["instanceMarketOptions"] == {
        "marketType": "spot",
        "spotOptions": {"spotInstanceType": "persistent", "instanceInterruptionBehavior": "stop"},
    }


def test_switched_off_it_is_stopped_and_all_else_of_aws_stays() -> None:
    on, off = plan(stack_file()), plan(stack_file(running=False))
    changed = {new.name: new for old, new in zip(on.of_aws(), off.of_aws(), strict=True) if old != new}
    assert set(changed) == {"org/base-state", "org/base-instance"}
    assert changed["org/base-state"].inputs["state"] == "stopped"
    instance = changed["org/base-instance"]
    assert (instance.inputs, instance.ignored) == (on.one("Instance").inputs, ("*",)), "a change would switch it on"


def test_another_type_is_another_start_and_one_of_a_spot_instance_another_machine() -> None:
    before, after = plan(stack_file()), plan(stack_file(pod(instanceType="g6e.2xlarge")))
    assert before.one("ReachedPod").inputs["incarnation"] == "org/base-instance-id g6e.xlarge"
    assert after.one("ReachedPod").inputs["incarnation"] == "org/base-instance-id g6e.2xlarge"
    assert before.one("ReachedPod").inputs["connection"] == after.one("ReachedPod").inputs["connection"]
    assert plan(stack_file(pod(spot=True))).one("Instance").replaced_on == ("instanceType",)
    assert before.one("Instance").replaced_on == ()
    assert before.one("Instance").delete_before_replace, "two would need twice the quota"


def test_the_engine_cannot_ask_the_metadata_service() -> None:
    planned = plan(stack_file())
    (activate,) = [item for item in planned.declared if item.name == "org/base-activate"]
    unit = json.loads(activate.inputs["stdin"])["unit"]["text"]
    assert "\nIPAddressDeny=169.254.169.254 fd00:ec2::254\n" in unit


def test_names_and_tags_are_what_aws_takes() -> None:
    base = "Ünï/" + "long-" * 60 + "<base>&\t"
    instance = plan(stack_file(pod(base.strip())), stack="s" * 60).one("Instance")
    assert instance.inputs["keyName"] == "lora-pods-" + "s" * 45 + "-" + instance.inputs["keyName"][-8:]
    assert len(instance.inputs["keyName"]) == 64
    assert instance.inputs["tags"]["lora-pods:base"] == ("Ünï/" + "long-" * 60)[:256]
    assert aws_name("s" * 60, "a") != aws_name("s" * 60, "b")


def test_a_tag_keeps_what_it_may_hold() -> None:
    tags = plan(stack_file(pod("a<b>&c=d+e@f:g"))).one("Instance").inputs["tags"]
    assert tags["lora-pods:base"] == "a_b__c=d+e@f:g"


def test_without_pulumi_aws_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pulumi_aws", None)
    monkeypatch.delitem(sys.modules, "components.pods.ec2")
    monkeypatch.delattr("components.pods.ec2")
    cloud = Cloud()
    with pytest.raises(UserError) as caught:
        plan(stack_file(), cloud=cloud)
    assert str(caught.value) == (
        "a pod is of the kind `ec2`, and pulumi-aws is not installed: run `./dev setup --with aws`"
    )
    assert cloud.made == ["lora-pods:index:Deployment"]


@pytest.fixture
def keygen(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    def make(*arguments: str) -> tuple[str, str]:
        path = tmp_path / "made"
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", str(path), *arguments], check=True)
        return path.read_text(), " ".join((tmp_path / "made.pub").read_text().split()[:2])

    return make
