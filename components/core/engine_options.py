"""What an engine is asked for: the adapters to serve, and what the stack file's `engine:` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from components.core.ec2_gpus import Gpus, gpus_of
from components.core.engine_args import Json
from components.core.slot_budget import Memory


@dataclass(frozen=True)
class PlannedAdapter:
    """One adapter to serve: the model id, `sha256:<hex>` of its bundle, and its largest real rank."""

    id: str
    digest: str
    rank: int


@dataclass(frozen=True)
class EngineOptions:
    """What the stack file's `engine:` says. None leaves the choice to the plan or to vLLM."""

    port: int
    listen: str = "127.0.0.1"
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    dtype: str | None = None
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    max_lora_rank: int | None = None
    args: Mapping[str, Json] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    device: Literal["gpu", "cpu"] = "gpu"
    vllm: str | None = None
    """The version that is pinned, if one is."""
    memory: Memory | None = None
    """What is known of the GPU's memory; None where the stack file says nothing of it."""
    instance_type: str | None = None
    """Of AWS, whose GPUs are known."""

    @property
    def gpus(self) -> Gpus | None:
        """What the instance type has; None where there is none, or none that is known."""
        return gpus_of(self.instance_type) if self.instance_type else None
