from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import pytest

from components.core.engine_args import Json
from components.core.engine_options import EngineOptions, PlannedAdapter
from components.core.engine_plan import EnginePlan, plan_engine
from components.core.errors import UserError
from components.core.lora_flags import PlannedFlag
from components.core.naming import blob_path
from components.core.vllm_rules import NO_SUCH_FLAGS, OWNED_FLAGS

BASE = "Qwen/Qwen2.5-7B-Instruct"
PYTHON = "/opt/vllm/bin/python"
A = PlannedAdapter("acme-v1", "sha256:" + "a" * 64, 8)
B = PlannedAdapter("acme-v2", "sha256:" + "b" * 64, 48)
C = PlannedAdapter("globex", "sha256:" + "c" * 64, 16)
OPTIONS = EngineOptions(port=8000)
START = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", BASE, "--served-model-name", BASE]
COUNTED = "engine.gpuMemoryGiB and baseConfig (and engine.maxModelLen) would tell how many fit"
MINUTE = ["--shutdown-timeout", "60"]
PLACE = ["--host", "127.0.0.1", "--port", "8000", *MINUTE]


def plan(*adapters: PlannedAdapter, aliases: tuple[str, ...] = (), options: EngineOptions = OPTIONS) -> EnginePlan:
    return plan_engine(BASE, PYTHON, adapters, aliases, options, blob_path)


def arguments(args: Mapping[str, Json]) -> list[str]:
    """The part of argv that `engine.args` makes."""
    argv = plan(options=replace(OPTIONS, args=args)).argv
    assert list(argv[: len(START + PLACE)]) == START + PLACE
    return list(argv[len(START + PLACE) :])


def refusal(options: EngineOptions, *adapters: PlannedAdapter) -> str:
    with pytest.raises(UserError) as raised:
        plan(*adapters, options=options)
    return str(raised.value)


def many(count: int) -> list[PlannedAdapter]:
    return [PlannedAdapter(f"m{index:02}", f"sha256:{index:064x}", 8) for index in range(count)]


def test_a_base_alone() -> None:
    assert plan() == EnginePlan(
        base=BASE,
        argv=(*START, *PLACE),
        environment={
            "DO_NOT_TRACK": "1",
            "PATH": "/opt/vllm/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/cuda/bin",
            "VLLM_NO_USAGE_STATS": "1",
        },
        flags=(),
        served={BASE: BASE},
        stop_seconds=90,
        gpu=True,
    )


def test_adapters_and_another_name_of_the_base() -> None:
    planned = plan(C, A, B, aliases=("raw", "plain"))
    assert list(planned.argv) == [
        *START,
        "plain",
        "raw",
        *PLACE,
        "--enable-lora",
        "--max-loras",
        "3",
        "--max-lora-rank",
        "64",
        "--max-cpu-loras",
        "3",
        "--lora-modules",
        f'{{"name":"acme-v1","path":"/var/lib/lora-pods/blobs/sha256/{"a" * 64}","base_model_name":"{BASE}"}}',
        f'{{"name":"acme-v2","path":"/var/lib/lora-pods/blobs/sha256/{"b" * 64}","base_model_name":"{BASE}"}}',
        f'{{"name":"globex","path":"/var/lib/lora-pods/blobs/sha256/{"c" * 64}","base_model_name":"{BASE}"}}',
    ]
    assert planned.served == {
        BASE: BASE,
        "plain": BASE,
        "raw": BASE,
        "acme-v1": f"/var/lib/lora-pods/blobs/sha256/{'a' * 64}",
        "acme-v2": f"/var/lib/lora-pods/blobs/sha256/{'b' * 64}",
        "globex": f"/var/lib/lora-pods/blobs/sha256/{'c' * 64}",
    }
    assert planned.flags == (
        PlannedFlag("max-loras", "3", "3 adapters, all may share a batch"),
        PlannedFlag("max-lora-rank", "64", "largest rank is 48 (acme-v2)"),
        PlannedFlag("max-cpu-loras", "3", "3 adapters, all stay in CPU memory"),
    )


def test_order_does_not_matter() -> None:
    options = replace(OPTIONS, args={"swapSpace": 4, "enforceEager": True}, env={"B": "2", "A": "1"})
    first = plan(A, B, C, aliases=("x", "y"), options=options)
    for seed in range(6):
        adapters, aliases = [A, B, C], ["x", "y"]
        random.Random(seed).shuffle(adapters)
        random.Random(seed).shuffle(aliases)
        other = replace(
            OPTIONS, args=dict(reversed(list(options.args.items()))), env=dict(reversed(list(options.env.items())))
        )
        again = plan(*adapters, aliases=tuple(aliases), options=other)
        assert again == first
        assert list(again.environment) == list(first.environment)
        assert list(again.served) == list(first.served)


