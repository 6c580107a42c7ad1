"""The engine of a pod: its plan rendered as a unit, its secrets apart from it, and the proof that it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pulumi

from components.core.digest_cache import BundleFacts
from components.core.engine_plan import EngineOptions, EnginePlan, PlannedAdapter, plan_engine
from components.core.naming import blob_path, engine_key, unit_name, url_host
from components.core.slot_budget import Memory
from components.pods.gpu_pod import GpuPod
from components.remote import pod_command, result, told
from components.render import render_unit
from components.settings import LOOPBACK, Pod, Settings


@dataclass(frozen=True)
class PlannedEngine:
    """An engine as it will be: its key (`naming.engine_key`), its plan, and its unit's whole text."""

    key: str
    plan: EnginePlan
    unit: str


class VllmEngine(pulumi.ComponentResource):
    """One vLLM under one systemd unit, serving a base and every adapter of every model that names it.

    `secrets` is what the secrets' command answered, `activated` the document that the last activation succeeded with;
    both are empty on a pod that was switched off before it had them.
    """

    secrets: pulumi.Output[dict[str, Any]]
    activated: pulumi.Output[dict[str, Any]]

    def __init__(
        self,
        planned: PlannedEngine,
        pod: Pod,
        on: GpuPod,
        settings: Settings,
        stack: str,
        placed: pulumi.Resource | None,
        opts: pulumi.ResourceOptions,
    ) -> None:
        super().__init__("lora-pods:index:VllmEngine", pod.base, {}, opts)
        machine, key, plan = on.machine, planned.key, planned.plan
        secrets = on.put(
            f"{pod.base}-secrets",
            lambda name: pod_command(
                name,
                machine.connection,
                "secrets",
                {"engine": key, "identity": machine.identity, "secrets": _secrets(settings)},
                undo=("unsecret", ["--engine", key]),
                opts=on.options(self, after=(on.prepared,)),
                secret=True,
                logged=False,
            ),
        )
        self.secrets = result(secrets) if secrets else _nothing()
        activate = on.put(
            f"{pod.base}-activate",
            lambda name: pod_command(
                name,
                machine.connection,
                "activate",
                {
                    "stack": stack,
                    "engine": key,
                    "identity": machine.identity,
                    "port": pod.engine.port,
                    "unit": {"name": unit_name(key), "text": planned.unit},
                    "ready": {
                        "url": f"http://{_reached_at(pod.listen)}:{pod.engine.port}",
                        "models": dict(plan.served),
                        "timeoutSeconds": pod.engine.ready_timeout_seconds,
                        **_probe(pod, settings),
                    },
                    "secretsRevision": self.secrets.apply(lambda answer: answer.get("revision")),
                },
                undo=("deactivate", ["--engine", key]),
                opts=on.options(self, after=(placed,)),
            ),
        )
        self.activated = told(activate) if activate else _nothing()
        if not pod.sandbox and pod.listen not in LOOPBACK:
            pulumi.log.warn(
                f"{pod.listen}:{pod.engine.port} is open to whoever reaches the machine, and vLLM asks for the API key "
                "on /v1 alone: others of its routes answer without. Put a proxy or a firewall before it.",
                resource=self,
            )
        self.register_outputs({})


def planned_engine(
    stack: str, pod: Pod, bundles: Mapping[str, BundleFacts], aliases: Sequence[str], memory: Memory | None = None
) -> PlannedEngine:
    """Plan and render a pod's engine. Raises UserError for what vLLM would refuse or systemd could not pass on."""
    engine, key = pod.engine, engine_key(stack, pod.base)
    plan = plan_engine(
        pod.base,
        pod.python,
        [PlannedAdapter(model, facts.digest, facts.rank) for model, facts in bundles.items()],
        aliases,
        EngineOptions(
            port=engine.port,
            listen=pod.listen,
            max_model_len=engine.max_model_len,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            dtype=engine.dtype,
            max_loras=engine.max_loras,
            max_cpu_loras=engine.max_cpu_loras,
            max_lora_rank=engine.max_lora_rank,
            args=engine.args,
            env=engine.env,
            device=pod.device,
            vllm=pod.vllm_version,
            memory=memory,
        ),
        blob_path,
    )
    return PlannedEngine(key, plan, render_unit(plan, key=key, on_ec2=pod.ec2 is not None))


def _nothing() -> pulumi.Output[dict[str, Any]]:
    return pulumi.Output.from_input({})


def _probe(pod: Pod, settings: Settings) -> dict[str, Any]:
    """What podctl is to prove of the adapters once they are served; nothing where it need not or there are none."""
    adapters = [model for model in settings.models if model.base == pod.base and model.adapter]
    if not pod.engine.probe or not adapters:
        return {}
    return {"probe": {"base": pod.base, "mayEqualBase": [model.id for model in adapters if model.may_equal_base]}}


def _secrets(settings: Settings) -> dict[str, str]:
    """The engine's environment that nobody but root may read, under the names that vLLM and huggingface_hub know."""
    given = {"VLLM_API_KEY": settings.api_key, "HF_TOKEN": settings.hf_token}
    return {name: value for name, value in given.items() if value is not None}


def _reached_at(listen: str) -> str:
    """The address at which the pod itself reaches what listens at `listen`."""
    return url_host({"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}.get(listen, listen))
