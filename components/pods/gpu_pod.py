"""A pod: a machine of some kind, checked and given podctl, ready for bundles and an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pulumi

from components.core.engine_args import gpus_needed
from components.core.engine_plan import oldest_vllm
from components.core.naming import engine_key
from components.pods import host, sandbox
from components.pods.contract import Machine
from components.pods.reach import ReachedPod, tells_both_keys
from components.remote import Command, boot_command
from components.settings import Pod, Settings

Declared = TypeVar("Declared", bound=pulumi.Resource)


def switched_off(pod: Pod, settings: Settings) -> bool:
    """Whether the pod's machine is to be off. A host is not ours to switch off."""
    return not settings.running and pod.host is None


def pod_options(settings: Settings, opts: pulumi.ResourceOptions) -> dict[str, pulumi.ResourceOptions]:
    """By base, the options of its pod: with the provider of its cloud, which pods of one account and region share.

    Raises UserError for what a cloud would refuse or is missing here, before anything is made.
    """
    options = {pod.base: opts for pod in settings.pods}
    if any(pod.ec2 for pod in settings.pods):
        # Here, since pulumi-aws is installed only where a stack uses it.
        from components.pods import ec2

        for base, provider in ec2.providers(settings, opts).items():
            options[base] = pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(providers=[provider]))
    return options


class GpuPod(pulumi.ComponentResource):
    """One base's machine. `machine` is the contract; `prepared` is what everything put on it has to wait for.

    While it is `switched_off`, what lives on it is declared as the last update left it, whatever the stack file says
    meanwhile, and nothing is tried there.
    """

    machine: Machine
    prepared: Command | None
    switched_off: bool

    def __init__(
        self,
        pod: Pod,
        settings: Settings,
        stack: str,
        left: Collection[str] | None,
        opts: pulumi.ResourceOptions,
    ) -> None:
        """`left` names what the last update left on pods; it is asked only for one that is switched off.

        None where nobody can tell: then everything is taken to be there.
        """
        super().__init__("lora-pods:index:GpuPod", pod.base, {}, opts)
        self.switched_off, self._left = switched_off(pod, settings), left
        # An instance may be gone of which the state has these still: no destroy should wait for it to answer.
        self._never_undone = pod.ec2 is not None
        child = pulumi.ResourceOptions(parent=self)
        if pod.sandbox:
            self.machine = sandbox.machine(pod.sandbox, pod, settings, stack, child)
        elif pod.ec2:
            from components.pods import ec2

            self.machine = ec2.machine(pod.ec2, pod, settings, stack, child)
        else:
            assert pod.host is not None, "settings.Pod has exactly one kind"
            self.machine = host.machine(pod.host, pod, settings)
        self._hook = tells_both_keys(f"{pod.base}-other-host-key", self)
        key = engine_key(stack, pod.base)
        reached = ReachedPod(
            f"{pod.base}-reach",
            key,
            self.machine,
            not self.switched_off,
            pulumi.ResourceOptions.merge(
                self._options(parent=self, after=self.machine.ready),
                # Where somebody forces a replacement, the old one's delete must not take what the new one leads to.
                pulumi.ResourceOptions(delete_before_replace=True),
            ),
        )
        # What takes everything off the pod at once, and knows what to do where the pod is gone.
        self._goes_with = self.machine.resource or reached
        connection = replace(self.machine.connection, plugin_host_key=reached.plugin_host_key)
        identity = pulumi.Output.format("{0} {1}", self.machine.identity, reached.machine)
        self.machine = replace(self.machine, connection=connection, identity=identity)
        self.prepared = self.put(
            f"{pod.base}-prepare",
            lambda name: boot_command(
                name,
                self.machine.connection,
                {"identity": self.machine.identity, "needs": _needs(pod, key)},
                undo=("remove", []),
                opts=self.options(parent=self),
            ),
        )
        self.register_outputs({})

    def put(self, name: str, declare: Callable[[str], Declared]) -> Declared | None:
        """Declare what lives on this pod; None where the pod is switched off and never got it.

        Left out of the program while the pod has it, it would be undone there; declared while it has not, it would be
        done: either needs the machine.
        """
        absent = self.switched_off and self._left is not None and name not in self._left
        return None if absent else declare(name)

    def options(self, parent: pulumi.Resource, after: Sequence[pulumi.Resource | None] = ()) -> pulumi.ResourceOptions:
        """Options of what lives on this pod: where the machine goes with its resource, nothing is undone by hand."""
        options = self._options(parent, after)
        options.deleted_with = self._goes_with
        options.hooks = pulumi.ResourceHookBinding(on_error=[self._hook])
        if self.switched_off:
            options.ignore_changes = ["*"]
        return options

    def _options(self, parent: pulumi.Resource, after: Sequence[pulumi.Resource | None]) -> pulumi.ResourceOptions:
        there = [resource for resource in after if resource is not None]
        return pulumi.ResourceOptions(
            parent=parent,
            depends_on=there,
            deleted_with=self.machine.resource,
            retain_on_delete=self._never_undone or None,
        )


def _needs(pod: Pod, key: str) -> dict[str, Any]:
    engine, gpus = pod.engine, gpus_needed(pod.engine.args) or 1
    oldest = None if engine.vllm else oldest_vllm(engine.args)
    return {
        "base": pod.base if pod.base.startswith("/") else None,
        "diskGiB": engine.disk_gi_b or 1.0,
        "engine": key,
        "gpu": pod.device == "gpu",
        **({"gpus": gpus} if gpus > 1 and pod.device == "gpu" else {}),
        **({"proxy": True} if pod.proxied else {}),
        "python": None if engine.vllm else pod.python,
        # vLLM's workers share memory through it: a CPU engine was seen to need 160 MiB, and to die half a minute
        # into its start with less.
        "shmMiB": 160,
        "vllm": {"version": engine.vllm.version} if engine.vllm else None,
        **({"vllmAtLeast": oldest} if oldest else {}),
        **({"cloudInit": True} if pod.ec2 else {}),
    }