def test_two_ids_may_share_a_bundle() -> None:
    twin = replace(A, id="acme-v1-copy")
    assert plan(A, twin).served == {BASE: BASE, A.id: blob_path(A.digest), twin.id: blob_path(A.digest)}


def test_options_with_a_key_of_their_own() -> None:
    options = EngineOptions(port=9, listen="0.0.0.0", max_model_len=-1, gpu_memory_utilization=0.85, dtype="bfloat16")
    assert list(plan(options=options).argv) == [
        *START,
        *("--host", "0.0.0.0", "--port", "9", *MINUTE),
        *("--dtype", "bfloat16", "--gpu-memory-utilization", "0.85", "--max-model-len=-1"),
    ]


@pytest.mark.parametrize("base", ["", "-x"])
def test_a_base_that_vllm_cannot_be_told(base: str) -> None:
    with pytest.raises(UserError, match="is empty or begins with a dash"):
        plan_engine(base, PYTHON, [], [], OPTIONS, blob_path)


@pytest.mark.parametrize("taken", [BASE, "raw"])
def test_an_id_served_twice(taken: str) -> None:
    with pytest.raises(UserError) as raised:
        plan(replace(A, id=taken), aliases=("raw",))
    assert str(raised.value) == f"model id '{taken}' is served twice by the engine of '{BASE}'"


def test_a_name_that_vllm_reads_as_none() -> None:
    with pytest.raises(UserError, match=r"^model id 'None' without an adapter cannot be served"):
        plan(aliases=("None",))
    assert plan(replace(A, id="None")).served == {BASE: BASE, "None": blob_path(A.digest)}


def test_ids_that_differ_only_in_case_are_told() -> None:
    acme, shouted = replace(A, id="acme"), replace(B, id="ACME")
    assert plan(acme, shouted, C).warnings == (
        "ACME and acme differ only in upper and lower case; vLLM tells them apart, but whoever asks for them may not. "
        "Give each a name of its own.",
    )
    assert plan(replace(A, id=BASE.lower()), aliases=("raw", "Raw")).warnings == (
        f"{BASE} and {BASE.lower()} differ only in upper and lower case; vLLM tells them apart, but whoever asks for "
        "them may not. Give each a name of its own.",
        "Raw and raw differ only in upper and lower case; vLLM tells them apart, but whoever asks for them may not. "
        "Give each a name of its own.",
    )
    assert plan(A, B, C, aliases=("raw",)).warnings == ()


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_adapters_on_a_quantised_base_are_told(method: str) -> None:
    quantised = replace(OPTIONS, args={"quantization": method})
    assert plan(A, options=quantised).warnings == (
        f"args.quantization is {method}, and vLLM serves adapters on a quantised base for some architectures only. "
        "Where it does not, the engine ends while it starts; try it on a pod that nobody waits for.",
    )
    assert plan(options=quantised).warnings == ()


# --- LoRA flags ---


@pytest.mark.parametrize(
    ("count", "options", "expected"),
    [
        (1, OPTIONS, {"max-loras": ("1", "1 adapter, all may share a batch")}),
        (8, OPTIONS, {"max-loras": ("8", "8 adapters, all may share a batch")}),
        (
            40,
            OPTIONS,
            {
                "max-loras": (
                    "8",
                    f"40 adapters, capped at 8 for memory; {COUNTED}",
                ),
                "max-cpu-loras": ("40", "40 adapters, all stay in CPU memory"),
            },
        ),
        (40, replace(OPTIONS, max_loras=40), {"max-loras": ("40", "engine.maxLoras"), "max-cpu-loras": ("40", None)}),
        (
            2,
            replace(OPTIONS, max_loras=5),
            {"max-loras": ("5", "engine.maxLoras"), "max-cpu-loras": ("5", "as many as max-loras")},
        ),
        (
            40,
            replace(OPTIONS, max_cpu_loras=4),
            {
                "max-loras": ("4", "40 adapters, capped by engine.maxCpuLoras"),
                "max-cpu-loras": ("4", "engine.maxCpuLoras"),
            },
        ),
        (
            2,
            replace(OPTIONS, max_cpu_loras=10),
            {"max-loras": ("2", None), "max-cpu-loras": ("10", "engine.maxCpuLoras")},
        ),
    ],
)
def test_how_many_adapters_share_a_batch(
    count: int, options: EngineOptions, expected: dict[str, tuple[str, str | None]]
) -> None:
    flags = {flag.name: flag for flag in plan(*many(count), options=options).flags}
    assert list(flags) == ["max-loras", "max-lora-rank", "max-cpu-loras"]
    for name, (value, reason) in expected.items():
        assert (flags[name].value, reason or flags[name].reason) == (value, flags[name].reason)


