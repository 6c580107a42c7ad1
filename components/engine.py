"""The engine of a pod: its plan rendered as a unit, its secrets apart from it, and the proof that it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pulumi

from components.certificate import Tls
from components.core.digest_cache import BundleFacts
from components.core.engine_options import EngineOptions, PlannedAdapter
from components.core.engine_plan import EnginePlan, plan_engine
from components.core.errors import printable
from components.core.naming import blob_path, engine_key, proxy_unit_name, unit_name, url_host
from components.core.slot_budget import Memory
from components.pods.gpu_pod import GpuPod
from components.remote import pod_command, result, told
from components.render import ProxyTexts, render_proxy, render_unit
from components.settings import Pod, Settings


@dataclass(frozen=True)
class PlannedEngine:
    """An engine as it will be: its key (`naming.engine_key`), its plan, and its unit's whole text.

    `proxy` stands before it where other machines reach it, and shows `tls`.
    """

    key: str
    plan: EnginePlan
    unit: str
    proxy: ProxyTexts | None = None
    tls: Tls | None = None


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
                {"engine": key, "identity": machine.identity, "secrets": _secrets(settings), **_tls_key(planned)},
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
                    "port": pod.vllm_port,
                    "unit": {"name": unit_name(key), "text": planned.unit},
                    "ready": {
                        "url": f"http://{_reached_at(pod.vllm_listen)}:{pod.vllm_port}",
                        "models": dict(plan.served),
                        "timeoutSeconds": pod.engine.ready_timeout_seconds,
                        **_probe(pod, settings),
                    },
                    "secretsRevision": self.secrets.apply(lambda answer: answer.get("revision")),
                    **_proxy(planned, pod),
                },
                undo=("deactivate", ["--engine", key]),
                opts=on.options(self, after=(placed,)),
            ),
        )
        self.activated = told(activate) if activate else _nothing()
        if pod.proxied and planned.tls is None:
            pulumi.log.warn(
                f"{printable(pod.listen)}:{pod.engine.port} has no TLS: the API key, questions and answers can be "
                "read on the way. Give engine.tls a certificate, unless only a network of your own reaches it.",
                resource=self,
            )
        self.register_outputs({})


def planned_engine(
    stack: str,
    pod: Pod,
    bundles: Mapping[str, BundleFacts],
    aliases: Sequence[str],
    memory: Memory | None = None,
    tls: Tls | None = None,
) -> PlannedEngine:
    """Plan and render a pod's engine. Raises UserError for what vLLM would refuse or systemd could not pass on."""
    engine, key = pod.engine, engine_key(stack, pod.base)
    plan = plan_engine(
        pod.base,
        pod.python,
        [PlannedAdapter(model, facts.digest, facts.rank) for model, facts in bundles.items()],
        aliases,
        EngineOptions(
            port=pod.vllm_port,
            listen=pod.vllm_listen,
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
            instance_type=pod.ec2.instance_type if pod.ec2 else None,
        ),
        blob_path,
    )
    on_ec2 = pod.ec2 is not None
    proxy = (
        render_proxy(
            pod.base,
            key=key,
            listen=pod.listen,
            port=engine.port,
            inner_port=pod.vllm_port,
            tls_key=tls.name if tls else None,
            on_ec2=on_ec2,
        )
        if pod.proxied
        else None
    )
    return PlannedEngine(key, plan, render_unit(plan, key=key, on_ec2=on_ec2), proxy, tls)


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


def _tls_key(planned: PlannedEngine) -> dict[str, Any]:
    return {"tls": {"name": planned.tls.name, "key": planned.tls.key}} if planned.tls else {}


def _proxy(planned: PlannedEngine, pod: Pod) -> dict[str, Any]:
    """What podctl is to put before the engine. Left out where there is nothing: such stacks have no difference."""
    if planned.proxy is None:
        return {}
    return {
        "proxy": {
            "unit": {"name": proxy_unit_name(planned.key), "text": planned.proxy.unit},
            "config": planned.proxy.config,
            "certificate": planned.tls.certificate if planned.tls else None,
            "port": pod.engine.port,
            "url": f"{pod.scheme}://{_reached_at(pod.listen)}:{pod.engine.port}",
        }
    }


def _reached_at(listen: str) -> str:
    """The address at which the pod itself reaches what listens at `listen`."""
    return url_host({"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}.get(listen, listen))
