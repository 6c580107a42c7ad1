"""Where a stack file says what a pod's GPU has and what its base is made of, the plan counts with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components.core.lora_flags import PlannedFlag
from components.settings import SettingsError
from tests.components.test_described import BASE, LLAMA, described, pod, project, stack_file
from tests.support.adapters import seeded_adapter

__all__ = ["project"]

EC2: dict[str, Any] = {
    "base": BASE,
    "ec2": {"instanceType": "g6e.xlarge", "region": "eu-central-1", "sshCidr": "203.0.113.7/32", "volumeGiB": 200},
    "engine": {"vllm": {"version": "0.33.0"}, "maxModelLen": 1024},
}
# Of a base of a few kilobytes.
SUM = "0 MiB of weights and 3 × 0 MiB of slots leave"
PLAIN = "3 adapters, all may share a batch"
UNTOLD = f"{PLAIN}; the GPU's memory is not counted: engine.gpuMemoryGiB is not given"


@pytest.fixture
def base_config(project: Path) -> Path:
    path = project / "base" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA))
    return path


def max_loras(served: dict[str, Any]) -> str:
    flag = described(stack_file(pods=[served])).engines[BASE].plan.flags[0]
    assert (flag.name, flag.value) == ("max-loras", "3")
    return flag.reason


def on_host(**engine: Any) -> dict[str, Any]:
    return {**pod(**{"maxModelLen": 1024, **engine}), "baseConfig": "../base"}


def test_a_host_says_what_its_gpu_has(base_config: Path) -> None:
    assert max_loras(on_host(gpuMemoryGiB=24)) == f"{PLAIN}: {SUM} 22.1 GiB of 22.1 GiB"
    assert max_loras(on_host(gpuMemoryGiB=24, gpuMemoryUtilization=0.5)) == f"{PLAIN}: {SUM} 12.0 GiB of 12.0 GiB"
    assert max_loras(on_host()) == UNTOLD


def test_what_is_quantised_by_a_file_beside_the_config_is_not_counted(base_config: Path) -> None:
    base_config.with_name("hf_quant_config.json").write_text("{}")
    assert max_loras(on_host(gpuMemoryGiB=24)) == (
        f"{PLAIN}; the GPU's memory is not counted: what a weight takes by hf_quant_config.json is not known here"
    )


def test_engines_that_take_one_gpu_together_are_told(project: Path) -> None:
    def told(*engines: dict[str, Any]) -> tuple[str, ...]:
        pods = [{**pod(port=8000 + n, **engine), "base": f"{BASE}-{n}"} for n, engine in enumerate(engines)]
        return described(stack_file(pods=pods, models=[])).warnings

    assert told({}, {"gpuMemoryUtilization": 0.3}) == (
        "pods[0] and pods[1]: their engines take 1.22 of GPU 0 of 10.0.0.7 together (gpuMemoryUtilization), "
        "and what starts last will not start; let them take less than 1, or give each its own GPU (env: "
        '{CUDA_VISIBLE_DEVICES: "1"})',
    )
    assert told({"gpuMemoryUtilization": 0.5}, {"gpuMemoryUtilization": 0.45}) == ()
    assert len(told({"gpuMemoryUtilization": 0.5}, {"gpuMemoryUtilization": 0.5})) == 1, "no GPU is ever all free"
    assert len(told({"env": {"CUDA_VISIBLE_DEVICES": "1, 2"}}, {"args": {"deviceIds": "1,3"}})) == 1
    assert told({}, {"args": {"deviceIds": "1"}}) == ()
    assert told({}, {"env": {"CUDA_VISIBLE_DEVICES": "1"}}) == told({}, {"device": "cpu"}) == ()


def test_an_instance_type_says_it_where_the_base_is_known(base_config: Path) -> None:
    assert max_loras({**EC2, "baseConfig": "../base"}) == f"{PLAIN}: {SUM} 41.1 GiB of 41.1 GiB"
    assert max_loras(EC2) == PLAIN
    strange = {**EC2, "ec2": {**EC2["ec2"], "instanceType": "z9.xlarge"}, "baseConfig": "../base"}
    assert max_loras(strange) == UNTOLD
    strange["engine"] = {**EC2["engine"], "gpuMemoryGiB": 100}
    assert max_loras(strange) == f"{PLAIN}: {SUM} 92.0 GiB of 92.0 GiB"


def test_what_was_asked_and_cannot_be_counted_is_said(project: Path) -> None:
    assert max_loras(pod(maxModelLen=1024, gpuMemoryGiB=24)) == (
        f"{PLAIN}; the GPU's memory is not counted: the base's config.json is not at hand (baseConfig)"
    )
    assert max_loras(pod(maxModelLen=1024, gpuMemoryGiB=24, device="cpu")) == PLAIN


def test_what_the_gpu_cannot_hold_is_a_fault_of_the_file(base_config: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        described(stack_file(pods=[on_host(gpuMemoryGiB=0.00005)]))
    (fault,) = caught.value.faults
    assert fault.startswith("pods[0].engine: weights of 0 MiB, a slot for adapters of rank 8 (0 MiB) and ")


def test_a_config_that_cannot_be_read_is_told_once(base_config: Path) -> None:
    base_config.write_text("{")
    with pytest.raises(SettingsError) as caught:
        described(stack_file(pods=[on_host(gpuMemoryGiB=24)]))
    assert [fault.partition(": ")[0] for fault in caught.value.faults] == ["pods[0].baseConfig"]


def test_a_rank_that_one_adapter_alone_needs_is_told_with_its_cost(project: Path, base_config: Path) -> None:
    seeded_adapter(project / "adapters" / "v2", seed=2, rank=16)
    flags = described(stack_file(pods=[on_host(gpuMemoryGiB=24)])).engines[BASE].plan.flags
    assert flags[1] == PlannedFlag(
        "max-lora-rank", "16", "largest rank is 16 (acme-v2), and raises it from 8 for all slots, +0 MiB"
    )


def test_a_context_that_the_base_was_not_made_for_is_a_warning(base_config: Path) -> None:
    base_config.write_text(json.dumps({**LLAMA, "max_position_embeddings": 1000}))
    assert described(stack_file(pods=[on_host()])).warnings == (
        "pods[0].engine.maxModelLen: 1024 is more than the base was made for (max_position_embeddings is 1000), and "
        'vLLM will not start; lower it, or set env: {VLLM_ALLOW_LONG_MAX_MODEL_LEN: "1"}',
    )
    for value, warned in (("1", False), ("True", False), ("0", True), ("false", True), ("", True)):
        allowed = stack_file(pods=[on_host(env={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": value})])
        assert bool(described(allowed).warnings) == warned, value
    assert described(stack_file(pods=[on_host(maxModelLen=1000)])).warnings == ()
    stretched = {"hfOverrides": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}}
    assert described(stack_file(pods=[on_host(args=stretched)])).warnings == ()
