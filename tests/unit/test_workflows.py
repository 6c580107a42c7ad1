"""The workflows for GitHub: what they may do, for whom, and with which versions of what."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
FORK_GUARD = "github.event.pull_request.head.repo.full_name == github.repository && github.actor != 'dependabot[bot]'"
PIN = re.compile(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def workflow(name: str) -> dict[str, Any]:
    # A loader without types, for which the key `on` is no truth value.
    parsed: dict[str, Any] = yaml.load(WORKFLOWS[name].read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    return parsed


def steps(name: str) -> Iterator[dict[str, Any]]:
    for job in workflow(name)["jobs"].values():
        yield from job["steps"]


def pulumi_step(name: str) -> dict[str, Any]:
    (step,) = [step for step in steps(name) if str(step.get("uses", "")).startswith("pulumi/actions@")]
    return step


def test_they_are_all_known() -> None:
    assert set(WORKFLOWS) == {"ci", "preview", "up"}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_action_is_pinned_and_says_its_version(name: str) -> None:
    lines = [line.strip(" -") for line in WORKFLOWS[name].read_text(encoding="utf-8").splitlines() if "uses:" in line]
    assert lines
    assert [line for line in lines if not PIN.fullmatch(line)] == []


def test_one_version_of_each_action() -> None:
    used = {str(step["uses"]) for name in WORKFLOWS for step in steps(name) if "uses" in step}
    assert len(used) == len({use.partition("@")[0] for use in used})


@pytest.mark.parametrize("name", WORKFLOWS)
def test_no_checkout_leaves_a_token_behind(name: str) -> None:
    checkouts = [step for step in steps(name) if str(step.get("uses", "")).startswith("actions/checkout@")]
    assert checkouts
    assert all(step["with"]["persist-credentials"] == "false" for step in checkouts)


def test_nothing_may_be_written_but_the_comment() -> None:
    granted = {}
    for name in WORKFLOWS:
        parsed = workflow(name)
        for job, declared in parsed["jobs"].items():
            granted[f"{name} {job}"] = declared.get("permissions", parsed["permissions"])
    # A token that says which repository and branch this is; a role of AWS decides whom it trusts.
    assert granted.pop("preview preview") == {"contents": "read", "pull-requests": "write", "id-token": "write"}
    assert granted.pop("up up") == {"contents": "read", "id-token": "write"}
    assert set(map(json.dumps, granted.values())) == {json.dumps({"contents": "read"})}


def test_a_forks_pull_request_runs_nothing_with_secrets() -> None:
    # `pull_request_target` would run with the secrets of this repository.
    assert workflow("preview")["on"] == "pull_request"
    assert all(FORK_GUARD in job["if"] for job in workflow("preview")["jobs"].values())
    assert [name for name in WORKFLOWS if "pull_request_target" in WORKFLOWS[name].read_text(encoding="utf-8")] == []
    assert "secrets." not in WORKFLOWS["ci"].read_text(encoding="utf-8")


def test_secrets_go_to_pulumis_step_alone() -> None:
    for name in ("preview", "up"):
        holders = [step for step in steps(name) if "secrets." in json.dumps(step)]
        assert holders == [pulumi_step(name)]
        assert not any("env" in job for job in workflow(name)["jobs"].values())


def test_each_stack_has_one_comment_that_is_kept_up_to_date() -> None:
    given = pulumi_step("preview")["with"]
    assert given["command"] == "preview"
    assert (given["comment-on-pr"], given["edit-pr-comment"]) == ("true", "true")
    assert "matrix.stack" in given["stack-name"]


def test_what_was_merged_is_brought_up_one_at_a_time_and_never_ended_half_way() -> None:
    up = workflow("up")
    assert up["on"]["push"] == {"branches": ["main"]}
    assert "stack" in up["on"]["workflow_dispatch"]["inputs"]
    assert "refs/heads/main" in up["jobs"]["stacks"]["if"]
    assert up["jobs"]["up"]["concurrency"] == {"group": "up-${{ matrix.stack }}", "cancel-in-progress": "false"}
    assert up["jobs"]["up"]["environment"] == "${{ matrix.stack }}"
    assert pulumi_step("up")["with"]["command"] == "up"


def test_previews_of_one_stack_and_pull_request_give_way_to_the_newest() -> None:
    concurrency = workflow("preview")["jobs"]["preview"]["concurrency"]
    assert "matrix.stack" in concurrency["group"]
    assert "pull_request.number" in concurrency["group"]


@pytest.mark.parametrize("name", ["preview", "up"])
def test_no_text_from_outside_becomes_a_command(name: str) -> None:
    assert [step["run"] for step in steps(name) if "${{" in str(step.get("run", ""))] == []


@pytest.mark.parametrize(("asked", "names"), [("", '["acme", "globex"]'), ("globex", '["globex"]'), ("nope", None)])
def test_the_stacks_are_those_with_a_file(tmp_path: Path, asked: str, names: str | None) -> None:
    (tmp_path / "bootstrap").mkdir()
    shutil.copy(ROOT / "bootstrap/stack_names.py", tmp_path / "bootstrap")
    (tmp_path / "stacks").mkdir()
    for stack in ("acme", "example", "globex", "sandbox"):
        (tmp_path / f"stacks/Pulumi.{stack}.yaml").touch()
    (command,) = [step["run"] for step in steps("up") if step.get("id") == "list"]
    output = tmp_path / "output"
    environment = {**os.environ, "STACK": asked, "GITHUB_OUTPUT": str(output)}
    done = subprocess.run(
        ["bash", "-e", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, output.read_text()) == ((0, f"names={names}\n") if names else (1, ""))


def test_the_next_step_finds_what_was_set_up(tmp_path: Path) -> None:
    for name in ("preview", "up"):
        (command,) = [step["run"] for step in steps(name) if "./dev setup" in str(step.get("run", ""))]
        fake = tmp_path / "dev"
        fake.write_text(
            '#!/bin/sh\n[ "$1" != env ] || echo "export PATH=/venv/bin:$PATH PULUMI_SKIP_UPDATE_CHECK=1"\n',
            encoding="utf-8",
        )
        fake.chmod(0o755)
        environment = {"PATH": os.environ["PATH"], "GITHUB_ENV": str(tmp_path / name), "PULUMI_ACCESS_TOKEN": "secret"}
        subprocess.run(["bash", "-e", "-c", command], cwd=tmp_path, env=environment, check=True)
        assert sorted((tmp_path / name).read_text(encoding="utf-8").splitlines()) == [
            f"PATH=/venv/bin:{os.environ['PATH']}",
            "PULUMI_SKIP_UPDATE_CHECK=1",
        ]


@pytest.mark.parametrize(
    ("variable", "asked"),
    [("", ["setup"]), ("aws", ["setup", "--with", "aws"]), ("a b; exit 3", ["setup", "--with", "a b; exit 3"])],
)
def test_a_variable_says_what_stacks_on_aws_need(tmp_path: Path, variable: str, asked: list[str]) -> None:
    for name in ("preview", "up"):
        (step,) = [step for step in steps(name) if "./dev setup" in str(step.get("run", ""))]
        assert step["env"] == {"LORA_PODS_WITH": "${{ vars.LORA_PODS_WITH }}"}
        fake = tmp_path / "dev"
        fake.write_text('#!/bin/sh\n[ "$1" != setup ] || printf "%s\\n" "$@" >asked\n', encoding="utf-8")
        fake.chmod(0o755)
        environment = {"PATH": os.environ["PATH"], "GITHUB_ENV": str(tmp_path / name), "LORA_PODS_WITH": variable}
        subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=environment, check=True)
        assert (tmp_path / "asked").read_text(encoding="utf-8").splitlines() == asked


def test_actionlint_finds_nothing() -> None:
    version = re.findall(r"actionlint v([\d.]+)", (ROOT / "bootstrap/actionlint/go.mod").read_text(encoding="utf-8"))[0]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    built = cache / f"lora-pods/tools/actionlint-{version}/actionlint"
    program = shutil.which("actionlint") or (str(built) if built.exists() else None)
    if program is None:
        pytest.skip("no actionlint here; ./dev lint builds one where a Go toolchain is")
    done = subprocess.run([program, "-no-color", *WORKFLOWS.values()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
