"""What GPUs an EC2 instance type has, and how much memory each of them.

Source: what `aws ec2 describe-instance-types` answers, as moto 5.2.5 carries it along (moto/ec2/resources), read on
2026-11-30; `tests/unit/test_ec2_gpus.py` holds the table against it. Left out are types with a fraction of a GPU (g6f,
gr6f), which need NVIDIA's vGPU driver, and V100s (p3), for which the open driver of the AMI is too new.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True)
class Gpu:
    """One GPU. `memory_mib` is what AWS says it has, of which driver and CUDA keep some hundred MiB."""

    name: str
    architecture: str
    memory_mib: int


@dataclass(frozen=True)
class Gpus:
    """What an instance type has: `count` GPUs of one kind."""

    count: int
    gpu: Gpu


_T4 = Gpu("T4", "Turing", 16384)
_T4G = Gpu("T4g", "Turing", 16384)
_A10G = Gpu("A10G", "Ampere", 22888)
_A100 = Gpu("A100", "Ampere", 40960)
_A100_80 = Gpu("A100", "Ampere", 81920)
_L4 = Gpu("L4", "Ada Lovelace", 22888)
_L40S = Gpu("L40S", "Ada Lovelace", 45776)
_H100 = Gpu("H100", "Hopper", 81920)
_H200 = Gpu("H200", "Hopper", 144384)
_PRO_4500 = Gpu("RTX PRO 4500", "Blackwell", 32768)
_PRO_6000 = Gpu("RTX PRO Server 6000", "Blackwell", 98304)
_B200 = Gpu("B200", "Blackwell", 183359)
_B300 = Gpu("B300", "Blackwell", 275040)

# By family: the GPU, and the sizes that have one, two, four or eight of it.
_FAMILIES: Mapping[str, tuple[Gpu, Mapping[int, str]]] = {
    "g4dn": (_T4, {1: "xlarge 2xlarge 4xlarge 8xlarge 16xlarge", 4: "12xlarge", 8: "metal"}),
    "g5": (_A10G, {1: "xlarge 2xlarge 4xlarge 8xlarge 16xlarge", 4: "12xlarge 24xlarge", 8: "48xlarge"}),
    "g5g": (_T4G, {1: "xlarge 2xlarge 4xlarge 8xlarge", 2: "16xlarge metal"}),
    "g6": (_L4, {1: "xlarge 2xlarge 4xlarge 8xlarge 16xlarge", 4: "12xlarge 24xlarge", 8: "48xlarge"}),
    "g6e": (_L40S, {1: "xlarge 2xlarge 4xlarge 8xlarge 16xlarge", 4: "12xlarge 24xlarge", 8: "48xlarge"}),
    "g7": (_PRO_4500, {1: "2xlarge 4xlarge 8xlarge", 2: "12xlarge", 4: "24xlarge", 8: "48xlarge"}),
    "g7e": (_PRO_6000, {1: "2xlarge 4xlarge 8xlarge", 2: "12xlarge", 4: "24xlarge", 8: "48xlarge"}),
    "gr6": (_L4, {1: "4xlarge 8xlarge"}),
    "p4d": (_A100, {8: "24xlarge"}),
    "p4de": (_A100_80, {8: "24xlarge"}),
    "p5": (_H100, {1: "4xlarge", 8: "48xlarge"}),
    "p5e": (_H200, {8: "48xlarge"}),
    "p5en": (_H200, {8: "48xlarge"}),
    "p6-b200": (_B200, {8: "48xlarge"}),
    "p6-b300": (_B300, {8: "48xlarge"}),
}

GPUS: Mapping[str, Gpus] = MappingProxyType(
    {
        f"{family}.{size}": Gpus(count, gpu)
        for family, (gpu, counts) in _FAMILIES.items()
        for count, sizes in counts.items()
        for size in sizes.split()
    }
)


def gpus_of(instance_type: str) -> Gpus | None:
    """The GPUs of an instance type; None for one that is not known here, which says nothing of whether it has any."""
    return GPUS.get(instance_type)


def described(instance_type: str) -> str:
    """For a preview: `g6e.xlarge: 1 × NVIDIA L40S, 44.7 GiB`."""
    gpus = gpus_of(instance_type)
    if gpus is None:
        return f"{instance_type}: its GPUs are not known here"
    each = " each" if gpus.count > 1 else ""
    return f"{instance_type}: {gpus.count} × NVIDIA {gpus.gpu.name}, {gpus.gpu.memory_mib / 1024:.1f} GiB{each}"


def cpu_architecture(instance_type: str) -> Literal["x86_64", "arm64"]:
    """What an instance type's CPU is, by the name: AWS marks Arm by a g after the generation's digit."""
    family = instance_type.split(".")[0]
    marks = re.sub(r"^[a-z]+[0-9]+", "", family)
    return "arm64" if "g" in marks or family == "a1" else "x86_64"
