"""The locks are what pyproject.toml asks for, and nothing of the machine that made them is in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bootstrap.lock_inputs import inputs_digest, read_project

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ("requirements.txt", "requirements-dev.txt", "requirements-aws.txt")
TOOL_LOCKS = ("bootstrap/tools/uv.txt", "bootstrap/tools/go.txt")
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", re.MULTILINE)


def pins(lock: str) -> dict[str, set[str]]:
    """The versions a lock holds for each name; more than one where markers tell them apart."""
    found: dict[str, set[str]] = {}
    for name, version in PIN.findall((ROOT / lock).read_text(encoding="utf-8")):
        found.setdefault(canonicalize_name(name), set()).add(version)
    return found


def direct_requirements(lock: str) -> list[Requirement]:
    document = read_project()
    project = cast("dict[str, list[str]]", document["project"])
    wanted = list(project["dependencies"])
    if lock == "requirements-aws.txt":
        wanted += cast("dict[str, dict[str, list[str]]]", document["project"])["optional-dependencies"]["aws"]
    if lock == "requirements-dev.txt":
        wanted += cast("dict[str, list[str]]", document["dependency-groups"])["dev"]
    return [Requirement(text) for text in wanted]


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_was_made_from_these_dependencies(lock: str) -> None:
    first_line = (ROOT / lock).read_text(encoding="utf-8").split("\n", 1)[0]
    assert first_line == f"# inputs: sha256:{inputs_digest(read_project())}", (
        "pyproject.toml's dependencies changed: run ./dev lock"
    )


@pytest.mark.parametrize("lock", LOCKS)
def test_every_direct_requirement_is_pinned_at_a_version_it_accepts(lock: str) -> None:
    held = pins(lock)
    refused = {
        str(requirement): sorted(held.get(canonicalize_name(requirement.name), set()))
        for requirement in direct_requirements(lock)
        if not held.get(canonicalize_name(requirement.name))
        or not all(
            requirement.specifier.contains(version, prereleases=True)
            for version in held[canonicalize_name(requirement.name)]
        )
    }
    assert refused == {}


@pytest.mark.parametrize("lock", LOCKS + TOOL_LOCKS)
def test_a_lock_holds_pins_and_hashes_and_nothing_else(lock: str) -> None:
    text = (ROOT / lock).read_text(encoding="utf-8")
    line = re.compile(
        r"# inputs: sha256:[0-9a-f]{64}"
        r"|[a-z0-9.-]+==[0-9][A-Za-z0-9.]*( ; [^\\/:]+)? \\"
        r"|    --hash=sha256:[0-9a-f]{64}( \\)?"
    )
    assert [it for it in text.splitlines() if not line.fullmatch(it)] == []
    # Each pin is followed by at least one hash.
    assert not re.search(r"^[a-z].*\\\n(?!    --hash=)", text, re.MULTILINE)


def test_the_tests_run_with_the_versions_that_the_program_runs_with() -> None:
    runtime, dev = pins("requirements.txt"), pins("requirements-dev.txt")
    assert {name: dev.get(name) for name in runtime} == runtime


def test_reformatting_or_another_tools_settings_are_no_change_of_inputs() -> None:
    document = read_project()
    before = inputs_digest(document)
    assert inputs_digest({**document, "tool": {"ruff": {"line-length": 1}}}) == before
    changed = {**cast("dict[str, object]", document["project"]), "dependencies": ["jinja2>=4"]}
    assert inputs_digest({**document, "project": changed}) != before