def test_overrides_that_contradict_each_other() -> None:
    assert refusal(replace(OPTIONS, max_loras=40, max_cpu_loras=10), *many(2)) == (
        "engine.maxCpuLoras (10) is below engine.maxLoras (40); vLLM keeps every adapter of a batch in CPU memory too, "
        "so make it at least as large"
    )
    assert refusal(replace(OPTIONS, max_loras=0)) == "engine.maxLoras is 0; it must be at least 1"
    assert refusal(replace(OPTIONS, max_cpu_loras=-1)) == "engine.maxCpuLoras is -1; it must be at least 1"


@pytest.mark.parametrize(
    ("rank", "flag"), [(1, 1), (2, 8), (8, 8), (9, 16), (48, 64), (129, 256), (257, 320), (321, 512), (512, 512)]
)
def test_the_rank_is_rounded_up_to_one_vllm_accepts(rank: int, flag: int) -> None:
    assert plan(replace(A, rank=1), replace(B, rank=rank)).flags[1].value == str(flag)


def test_ranks_nobody_serves() -> None:
    assert refusal(OPTIONS, A, replace(B, rank=600)) == (
        "model acme-v2: rank 600 is above 512, the most vLLM 0.33.0 serves; train with a smaller r, or merge "
        "the adapter into its base"
    )
    assert refusal(OPTIONS, replace(A, rank=0)) == "model acme-v1: rank 0 is no LoRA rank: it must be at least 1"


def test_a_rank_of_ones_own() -> None:
    assert plan(B, options=replace(OPTIONS, max_lora_rank=128)).flags[1] == PlannedFlag(
        "max-lora-rank", "128", "engine.maxLoraRank"
    )
    assert refusal(replace(OPTIONS, max_lora_rank=32), B) == (
        "engine.maxLoraRank is 32, but model acme-v2 has rank 48; raise it or leave it out"
    )
    assert refusal(replace(OPTIONS, max_lora_rank=48), B) == (
        "engine.maxLoraRank is 48; vLLM 0.33.0 accepts 1, 8, 16, 32, 64, 128, 256, 320, 512"
    )


# --- engine.args ---


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"enforceEager": True}, ["--enforce-eager"]),
        ({"enforce_eager": False}, ["--no-enforce-eager"]),
        ({"no-enable-prefix-caching": True}, ["--no-enable-prefix-caching"]),
        ({"maxNumSeqs": 4, "no-enforce-eager": True}, ["--max-num-seqs", "4", "--no-enforce-eager"]),
        ({"max-num-seqs": 16}, ["--max-num-seqs", "16"]),
        ({"maxNumSeqs": 16.0}, ["--max-num-seqs", "16"]),
        ({"cpuOffloadGb": 0.5}, ["--cpu-offload-gb", "0.5"]),
        ({"seed": -1}, ["--seed=-1"]),
        ({"x": -0.5}, ["--x=-0.5"]),
        ({"chatTemplate": "-O{{ x_y.z }}"}, ["--chat-template=-O{{ x_y.z }}"]),
        ({"chatTemplate": ""}, ["--chat-template", ""]),
        ({"x": ["b", "a"]}, ["--x", "b", "a"]),
        ({"x": ["-b"]}, ["--x=-b"]),
        ({"x": [2, 1.0]}, ["--x", "2", "1"]),
        ({"allowedOrigins": ["https://a", "*"]}, ["--allowed-origins", '["https://a","*"]']),
        ({"middleware": ["a.B", "c.D"]}, ["--middleware", "a.B", "--middleware", "c.D"]),
        (
            {"compilationConfig": {"mode": 3, "a": [True, None, "é"]}},
            ["--compilation-config", '{"a":[true,null,"é"],"mode":3}'],
        ),
        ({"b": True, "aB": 1, "aA": "x"}, ["--a-a", "x", "--a-b", "1", "--b"]),
    ],
)
def test_arguments_of_the_user(args: Mapping[str, Json], words: list[str]) -> None:
    assert arguments(args) == words


