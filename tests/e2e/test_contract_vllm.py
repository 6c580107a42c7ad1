"""What this project believes of vLLM's command line and environment, asked of the vLLM in the sandbox image.

One container answers every question: importing vLLM takes half a minute.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from components.core.engine_args import Json, argv_of
from components.core.engine_options import EngineOptions, PlannedAdapter
from components.core.engine_plan import EnginePlan, plan_engine
from components.core.naming import blob_path
from components.core.vllm_flags import OTHER_NAMES, SHORT_FLAGS, flags_of, lines_of, misused
from components.core.vllm_loader import loader_rules
from components.core.vllm_rules import (
    NO_SUCH_FLAGS,
    OWNED_ENVIRONMENT,
    OWNED_FLAGS,
    SECRET_ENVIRONMENT,
    SERVER_MODULE,
)
from tests.support.machines import call
from tests.support.vllm_flags import FLAG_LINES

pytestmark = pytest.mark.vllm

SANDBOX_IMAGE = "localhost/lora-pods-sandbox"
PYTHON = "/opt/vllm/bin/python"
BASE = '/models/50% of $HOME, it\'s "q" \\ ünï 模型=x'
ADAPTERS = [
    PlannedAdapter("acme=v1", "sha256:" + "a" * 64, 8),
    PlannedAdapter("b,c", "sha256:" + "b" * 64, 48),
    PlannedAdapter("globex", "sha256:" + "c" * 64, 16),
]
ARGS: dict[str, Json] = {
    "enforceEager": True,
    "enable_prefix_caching": False,
    "maxNumSeqs": 16.0,
    "seed": -1,
    "cpu-offload-gb": 0.5,
    "chatTemplate": "--{{ a_b.c }} -O",
    "allowedOrigins": ["https://a", "*"],
    "middleware": ["a.B", "c_d.E"],
    "loraTargetModules": ["q_proj", "v_proj"],
    "cudagraphCaptureSizes": [1, 2.0],
    "compilationConfig": {"mode": 3, "cudagraph_capture_sizes": [1, 2]},
    "hfOverrides": {"architectures": ["X"], "note": "50% of $x\n"},
    "shutdownTimeout": 30,
}

QUESTIONS = """
import json, sys, typing
from vllm import envs
from vllm.config.lora import LoRAConfig, MaxLoRARanks
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
import argparse, contextlib, huggingface_hub, importlib.util, io, os, vllm

asked = json.load(sys.stdin)
parser = make_arg_parser(FlexibleArgumentParser())

def parsed(argv):
    found = vars(parser.parse_args(argv))
    found["lora_modules"] = [vars(module) for module in found["lora_modules"] or []]
    found["compilation_config"] = {
        name: getattr(found["compilation_config"], name) for name in ("mode", "cudagraph_capture_sizes")
    }
    plain = (str, int, float, list, dict, type(None))
    return {name: value for name, value in found.items() if isinstance(value, plain)}

def refused(argv):
    try:
        parser.parse_args(argv)
    except SystemExit:
        return True
    return False

def taken(argv):
    # By the flag alone: the whole parser is slow, and takes a stray word for the model's name.
    alone = argparse.ArgumentParser(add_help=False)
    flag = argv[0].partition("=")[0].removeprefix("--")
    if flag not in flags:
        return False
    alone._add_action(flags[flag])
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            alone.parse_args(argv)
    except SystemExit:
        return False
    return True

def token_of(name):
    os.environ[name] = "secret"
    try:
        return huggingface_hub.get_token()
    finally:
        del os.environ[name]

def cpu_loras(count, slots):
    try:
        return LoRAConfig(max_loras=slots, max_cpu_loras=count).max_cpu_loras
    except ValueError as error:
        return str(error)

