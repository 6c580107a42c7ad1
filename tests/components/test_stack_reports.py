"""What people reported in public about many adapters on one engine, by the thread, as a stack file would have it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from components.core.engine_options import EngineOptions, PlannedAdapter
from components.core.engine_plan import EnginePlan, plan_engine
from components.core.errors import UserError
from components.core.naming import blob_path
from components.render import render_unit
from tests.components.test_settings import MODEL, POD, faults, project

__all__ = ["project"]  # a fixture that every test here uses


def plan(*adapters: tuple[str, int], **options: Any) -> EnginePlan:
    planned = [PlannedAdapter(model, f"sha256:{n:064x}", rank) for n, (model, rank) in enumerate(adapters)]
    return plan_engine("org/base", "/opt/vllm/bin/python", planned, [], EngineOptions(port=8000, **options), blob_path)


def flags(of: EnginePlan) -> dict[str, str]:
    return {flag.name: flag.value for flag in of.flags}


@pytest.mark.parametrize("model", ["run=3", "a,b", "two words", "", "ünïcode", "x" * 300])
def test_an_id_that_a_command_line_would_break(model: str) -> None:
    """vllm-project/vllm#53353, ray-project/ray#51254"""
    (fault,) = faults(pods=[POD], models=[{**MODEL, "id": model}])
    assert fault.startswith("models[0].id: ")
    assert "an id has 1 to 96 letters, digits, dots, dashes and underscores" in fault


@pytest.mark.parametrize("models", [["acme=../adapters/acme"], '["acme=../adapters/acme"]', "acme=../adapters/acme"])
def test_adapters_in_the_syntax_of_the_flag(models: Any) -> None:
    """vllm-project/vllm#30690"""
    assert all(fault.startswith("models") and "must be a" in fault for fault in faults(pods=[POD], models=models))


def test_every_adapter_is_one_argument_of_its_own() -> None:
    """vllm-project/vllm#53353"""
    argv = plan(("acme-v1", 8), ("acme-v2", 8)).argv
    items = [json.loads(word) for word in argv[argv.index("--lora-modules") + 1 :]]
    assert [item["name"] for item in items] == ["acme-v1", "acme-v2"]


def test_one_name_twice_and_names_that_differ_in_case() -> None:
    """sgl-project/sglang#13771"""
    (fault,) = faults(pods=[POD], models=[MODEL, MODEL])
    assert fault == "models[1].id: acme-v1 is also models[0]; each id names one model"
    (warning,) = plan(("acme", 8), ("Acme", 8)).warnings
    assert "Acme" in warning
    assert "acme" in warning


def test_nothing_can_be_loaded_behind_the_stack_files_back() -> None:
    """vllm-project/vllm#18372, Continual-Intelligence/SEAL#3"""
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in render_unit(plan(("acme", 8)), key="prod-base-1")
    with pytest.raises(UserError, match="the stack file alone says which adapters are served"):
        plan(("acme", 8), env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"})


def test_a_blob_that_is_gone_is_named_and_not_looked_for_on_the_hub() -> None:
    """vllm-project/vllm#20612; the real systemd says it in tests/engine/test_unit_on_systemd.py"""
    unit = render_unit(plan(("acme", 8)), key="prod-base-1")
    blob = blob_path(f"sha256:{0:064x}")
    assert f"\nAssertPathExists={blob}\n" in unit
    assert set(re.findall(r'"path":"([^"]*)"', unit)) == {blob}
    assert Path(blob).is_absolute()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"lora-extra-vocab-size": 512}, "vLLM removed it in 0.12"),
        ({"loraPath": "/a"}, "vLLM never had it"),
        ({"lora-modules": "a=/b"}, "it is made of the models that have an adapter"),
        ({"maxLoras": 4}, "set engine.maxLoras to choose it"),
    ],
)
def test_flags_that_are_gone_and_flags_that_are_ours(args: Any, said: str) -> None:
    """vllm-project/vllm#29786, #13669"""
    with pytest.raises(UserError, match=re.escape(said)):
        plan(("acme", 8), args=args)


def test_one_explicit_template_serves_all() -> None:
    """kubeai-project/kubeai#347"""
    argv = plan(("acme", 8), args={"chatTemplate": "/templates/chat.jinja"}).argv
    assert argv[argv.index("--chat-template") + 1] == "/templates/chat.jinja"


def test_clients_do_not_take_turns_and_memory_is_not_promised_twice() -> None:
    """vllm-project/vllm#7990, #20160, #29049"""
    forty = [(f"m{n}", 8) for n in range(40)]
    assert flags(plan(*forty)) == {"max-loras": "8", "max-lora-rank": "8", "max-cpu-loras": "40"}
    with pytest.raises(UserError, match=r"engine.maxCpuLoras \(10\) is below engine.maxLoras \(40\)"):
        plan(*forty, max_loras=40, max_cpu_loras=10)


def test_one_limit_for_the_largest_rank() -> None:
    """vllm-project/vllm#2847"""
    assert flags(plan(("small", 8), ("large", 48)))["max-lora-rank"] == "64"


def test_adapters_on_a_quantised_base() -> None:
    """vllm-project/vllm#5540, #2821"""
    (warning,) = plan(("acme", 8), args={"quantization": "awq"}).warnings
    assert "awq" in warning
