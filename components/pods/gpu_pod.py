"""A pod: a machine of some kind, checked and given podctl, ready for bundles and an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pulumi

from components.core.naming import engine_key
from components.pods import host, sandbox
from components.pods.contract import Machine
from components.pods.reach import ReachedPod
from components.remote import Command, boot_command
from components.settings import Pod, Settings


class GpuPod(pulumi.ComponentResource):
    """One base's machine. `machine` is the contract; `prepared` is what everything put on it has to wait for."""

    machine: Machine
    prepared: Command

    def __init__(self, pod: Pod, settings: Settings, stack: str, opts: pulumi.ResourceOptions) -> None:
        super().__init__("lora-pods:index:GpuPod", pod.base, {}, opts)
        child = pulumi.ResourceOptions(parent=self)
        if pod.sandbox:
            self.machine = sandbox.machine(pod.sandbox, pod, settings, stack, child)
        elif pod.ec2:
            # Here, since pulumi-aws is installed only where a stack uses it.
            from components.pods import ec2

            self.machine = ec2.machine(pod.ec2, pod, settings, stack, child)
        else:
            assert pod.host is not None, "settings.Pod has exactly one kind"
            self.machine = host.machine(pod.host, pod, settings)
        key = engine_key(stack, pod.base)
        after = self.options(parent=self, after=self.machine.ready)
        reached = ReachedPod(f"{pod.base}-reach", key, self.machine, after)
        connection = replace(self.machine.connection, plugin_host_key=reached.plugin_host_key)
        identity = pulumi.Output.format("{0} {1}", self.machine.identity, reached.machine)
        self.machine = replace(self.machine, connection=connection, identity=identity)
        self.prepared = boot_command(
            f"{pod.base}-prepare",
            self.machine.connection,
            {"identity": self.machine.identity, "needs": _needs(pod, key)},
            undo=("remove", []),
            opts=self.options(parent=self),
        )
        self.register_outputs({})

    def options(self, parent: pulumi.Resource, after: tuple[pulumi.Resource, ...] = ()) -> pulumi.ResourceOptions:
        """Options of what lives on this pod: where the machine goes with its resource, nothing is undone by hand."""
        return pulumi.ResourceOptions(parent=parent, depends_on=list(after), deleted_with=self.machine.resource)


def _needs(pod: Pod, key: str) -> dict[str, Any]:
    engine = pod.engine
    return {
        "base": pod.base if pod.base.startswith("/") else None,
        "diskGiB": engine.disk_gi_b or 1.0,
        "engine": key,
        "gpu": pod.device == "gpu",
        "python": None if engine.vllm else pod.python,
        # vLLM's workers share memory through it: a CPU engine was seen to need 160 MiB, and to die half a minute
        # into its start with less.
        "shmMiB": 160,
        "vllm": {"version": engine.vllm.version} if engine.vllm else None,
    }