@pytest.mark.parametrize("key", ["max_loras", "maxLoras", "max-loras", "MAX_LORAS", "no-max-loras"])
def test_a_flag_of_ours_in_any_spelling(key: str) -> None:
    assert refusal(replace(OPTIONS, args={key: 4})) == (
        f"engine.args.{key} cannot be set here: it is computed from the models; set engine.maxLoras to choose it"
    )


@pytest.mark.parametrize("flag", [*OWNED_FLAGS, *NO_SUCH_FLAGS])
def test_flags_that_are_ours_and_flags_that_vllm_lacks(flag: str) -> None:
    """vllm-project/vllm#29786, #13669"""
    assert refusal(replace(OPTIONS, args={flag: "x"}), A).startswith(f"engine.args.{flag} cannot be set here: ")


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (
            "max-cpu",
            "engine.args.max-cpu could be read as --max-cpu-loras, which cannot be set here: it is computed from the "
            "models; set engine.maxCpuLoras to choose it",
        ),
        (
            "apiKey",
            "engine.args.apiKey cannot be set here: a secret must not stand in a command line; set lora-pods:apiKey",
        ),
        (
            "hf-tok",
            "engine.args.hf-tok could be read as --hf-token, which cannot be set here: a secret must not stand in a "
            "command line; set lora-pods:hfToken",
        ),
        (
            "loraExtraVocabSize",
            "engine.args.loraExtraVocabSize cannot be set here: vLLM removed it in 0.12",
        ),
        (
            "allow_runtime_lora_updating",
            "engine.args.allow_runtime_lora_updating cannot be set here: it is a variable of vLLM, off here: the stack "
            "file says what is served",
        ),
        ("--enforce-eager", "engine.args.--enforce-eager: write the flag without its dashes in front"),
        (
            "compilation-config.mode",
            "engine.args.compilation-config.mode is no flag of vLLM: letters, digits and dashes only (give a flag's "
            "own settings as a mapping under it)",
        ),
        (
            "x=1 --port",
            "engine.args.x=1 --port is no flag of vLLM: letters, digits and dashes only (give a flag's own settings as "
            "a mapping under it)",
        ),
        (
            "x\n",
            "engine.args.x\\n is no flag of vLLM: letters, digits and dashes only (give a flag's own settings as a "
            "mapping under it)",
        ),
    ],
)
def test_flags_that_are_refused(key: str, sentence: str) -> None:
    assert refusal(replace(OPTIONS, args={key: "canary"})) == sentence


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"x": None}, "engine.args: x has no value; give it one (true for a bare flag) or leave it out"),
        ({"x": []}, "engine.args: x is an empty list; give it a value or leave it out"),
        ({"x": ["a", ["b"]]}, "engine.args: x is a list, and its items must be strings or numbers"),
        ({"x": ["a", "-b"]}, "engine.args: x has an item that begins with a dash, which vLLM would take for a flag"),
        ({"x": float("nan")}, "x is nan, which is no number vLLM can use"),
        ({"aB": 1, "a-b": 2}, "engine.args.a-b and engine.args.aB are one flag; keep one of them"),
    ],
)
def test_values_that_are_refused(args: Mapping[str, Json], sentence: str) -> None:
    assert refusal(replace(OPTIONS, args=args)) == sentence


def test_draining_is_not_cut_short() -> None:
    for args, seconds in (
        ({"shutdownTimeout": 120}, 150),
        ({"shutdownTimeout": "120"}, 150),
        ({"shutdown-t": "45"}, 75),
        ({"shutdownTimeout": 86400}, 86430),
        ({"shutdownTimeout": "long"}, 30),
        ({"shutdownTimeout": 0}, 30),
        ({}, 90),
    ):
        assert plan(options=replace(OPTIONS, args=args)).stop_seconds == seconds, args
    with pytest.raises(UserError) as caught:
        plan(options=replace(OPTIONS, args={"shutdownTimeout": 100000}))
    assert str(caught.value) == (
        "engine.args.shutdownTimeout: 100000 s is too long; systemd waits a day (86400 s) at most"
    )