@FLAG_LINES@
flags = {flag.removeprefix("--"): action for action in parser._actions for flag in action.option_strings}
answers = {
    "ranks": typing.get_args(MaxLoRARanks),
    "parsed": [parsed(argv) for argv in asked["argvs"]],
    "flags": sorted(flags),
    "version": vllm.__version__,
    "flag lines": flag_lines,
    "short flags": short_flags,
    "more names": more_names,
    "taken": [taken(argv) for argv in asked["tried"]],
    "unknown flag refused": refused(["--no-such-flag"]),
    "rank 48 refused": refused(["--max-lora-rank", "48"]),
    "module": importlib.util.find_spec(asked["module"]) is not None,
    "variables": sorted(envs.environment_variables),
    "tokens": {name: token_of(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")},
    "fewer cpu loras": cpu_loras(2, 3),
    "runtime updating": envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING,
}
print("ANSWERS " + json.dumps(answers))
""".replace("@FLAG_LINES@", FLAG_LINES)


def plan(options: EngineOptions, adapters: list[PlannedAdapter], aliases: list[str]) -> EnginePlan:
    return plan_engine(BASE, PYTHON, adapters, aliases, options, blob_path)


PLANS = {
    "base": plan(EngineOptions(port=8000), [], []),
    "alias": plan(EngineOptions(port=8000), [], ["z", "plain"]),
    "adapters": plan(EngineOptions(port=8001, listen="0.0.0.0", max_model_len=256, dtype="bfloat16"), ADAPTERS, ["z"]),
    "everything": plan(EngineOptions(port=8000, gpu_memory_utilization=0.9, args=ARGS), ADAPTERS, []),
}


INSTALLED = (0, 32)
"""The vLLM of the sandbox image."""
TEXTS = ("x", "12", "1.5", "2k", "1.5K", "None", "{}")
VALUES: tuple[Json, ...] = (True, False, *TEXTS, 7, 0.25, 1e300, {}, ["x", "y"], [1, 2])


def tried() -> Iterator[tuple[str, Json, list[str]]]:
    """Each flag that is the user's with each of the values, and what the engine would be started with."""
    for name in flags_of(INSTALLED):
        for value in VALUES if name not in OWNED_FLAGS else ():
            yield name, value, argv_of({name: value}, ".".join(map(str, INSTALLED)))


TRIED = list(tried())


@pytest.fixture(scope="module")
def vllm() -> dict[str, Any]:
    asked = {"argvs": [found.argv[3:] for found in PLANS.values()], "module": SERVER_MODULE}
    asked["tried"] = [argv for _, _, argv in TRIED]
    said = call(
        *("run", "--rm", "--interactive", "--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=8192:8192"),
        *(SANDBOX_IMAGE, PYTHON, "-c", QUESTIONS),
        stdin=json.dumps(asked),
    )
    (answers,) = [line for line in said.splitlines() if line.startswith("ANSWERS ")]
    found: dict[str, Any] = json.loads(answers.removeprefix("ANSWERS "))
    return found


@pytest.fixture(scope="module")
def parsed(vllm: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict(zip(PLANS, vllm["parsed"], strict=True))


def test_the_ranks(vllm: dict[str, Any]) -> None:
    assert tuple(vllm["ranks"]) == loader_rules(None).legal_ranks
    assert vllm["rank 48 refused"]


def test_the_flags_are_those_we_name(vllm: dict[str, Any]) -> None:
    flags = set(vllm["flags"])
    assert set(OWNED_FLAGS) - flags == set()
    assert set(NO_SUCH_FLAGS) & flags == set()
    assert vllm["unknown flag refused"]


def test_the_table_of_flags(vllm: dict[str, Any]) -> None:
    """Where another vLLM is installed: put the lines that differ into `_SINCE` of components/core/vllm_flags.py."""
    assert tuple(map(int, vllm["version"].split(".")[:2])) == INSTALLED
    assert lines_of(INSTALLED) == vllm["flag lines"]
    assert vllm["short flags"] == {"h": "help", **SHORT_FLAGS}
    assert vllm["more names"] == OTHER_NAMES


def test_what_the_flags_take(vllm: dict[str, Any]) -> None:
    """A value that is refused here is refused there; one that is taken here is taken there, but for what JSON says."""
    wrong = []
    for (name, value, argv), taken in zip(TRIED, vllm["taken"], strict=True):
        here, kind = misused(name, value, INSTALLED), flags_of(INSTALLED)[name].kind
        if value == {} and kind == "text":
            assert here, "as JSON it would be a text, too, but nobody means that"
        elif (here and taken) or (not here and not taken and kind not in ("json", "any")):
            wrong.append((argv, here))
    assert not wrong, "\n".join(map(str, wrong))


def test_no_flag_of_the_users_is_taken_for_a_beginning_of_ours(vllm: dict[str, Any]) -> None:
    ours = {*OWNED_FLAGS, *NO_SUCH_FLAGS}
    assert {flag for flag in vllm["flags"] if flag not in ours and any(own.startswith(flag) for own in ours)} == set()


def test_the_module_and_the_variables_exist(vllm: dict[str, Any]) -> None:
    assert vllm["module"]
    of_vllm = {"VLLM_NO_USAGE_STATS", *(name for name in (*SECRET_ENVIRONMENT, *OWNED_ENVIRONMENT) if "VLLM" in name)}
    assert of_vllm - set(vllm["variables"]) == set()
    of_the_hub = {name for name in SECRET_ENVIRONMENT if not name.startswith("VLLM_")}
    assert vllm["tokens"] == dict.fromkeys(of_the_hub, "secret")
    assert vllm["runtime updating"] is False


def test_fewer_cpu_loras_than_slots_are_refused(vllm: dict[str, Any]) -> None:
    assert "max_cpu_loras (2) must be >= max_loras (3)" in vllm["fewer cpu loras"]


def test_a_base_alone(parsed: dict[str, dict[str, Any]]) -> None:
    found = parsed["base"]
    assert (found["model"], found["served_model_name"]) == (BASE, [BASE])
    assert (found["host"], found["port"], found["enable_lora"], found["lora_modules"]) == ("127.0.0.1", 8000, None, [])
    assert found["model_tag"] is None


def test_other_names_of_the_base(parsed: dict[str, dict[str, Any]]) -> None:
    assert parsed["alias"]["served_model_name"] == [BASE, "plain", "z"]


@pytest.mark.parametrize("case", ["adapters", "everything"])
def test_adapters(parsed: dict[str, dict[str, Any]], case: str) -> None:
    found = parsed[case]
    assert found["lora_modules"] == [
        {"name": adapter.id, "path": blob_path(adapter.digest), "base_model_name": BASE, "is_3d_lora_weight": False}
        for adapter in ADAPTERS
    ]
    wanted = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 64, "max_cpu_loras": 3}
    assert {name: found[name] for name in wanted} == wanted


def test_options_with_a_key_of_their_own(parsed: dict[str, dict[str, Any]]) -> None:
    wanted = {"host": "0.0.0.0", "port": 8001, "max_model_len": 256, "dtype": "bfloat16"}
    assert {name: parsed["adapters"][name] for name in wanted} == wanted
    assert parsed["everything"]["gpu_memory_utilization"] == 0.9


def test_arguments_of_the_user(parsed: dict[str, dict[str, Any]]) -> None:
    found = parsed["everything"]
    wanted = {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_num_seqs": 16,
        "seed": -1,
        "cpu_offload_gb": 0.5,
        "chat_template": "--{{ a_b.c }} -O",
        "allowed_origins": ["https://a", "*"],
        "middleware": ["a.B", "c_d.E"],
        "lora_target_modules": ["q_proj", "v_proj"],
        "cudagraph_capture_sizes": [1, 2],
        "compilation_config": {"mode": 3, "cudagraph_capture_sizes": [1, 2]},
        "hf_overrides": {"architectures": ["X"], "note": "50% of $x\n"},
        "shutdown_timeout": 30,
        "model_tag": None,
    }
    assert {name: found[name] for name in wanted} == wanted
