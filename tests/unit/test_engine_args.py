from __future__ import annotations

from collections.abc import Mapping

import pytest

from components.core.engine_args import Json, gpus_needed, parsed_arguments
from components.core.engine_options import EngineOptions, PlannedAdapter
from components.core.engine_plan import EnginePlan, plan_engine
from components.core.errors import UserError
from components.core.naming import blob_path
from components.core.slot_budget import changing
from components.core.vllm_flags import NEWEST, OLDEST, flags_of
from components.core.vllm_rules import OWNED_FLAGS

NOW = "0.33.0"


def plan(args: Mapping[str, Json], instance_type: str | None = None) -> EnginePlan:
    options = EngineOptions(port=8000, vllm=NOW, args=args, instance_type=instance_type)
    return plan_engine("base", "/bin/python", [PlannedAdapter("m", "sha256:" + "a" * 64, 8)], [], options, blob_path)


def faults(args: Mapping[str, Json], version: str | None = NOW) -> tuple[str, ...]:
    with pytest.raises(UserError) as raised:
        parsed_arguments(args, version)
    return raised.value.sentences


@pytest.mark.parametrize("value", [0, -3, 0.0, "0", "-1"])
@pytest.mark.parametrize("key", ["tensorParallelSize", "max-num-seqs", "maxNumBatchedTokens"])
def test_what_has_to_be_one_at_least(key: str, value: Json) -> None:
    assert faults({key: value}) == (f"engine.args.{key} is {value}; it must be at least 1",)


@pytest.mark.parametrize("version", [NOW, None])
@pytest.mark.parametrize(
    ("key", "value", "least"),
    [
        ("shutdownTimeout", -5, 0),
        ("shutdownTimeout", "-5", 0),
        ("blockSize", 0, 1),
        ("decodeContextParallelSize", 0, 1),
        ("nnodes", 0, 1),
        ("nodeRank", -1, 0),
    ],
)
def test_what_no_engine_has_less_of(key: str, value: Json, least: int, version: str | None) -> None:
    assert faults({key: value}, version) == (f"engine.args.{key} is {value}; it must be at least {least}",)
    parsed_arguments({key: least}, version)


@pytest.mark.parametrize("version", [NOW, None, "0.10.2"])
@pytest.mark.parametrize("value", [1.5, 1e300, float("inf")])
def test_a_number_of_things_is_whole_in_any_vllm(value: float, version: str | None) -> None:
    assert faults({"maxNumSeqs": value}, version) == ("engine.args.maxNumSeqs must be a whole number",)


def test_a_text_that_no_unit_can_pass_on() -> None:
    with pytest.raises(UserError) as caught:
        plan({"chatTemplate": "a\nb"})
    assert str(caught.value) == (
        "engine.args: chat-template holds a line break or a NUL, which a systemd unit cannot pass on; where vLLM takes "
        "a file for it, put one on the pod and give its path"
    )


# --- names ---


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("max-num-seq", "engine.args.max-num-seq: vLLM 0.33.0 has no flag max-num-seq; did you mean max-num-seqs?"),
        ("maxNumSequences", "engine.args.maxNumSequences: vLLM 0.33.0 has no flag max-num-sequences; did you mean {}?"),
        ("tp", "engine.args.tp: vLLM 0.33.0 has no flag tp; did you mean tensor-parallel-size?"),
        ("kv_cache_dt", "engine.args.kv_cache_dt: vLLM 0.33.0 has no flag kv-cache-dt; did you mean kv-cache-dtype?"),
        ("swapSpace", "engine.args.swapSpace: vLLM 0.33.0 has no flag swap-space"),
        ("no-max-num-seqs", "engine.args.no-max-num-seqs: vLLM 0.33.0 has no --no- form of max-num-seqs"),
    ],
)
def test_a_flag_that_vllm_does_not_have(key: str, sentence: str) -> None:
    assert faults({key: 1}) == (sentence.format("max-num-seqs"),)