def test_requests_in_flight_may_finish_unless_the_stack_file_or_the_version_says_otherwise() -> None:
    def flags(version: str | None = None, **args: Json) -> list[str]:
        return list(plan(options=replace(OPTIONS, vllm=version, args=args)).argv[len(START + PLACE) - 2 :])

    assert flags() == flags("0.18.0") == MINUTE
    assert flags("0.17.1") == []
    assert flags(shutdown_timeout=5, x=1) == ["--shutdown-timeout", "5", "--x", "1"]
    assert flags(shutdown_t=5) == ["--shutdown-t", "5"]
    assert flags(shutdownTimeout=0) == [], "what vLLM does by itself, and any vLLM takes"


def test_types_of_numbers() -> None:
    with pytest.raises(UserError) as caught:
        plan(options=replace(OPTIONS, dtype="fp16"))
    assert str(caught.value) == ("engine.dtype is 'fp16'; vLLM takes auto, bfloat16, float, float16, float32, half")
    with pytest.raises(UserError) as caught:
        plan(A, options=replace(OPTIONS, dtype="float32"))
    assert str(caught.value) == (
        "engine.dtype is float32, in which vLLM serves no adapters on a GPU; set bfloat16, or float16 where the GPU is "
        "older than Ampere"
    )
    assert plan(options=replace(OPTIONS, dtype="float32")).warnings == ()
    assert plan(A, options=replace(OPTIONS, dtype="float32", device="cpu")).warnings == ()


def test_slots_that_stay_empty_are_remarked() -> None:
    assert plan(A, options=replace(OPTIONS, max_loras=3)).warnings == (
        "engine.maxLoras is 3 for 1 adapter; the other slots stay empty, and take memory and time all the same. Lower "
        "it, or leave it out.",
    )


# --- engine.env ---


def test_variables_of_the_user() -> None:
    environment = plan(options=replace(OPTIONS, env={"Z": "", "DO_NOT_TRACK": "0", "PATH": "/bin"})).environment
    assert environment == {"DO_NOT_TRACK": "0", "PATH": "/bin", "VLLM_NO_USAGE_STATS": "1", "Z": ""}


@pytest.mark.parametrize(
    ("device", "args", "env", "value"),
    [
        ("cpu", {"enforceEager": True}, {}, "1"),
        ("cpu", {"enforceEager": True}, {"TORCH_COMPILE_DISABLE": "0"}, "0"),
        ("cpu", {}, {}, None),
        ("cpu", {"enforce_eager": False}, {}, None),
        ("cpu", {"no-enforce-eager": True}, {}, None),
        ("gpu", {"enforceEager": True}, {}, None),
    ],
)
def test_an_eager_engine_on_a_cpu_needs_no_compiler_for_logprobs(
    device: Literal["cpu", "gpu"], args: Mapping[str, Json], env: Mapping[str, str], value: str | None
) -> None:
    environment = plan(options=replace(OPTIONS, device=device, args=args, env=env)).environment
    assert environment.get("TORCH_COMPILE_DISABLE") == value


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("A-B", "engine.env.A-B is no name of a variable: letters, digits and _ only, no digit first"),
        (
            "HF_TOKEN",
            "engine.env.HF_TOKEN holds a secret, which would stand in the unit for every user of the pod to read; use "
            "`pulumi config set --secret lora-pods:hfToken`",
        ),
        (
            "VLLM_API_KEY",
            "engine.env.VLLM_API_KEY holds a secret, which would stand in the unit for every user of the pod to read; "
            "use `pulumi config set --secret lora-pods:apiKey`",
        ),
        (
            "HOME",
            "engine.env.HOME cannot be set here: it is the unit's state directory, the only place the engine can write",
        ),
        (
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
            "engine.env.VLLM_ALLOW_RUNTIME_LORA_UPDATING cannot be set here: the stack file alone says which adapters "
            "are served",
        ),
    ],
)
def test_variables_that_are_refused(name: str, sentence: str) -> None:
    assert refusal(replace(OPTIONS, env={name: "canary"})) == sentence


def test_the_ranks_are_those_of_the_vllm_that_is_pinned() -> None:
    adapters = [PlannedAdapter("acme-v1", f"sha256:{'1' * 64}", 1)]
    for version, value in ((None, "1"), ("0.33.0", "1"), ("0.10.2", "8")):
        plan = plan_engine("base", "/bin/python", adapters, [], EngineOptions(port=8000, vllm=version), str)
        assert {flag.name: flag.value for flag in plan.flags}["max-lora-rank"] == value
