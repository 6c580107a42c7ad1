"""The adapter check held against the vLLM and the PEFT of the sandbox image, adapter by adapter.

One container answers for all. `LORA_PODS_BOTH_WAYS=FILE` writes the table of all verdicts as Markdown.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from components.core.check.adapter_check import check_adapter
from tests.support.adapter_cases import BASE_CONFIG, CASES, CONFIGS, Case, Outcome, tensors, with_config
from tests.support.adapter_mixtures import mixtures
from tests.support.machines import call
from tests.support.verdicts import HERE, outcome

pytestmark = pytest.mark.vllm

SANDBOX_IMAGE = "localhost/lora-pods-sandbox"
PYTHON = "/opt/vllm/bin/python"
MIXED = "mixture"
HEAD = "| adapter | ours | vLLM | PEFT | why it is refused here |\n|---|---|---|---|---|"
ORACLE = Path(__file__).with_name("adapter_oracle.py")


@dataclass(frozen=True)
class Row:
    """One adapter and what three say of it; `rules` are ours."""

    case: Case
    ours: Outcome
    rules: str
    vllm: dict[str, Any]
    peft: dict[str, Any]
    same: bool
    """Whether every module's delta is the same in vLLM and in PEFT."""

    @property
    def vllm_takes_it(self) -> bool:
        return "refused" not in self.vllm

    @property
    def peft_takes_it(self) -> bool:
        return "refused" not in self.peft and self.peft["modules"] > 0

    @property
    def served_as_trained(self) -> bool:
        """As far as PEFT can say: it ignores names that vLLM reads, and loads no file without its own keys."""
        return self.vllm_takes_it and self.vllm["modules"] > 0 and (self.same or not self.peft_takes_it)


def of_a_real_config(path: Path) -> Case:
    """The config with tensors of the small base: vLLM would refuse the names of most real ones before it got far."""
    config = json.loads(path.read_bytes())
    shapes = {name: [config.get("r", 4) if x == 4 else x for x in shape] for name, shape in tensors().items()}
    return Case(path.stem, with_config(path.read_bytes(), shapes), "accept")


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    root = tmp_path_factory.mktemp("adapters")
    mixed = [Case(f"{MIXED} {number}", write, "accept") for number, write in enumerate(mixtures(seed=0, count=600))]
    cases = [*CASES, *map(of_a_real_config, sorted(CONFIGS.glob("*.json"))), *mixed]
    directories = [case.make(root) for case in cases]
    answers = asked([str(directory) for directory in directories], root)
    found = []
    for case, directory, answer in zip(cases, directories, answers, strict=True):
        findings = check_adapter(directory, HERE)
        rules = ", ".join(sorted({finding.rule for finding in findings}))
        found.append(Row(case, outcome(findings), rules, answer["vllm"], answer["peft"], answer["same"]))
    return found


@pytest.fixture(scope="module")
def rows(everything: list[Row]) -> list[Row]:
    """Without the random ones, whose names say nothing."""
    found = [row for row in everything if not row.case.name.startswith(MIXED)]
    table = "\n".join([HEAD, *map(line, found)])
    print(f"\n{table}")
    if os.environ.get("LORA_PODS_BOTH_WAYS"):
        Path(os.environ["LORA_PODS_BOTH_WAYS"]).write_text(f"{table}\n")
    return found


def asked(paths: list[str], root: Path) -> list[dict[str, Any]]:
    said = call(
        *("run", "--rm", "--interactive", "--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=8192:8192"),
        *(f"--volume={root}:{root}:ro", f"--volume={ORACLE}:{ORACLE}:ro", "--security-opt=label=disable"),
        *("--env=HF_HUB_OFFLINE=1", SANDBOX_IMAGE, PYTHON, str(ORACLE)),
        stdin=json.dumps({"base": BASE_CONFIG, "paths": paths}),
    )
    (answers,) = [line for line in said.splitlines() if line.startswith("ANSWERS ")]
    found: list[dict[str, Any]] = json.loads(answers.removeprefix("ANSWERS "))
    return found


def line(row: Row) -> str:
    name = row.case.name.encode("unicode_escape").decode()
    ours = f"{row.ours} ({row.rules})" if row.rules else row.ours
    return f"| {name} | {ours} | {of_vllm(row)} | {of_peft(row)} | {row.case.stricter} |"


def of_vllm(row: Row) -> str:
    if not row.vllm_takes_it:
        return f"refuses at {row.vllm['at']}"
    if row.vllm["modules"] == 0:
        return "the base answers"
    return f"serves {row.vllm['modules']} modules" + ("" if row.served_as_trained else ", unlike PEFT")


def of_peft(row: Row) -> str:
    if "refused" in row.peft:
        return f"refuses its {row.peft['at']}"
    ignored = f", ignores {row.peft['foreign']} tensors" if row.peft["foreign"] else ""
    return f"loads {row.peft['modules']} modules{ignored}"


def test_nothing_that_vllm_refuses_passes(everything: list[Row]) -> None:
    assert [line(row) for row in everything if row.ours != "refuse" and not row.vllm_takes_it] == []


def test_what_is_refused_here_only_has_a_reason(rows: list[Row]) -> None:
    refused = [row for row in rows if row.ours == "refuse" and row.case in CASES]
    assert [line(row) for row in refused if row.vllm_takes_it != bool(row.case.stricter)] == []


def test_what_passes_without_a_word_is_served_as_it_was_trained(everything: list[Row]) -> None:
    assert [line(row) for row in everything if row.ours == "accept" and not row.served_as_trained] == []


def test_the_oracle_tells_right_from_wrong(rows: list[Row]) -> None:
    named = {row.case.name: row for row in rows}
    assert named["plain"].served_as_trained
    assert named["plain"].vllm["modules"] == 4
    assert named["every module"].vllm["modules"] == 14
    assert of_vllm(named["prefix lost"]) == "the base answers"
    assert of_vllm(named["alpha NaN"]) == "serves 4 modules, unlike PEFT"
    assert not named["dora"].vllm_takes_it


def test_the_random_ones_are_of_every_kind(everything: list[Row]) -> None:
    mixed = [row for row in everything if row.case.name.startswith(MIXED)]
    for kind in ("accept", "warn", "refuse"):
        assert len([row for row in mixed if row.ours == kind]) > 30
    assert len([row for row in mixed if not row.vllm_takes_it]) > 100