def test_a_flag_that_came_later() -> None:
    assert parsed_arguments({"disableLogRequests": True}, "0.33.0") == ({"disable-log-requests": True}, [])
    assert faults({"disableLogRequests": True}, "0.32.0") == (
        "engine.args.disableLogRequests: vLLM 0.32.0 has no flag disable-log-requests; did you mean "
        "enable-log-requests, with the other value?",
    )


@pytest.mark.parametrize(
    ("version", "near"), [(None, "0.33"), ("main", "0.33"), ("0.34.1", "0.33"), ("0.33.1", "0.33"), ("0.10.2", "0.32")]
)
def test_what_the_flags_of_an_unknown_vllm_may_be_is_only_told(version: str | None, near: str) -> None:
    assert parsed_arguments({"maxNumSeq": 4, "seed": "x", "enforceEager": True}, version) == (
        {"enforce-eager": True, "max-num-seq": 4, "seed": "x"},
        [
            f"args.maxNumSeq: vLLM {near}, the nearest whose flags are known here, has no flag max-num-seq; did you "
            "mean max-num-seqs?",
            f"args.seed must be a whole number, if it is what it is in vLLM {near}",
        ],
    )


def test_a_flag_that_will_go_is_told() -> None:
    for key in ("disableCascadeAttn", "no-disable-cascade-attn"):
        assert plan({key: True}).warnings == (f"args.{key} is deprecated: a later vLLM will not know it",)


def test_all_faults_are_told_together() -> None:
    args: dict[str, Json] = {"maxNumSeq": 4, "maxLoras": 2, "seed": "x", "chatTemplate": "{{ x }}", "--x": 1}
    assert faults(args) == (
        "engine.args.maxLoras cannot be set here: it is computed from the models; set engine.maxLoras to choose it",
        "engine.args.--x: write the flag without its dashes in front",
        "engine.args.maxNumSeq: vLLM 0.33.0 has no flag max-num-seq; did you mean max-num-seqs?",
        "engine.args.seed must be a whole number",
    )


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (
            "deviceMemoryUtilization",
            "engine.args.deviceMemoryUtilization cannot be set here: set "
            "engine.gpuMemoryUtilization beside engine.args",
        ),
        ("disableLora", "engine.args.disableLora cannot be set here: it is set when a model has an adapter"),
        (
            "disable-ssl-refresh",
            "engine.args.disable-ssl-refresh cannot be set here: the engine is proven ready over plain HTTP on its own "
            "port; put TLS in front of it",
        ),
    ],
)
def test_other_names_of_flags_that_are_ours(key: str, sentence: str) -> None:
    assert faults({key: 1}) == (sentence,)


@pytest.mark.parametrize("version", [None, "0.32.0", "0.10.2"])
@pytest.mark.parametrize("key", ["device-mem", "deviceMemoryUtil", "device_m", "no-device-mem"])
def test_a_beginning_of_another_name_of_a_flag_that_is_ours(key: str, version: str | None) -> None:
    assert faults({key: 0.5}, version) == (
        f"engine.args.{key} could be read as --device-memory-utilization, which cannot be set here: set "
        "engine.gpuMemoryUtilization beside engine.args",
    )


def test_a_flag_that_older_vllms_had_is_no_beginning_of_another_name() -> None:
    assert parsed_arguments({"device": "cpu"}, "0.10.2")[0] == {"device": "cpu"}


@pytest.mark.parametrize("version", [None, "0.32.0", "0.33.0"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("enforce-eager", "no-enforce-eager"),
        ("no_enforce_eager", "enforceEager"),
        ("enable-prefix-caching", "no-enable-prefix-caching"),
        ("maxNumSeqs", "max-num-seqs"),
    ],
)
def test_one_flag_in_two_spellings(first: str, second: str, version: str | None) -> None:
    value: Json = 4 if first == "maxNumSeqs" else True
    assert faults({first: value, second: value}, version) == (
        f"engine.args.{second} and engine.args.{first} are one flag; keep one of them",
    )


