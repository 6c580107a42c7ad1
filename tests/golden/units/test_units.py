"""Each directory here holds one engine as the stack file would describe it, and its unit, to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components.core.engine_options import EngineOptions, PlannedAdapter
from components.core.engine_plan import EnginePlan, plan_engine
from components.core.naming import blob_path, engine_key
from components.render import render_unit
from tests.unit import unit_text_model as systemd

CASES = sorted(path.parent for path in Path(__file__).parent.glob("*/case.json"))


def case_of(directory: Path) -> dict[str, Any]:
    case: dict[str, Any] = json.loads((directory / "case.json").read_text(encoding="utf-8"))
    return case


def load(directory: Path) -> tuple[EnginePlan, str]:
    case = case_of(directory)
    adapters = [PlannedAdapter(**adapter) for adapter in case["adapters"]]
    options = EngineOptions(**case["options"])
    plan = plan_engine(case["base"], case["python"], adapters, case["aliases"], options, blob_path)
    return plan, engine_key(case["stack"], case["base"])


def test_there_are_cases() -> None:
    assert len(CASES) == 9


@pytest.mark.parametrize("directory", CASES, ids=lambda path: path.name)
def test_unit(directory: Path, update_golden: bool) -> None:
    plan, key = load(directory)
    unit = render_unit(plan, key=key, on_ec2=case_of(directory).get("onEc2", False))
    expected = directory / "expected.service"
    if update_golden:
        expected.write_bytes(unit.encode())
    assert unit.encode() == expected.read_bytes()


@pytest.mark.parametrize("directory", CASES, ids=lambda path: path.name)
def test_systemd_reads_what_was_planned(directory: Path) -> None:
    plan, key = load(directory)
    found = systemd.settings((directory / "expected.service").read_bytes().decode())
    assert [systemd.command(value) for name, value in found if name == "ExecStart"] == [list(plan.argv)]
    home = f"/var/lib/lora-pods-{key}"
    assert dict(systemd.assignment(value) for name, value in found if name == "Environment") == {
        **plan.environment,
        "HOME": home,
        "HF_HOME": f"{home}/huggingface",
    }
