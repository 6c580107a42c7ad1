"""Runs the program against a recorder in Pulumi's place: every resource it registers, with its inputs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pulumi
from pulumi.runtime import MockCallArgs, MockResourceArgs, Mocks

from components.deployment import Deployment
from components.described import Described
from components.settings import SECRETS

UNKNOWN_PORT = 40022


@dataclass(frozen=True)
class Registered:
    type: str
    name: str
    inputs: dict[str, Any]


@dataclass(frozen=True)
class Last:
    engines: dict[str, Any]
    urns: Sequence[str]


class Recorder(Mocks):
    """`last` is what the last update left: its outputs, and the URNs of its resources; nobody asks, if not given."""

    def __init__(self, last: Last | None = None) -> None:
        self.registered: list[Registered] = []
        self._last = last

    def new_resource(self, args: MockResourceArgs) -> tuple[str | None, dict[Any, Any]]:
        self.registered.append(Registered(args.typ, args.name, args.inputs))
        outputs = dict(args.inputs)
        if args.typ == "command:remote:Command":
            outputs["stdout"] = '{"revision": 1}'
        if args.typ.endswith(":ReachedPod"):
            outputs.update(machine="0123 reached today", plugin_host_key="ecdsa-sha2-nistp256 AAAA")
        if args.typ.endswith(":SandboxContainer"):
            outputs.update(started="today", ssh_port=UNKNOWN_PORT, endpoint_port=UNKNOWN_PORT + 1)
        return f"{args.name}-id", outputs

    def call(self, args: MockCallArgs) -> tuple[dict[Any, Any], list[tuple[str, str]] | None]:
        if self._last is None:
            raise AssertionError(f"the program calls {args.token}")
        if args.token == "pulumi:pulumi:readStackOutputs":
            return {"name": args.args["name"], "outputs": {"engines": self._last.engines}}, []
        assert args.token == "pulumi:pulumi:readStackResourceOutputs"
        return {"name": args.args["stackName"], "outputs": {urn: {"outputs": {}} for urn in self._last.urns}}, []


def register(config: Any, stack: str = "acme", last: Last | None = None) -> tuple[list[Registered], dict[str, Any]]:
    """Everything a stack file registers, sorted by type and name, and what the program exports."""
    recorder = Recorder(last)
    # Pulumi's test mode wants the thread's own loop, which any `asyncio.run` before has taken away.
    asyncio.set_event_loop(asyncio.new_event_loop())
    pulumi.runtime.set_mocks(recorder, project="lora-pods", stack=stack)
    keys = {f"lora-pods:{key}": str(value) for key, value in config.items()}
    secret = [f"lora-pods:{key}" for key in SECRETS if key in config]
    pulumi.runtime.set_all_config(keys, secret)
    exported: dict[str, Any] = {}

    def run() -> pulumi.Output[None]:
        deployment = Deployment("lora-pods", Described(config, stack), stack)

        def keep(value: Any) -> None:
            exported["engines"] = value

        return pulumi.Output.from_input(deployment.engines).apply(keep)

    try:
        pulumi.runtime.test(run)()  # type: ignore[no-untyped-call]
    finally:
        pulumi.runtime.set_all_config({}, [])
    return sorted(recorder.registered, key=lambda item: (item.type, item.name)), exported
