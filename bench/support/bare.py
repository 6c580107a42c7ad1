"""Pulumi's own floor: programs of this project's host and state that do nothing but declare resources."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support.site import Site

PROJECT = """name: bare
runtime: {name: python, options: {virtualenv: .venv}}
stackConfigDir: stacks
"""
PROVIDER = """from pulumi.dynamic import CreateResult, DiffResult, Resource, ResourceProvider


class ThingProvider(ResourceProvider):
    def create(self, props):
        return CreateResult("thing", props)

    def diff(self, _id, _olds, _news):
        return DiffResult(changes=False)


class Thing(Resource):
    def __init__(self, name, opts=None):
        super().__init__(ThingProvider(), name, {}, opts)
"""
PROGRAM = """import json
from pathlib import Path

import pulumi

declared = json.loads(Path("declared.json").read_text())
if declared["dynamic"]:
    from things import Thing

parent = None
for number in range(declared["component"]):
    parent = pulumi.ComponentResource(f"bare:index:Group{number}", f"group-{number}")
opts = pulumi.ResourceOptions(parent=parent)
for number in range(declared["dynamic"]):
    Thing(f"thing-{number}", opts)
if declared["command"]:
    from pulumi_command import remote

    for number in range(declared["command"]):
        remote.Command(
            f"command-{number}",
            connection=remote.ConnectionArgs(**declared["connection"]),
            create="cat",
            stdin="{}",
            opts=opts,
        )
"""


@dataclass
class BareProgram:
    """A program of so many resources of each kind, deployed."""

    root: Path
    environment: Mapping[str, str]

    def preview(self) -> None:
        self._pulumi("preview", "--stack", "bare", "--expect-no-changes")

    def up(self) -> None:
        self._pulumi("up", "--yes", "--skip-preview", "--stack", "bare")

    def _pulumi(self, *words: str) -> None:
        done = subprocess.run(
            ["pulumi", *words, "--non-interactive"],
            cwd=self.root, env=dict(self.environment), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"the bare program's pulumi {words[0]} failed:\n{done.stdout}{done.stderr}")


def bare_program(site: Site, name: str, kinds: Mapping[str, int]) -> BareProgram:
    """Make a program with `kinds` (dynamic, command, component) of resources beside the site's stack, and deploy it."""
    root = site.work / name
    (root / "stacks").mkdir(parents=True)
    (root / ".venv").symlink_to((site.stack.checkout.root / ".venv").readlink())
    (root / "Pulumi.yaml").write_text(PROJECT)
    (root / "things.py").write_text(PROVIDER)
    (root / "__main__.py").write_text(PROGRAM)
    connection = {
        "host": "127.0.0.1",
        "port": site.machine.port(),
        "user": "root",
        "private_key": site.key.read_text(),
        "host_key": site.machine.host_key,
    }
    declared = {"dynamic": 0, "command": 0, "component": 0, **kinds, "connection": connection}
    (root / "declared.json").write_text(json.dumps(declared))
    backend = site.work / f"{name}-backend"
    shutil.rmtree(backend, ignore_errors=True)
    backend.mkdir()
    program = BareProgram(root, {**site.stack.checkout.environment, "PULUMI_BACKEND_URL": f"file://{backend}"})
    program._pulumi("stack", "init", "bare", "--secrets-provider=passphrase")
    program.up()
    return program


def kinds_of(state: Mapping[str, Any]) -> Counter[str]:
    """How many resources of each kind a stack's exported state has, its providers and the stack itself aside."""
    kinds: Counter[str] = Counter()
    for resource in state["deployment"].get("resources", []):
        kind = str(resource["type"])
        if kind == "pulumi:pulumi:Stack" or kind.startswith("pulumi:providers:"):
            continue
        if kind.startswith("pulumi-python:"):
            kinds["dynamic"] += 1
        else:
            kinds["command" if kind.startswith("command:") else "component"] += 1
    return kinds