@pytest.mark.parametrize("second", ["enable-prefix-caching", "no-enable-prefix-caching"])
def test_a_flag_and_its_opposite_where_vllm_has_one(second: str) -> None:
    args: dict[str, Json] = {"disablePrefixCaching": True, second: True}
    assert faults(args, "0.33.0") == (
        f"engine.args.{second} and engine.args.disablePrefixCaching are one flag; keep one of them",
    )
    (fault,) = faults(args, "0.32.0")
    assert "vLLM 0.32.0 has no flag disable-prefix-caching" in fault


def test_flags_with_alike_names_are_not_one() -> None:
    args: dict[str, Json] = {"disableLogStats": True, "enableLogRequests": True, "enableLogOutputs": True}
    assert len(parsed_arguments(args, NOW)[0]) == 3


@pytest.mark.parametrize("version", [None, NOW])
def test_a_flag_with_no_before_it_is_the_flag_with_the_other_value(version: str | None) -> None:
    assert parsed_arguments({"no-enforce-eager": True, "noFullyShardedLoras": True}, version) == (
        {"enforce-eager": False, "fully-sharded-loras": False},
        [],
    )
    assert parsed_arguments({"no-x": True}, None)[0] == {"no-x": True}


def test_no_flag_takes_a_secret_but_those_that_are_ours() -> None:
    words = ("key", "-token", "password", "secret")
    for version in (OLDEST, NEWEST):
        assert {name for name in flags_of(version) if name.endswith(words)} == {"api-key", "hf-token"}


# --- values ---


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"enforceEager": "yes"}, "enforceEager must be true or false"),
        ({"enforceEager": 1}, "enforceEager must be true or false"),
        ({"no-enforce-eager": False}, "no-enforce-eager takes no value: write true, or the flag itself with false"),
        ({"disableLogStats": False}, "disableLogStats can only be given or not: write true, or leave it out"),
        ({"maxNumSeqs": True}, "maxNumSeqs needs a value: a whole number"),
        ({"maxNumSeqs": False}, "maxNumSeqs needs a value: a whole number"),
        ({"maxNumSeqs": "many"}, "maxNumSeqs must be a whole number"),
        ({"maxNumSeqs": 1.5}, "maxNumSeqs must be a whole number"),
        ({"maxNumSeqs": 1e300}, "maxNumSeqs must be a whole number"),
        ({"maxNumSeqs": [1]}, "maxNumSeqs takes no list: it must be a whole number"),
        ({"maxNumSeqs": {"a": 1}}, "maxNumSeqs takes no mapping: it must be a whole number"),
        ({"cpuOffloadGb": "4 GB"}, "cpuOffloadGb must be a number"),
        ({"maxNumBatchedTokens": "8 k"}, "maxNumBatchedTokens must be a whole number, which may end in k, m, g or t"),
        (
            {"maxNumBatchedTokens": "25.6K"},
            "maxNumBatchedTokens must be a whole number, which may end in k, m, g or t; did you mean 25.6k?",
        ),
        ({"maxNumBatchedTokens": 1e300}, "maxNumBatchedTokens must be a whole number, which may end in k, m, g or t"),
        ({"loraDtype": "fp8"}, "loraDtype must be one of auto, bfloat16, float16"),
        ({"compilationConfig": "{"}, "compilationConfig must be a mapping or a list"),
        ({"cudagraphCaptureSizes": [1, "x"]}, "cudagraphCaptureSizes must hold nothing but a whole number"),
        ({"tokenizer": {"a": 1}}, "tokenizer takes no mapping: it must be a text"),
    ],
)
def test_a_value_of_another_kind(args: Mapping[str, Json], sentence: str) -> None:
    assert faults(args) == (f"engine.args.{sentence}",)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"maxNumSeqs": "16"}, ["--max-num-seqs", "16"]),
        ({"maxNumBatchedTokens": "8k"}, ["--max-num-batched-tokens", "8k"]),
        ({"maxNumBatchedTokens": "25.6k"}, ["--max-num-batched-tokens", "25.6k"]),
        ({"maxNumBatchedTokens": "8K"}, ["--max-num-batched-tokens", "8K"]),
        ({"maxLogLen": "None"}, ["--max-log-len", "None"]),
        ({"compilationConfig": '{"mode": 3}'}, ["--compilation-config", '{"mode": 3}']),
        ({"customHistogramBuckets": [1, 2]}, ["--custom-histogram-buckets", "[1,2]"]),
        ({"hfOverrides": {"a": 1}}, ["--hf-overrides", '{"a":1}']),
        ({"loraTargetModules": "q_proj"}, ["--lora-target-modules", "q_proj"]),
        ({"moeBackend": "deep-gemm"}, ["--moe-backend", "deep-gemm"]),
        ({"tensorParallelSize": 2}, ["--tensor-parallel-size", "2"]),
    ],
)
def test_values_in_other_words(args: dict[str, Json], words: list[str]) -> None:
    argv = list(plan(args).argv)
    start = argv.index(words[0])
    assert argv[start : start + len(words)] == words


