"""The table of GPUs, held against what AWS says of its instance types as moto carries it along."""

from __future__ import annotations

import gzip
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from components.core.ec2_gpus import GPUS, cpu_architecture, described, gpus_of


@cache
def aws_says() -> dict[str, Any]:
    moto = find_spec("moto")
    assert moto is not None
    assert moto.origin is not None
    with gzip.open(Path(moto.origin).parent / "ec2" / "resources" / "instance_types.json.gz") as packed:
        types: dict[str, Any] = json.load(packed)
    return types


def test_every_type_has_what_aws_says() -> None:
    ours, theirs = {}, {}
    for name, gpus in GPUS.items():
        if name in aws_says():
            (said,) = aws_says()[name]["GpuInfo"]["Gpus"]
            theirs[name] = (said["Manufacturer"], said["Name"], said["Count"], said["MemoryInfo"]["SizeInMiB"])
            ours[name] = ("NVIDIA", gpus.gpu.name, gpus.count, gpus.gpu.memory_mib)
    assert ours == theirs
    assert len(ours) == len(GPUS) == 59


def test_of_whole_nvidia_gpus_only_v100s_are_left_out() -> None:
    left_out = {
        (gpu["Name"], gpu["Count"] == 0)
        for name, said in aws_says().items()
        for gpu in said.get("GpuInfo", {}).get("Gpus", [])
        if gpu["Manufacturer"] == "NVIDIA" and name not in GPUS
    }
    assert left_out == {("V100", False), ("L4", True)}


def test_the_cpu_is_told_by_the_name() -> None:
    wrong = {
        name: said["ProcessorInfo"]["SupportedArchitectures"]
        for name, said in aws_says().items()
        if cpu_architecture(name) not in said["ProcessorInfo"]["SupportedArchitectures"] and "mac" not in name
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("instance_type", "sentence"),
    [
        ("g6e.xlarge", "g6e.xlarge: 1 × NVIDIA L40S, 44.7 GiB"),
        ("p4d.24xlarge", "p4d.24xlarge: 8 × NVIDIA A100, 40.0 GiB each"),
        ("m7i.large", "m7i.large: its GPUs are not known here"),
        ("g6f.xlarge", "g6f.xlarge: its GPUs are not known here"),
    ],
)
def test_in_words(instance_type: str, sentence: str) -> None:
    assert described(instance_type) == sentence


def test_what_is_not_known_has_no_memory() -> None:
    assert gpus_of("m7i.large") is None