# --- memory ---


def test_flags_that_make_the_sum_of_the_memory_unknown() -> None:
    """And those that do not: a new flag of vLLM is put on one side or the other by whoever adds it to the table."""
    named = {name for name in flags_of(NEWEST) if name not in OWNED_FLAGS}
    assert {name for name in named if changing(name)} >= {
        "pipeline-parallel-size",
        "cpu-offload-gb",
        "kv-cache-memory-bytes",
        "num-gpu-blocks-override",
        "speculative-config",
        "quantization-config",
        "load-format",
        "enable-expert-parallel",
        "hf-overrides",
        "max-lora-cls-labels",
    }
    assert not {
        name
        for name in named
        if changing(name)
        and name in {"max-num-seqs", "enforce-eager", "quantization", "kv-cache-dtype", "tensor-parallel-size"}
    }


# --- GPUs ---


@pytest.mark.parametrize(
    ("args", "count"),
    [
        ({}, 1),
        ({"tensorParallelSize": 4.0}, 4),
        ({"tensor_parallel_size": "2", "pipeline-parallel-size": 2, "dataParallelSize": 2}, 8),
        ({"tensorParallelSize": "all"}, None),
        ({"tensorParallelSize": 4, "nnodes": 2}, None),
        ({"tensorParallelSize": 4, "distributedExecutorBackend": "ray"}, None),
        ({"dataParallelSize": 4, "dataParallelSizeLocal": 1}, None),
    ],
)
def test_how_many_gpus_an_engine_takes(args: Mapping[str, Json], count: int | None) -> None:
    assert gpus_needed(args) == count


def test_more_gpus_than_an_instance_has() -> None:
    with pytest.raises(UserError) as raised:
        plan({"tensorParallelSize": 4}, "g6e.xlarge")
    assert str(raised.value) == (
        "engine.args: tensor-parallel-size 4 takes 4 GPUs, and the g6e.xlarge has 1 (L40S); lower it, or take a larger "
        "ec2.instanceType"
    )
    with pytest.raises(
        UserError, match=r"^engine\.args: tensor-parallel-size 4 × pipeline-parallel-size 2 takes 8 GPUs"
    ):
        plan({"tensorParallelSize": 4, "pipelineParallelSize": 2}, "g6e.12xlarge")


def test_gpus_that_nobody_uses_are_told() -> None:
    assert plan({"tensorParallelSize": 2}, "g6e.12xlarge").warnings == (
        "the g6e.12xlarge has 4 GPUs, of which the engine takes 2; args: {tensorParallelSize: 4} shares the base among "
        "them all",
    )
    assert plan({"tensorParallelSize": 4}, "g6e.12xlarge").warnings == ()
    assert plan({}, "g6e.xlarge").warnings == ()
    assert plan({"tensorParallelSize": 8}, "g99.xlarge").warnings == ()
