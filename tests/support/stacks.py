"""A checkout of the program with stacks, a backend and a cache of its own, driven by the real pulumi CLI."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
# As somebody runs pulumi who looks for a fault, and then shows others what it wrote.
LOUD = ("--debug", "-v=9", "--logflow", "--logtostderr")
PROGRAM = ("Pulumi.yaml", "__main__.py", "components", "templates")


@dataclass(frozen=True)
class Run:
    """One call of pulumi: what it printed, and each resource's operation where one was planned or done.

    `operations` maps `<type's last word> <name>` to the engine's word: create, update, replace, delete, same …
    """

    code: int
    output: str
    operations: Mapping[str, str]

    @property
    def changes(self) -> dict[str, str]:
        return {name: op for name, op in self.operations.items() if op not in ("same", "read")}

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.operations.values())


@dataclass
class Checkout:
    """The program's files under `root`, as on a machine of their own."""

    root: Path
    environment: dict[str, str]

    @classmethod
    def make(cls, root: Path, backend: Path) -> Checkout:
        root.mkdir(parents=True)
        for name in PROGRAM:
            source = REPOSITORY / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, root / name)
        (root / "stacks").mkdir()
        # The environment that runs the tests is the program's too.
        (root / ".venv").symlink_to(sys.prefix)
        backend.mkdir(parents=True, exist_ok=True)
        home = root.parent / f"{root.name}-home"
        return cls(
            root,
            {
                # Its copy of the program would be compiled at every run.
                **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
                "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
                "PULUMI_BACKEND_URL": f"file://{backend}",
                "PULUMI_CONFIG_PASSPHRASE": "tests",
                "PULUMI_SKIP_UPDATE_CHECK": "1",
                "PULUMI_DEBUG_COMMANDS": "1",
                "XDG_CACHE_HOME": str(home / "cache"),
                "XDG_STATE_HOME": str(home / "state"),
            },
        )

    def stack(self, name: str) -> Stack:
        stack = Stack(self, name)
        if not stack.file.exists():
            stack.pulumi("stack", "init", name, "--secrets-provider=passphrase")
        return stack


@dataclass
class Stack:
    checkout: Checkout
    name: str
    secrets: dict[str, str] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.checkout.root / "stacks" / f"Pulumi.{self.name}.yaml"

    def configure(
        self,
        pods: Sequence[Mapping[str, Any]],
        models: Sequence[Mapping[str, Any]],
        more: Mapping[str, Any] | None = None,
        /,
        **secrets: str,
    ) -> None:
        """Write the stack file; what `more` says, and a secret given once, is kept until it is given again."""
        text = yaml.safe_load(self.file.read_text(encoding="utf-8")) if self.file.exists() else None
        declared: dict[str, Any] = text or {}
        config = declared.setdefault("config", {})
        config["lora-pods:pods"] = list(pods)
        config["lora-pods:models"] = list(models)
        config.update({f"lora-pods:{key}": value for key, value in (more or {}).items()})
        self.file.write_text(yaml.safe_dump(declared, sort_keys=False, allow_unicode=True), encoding="utf-8")
        for key, value in secrets.items():
            self.pulumi("config", "set", "--secret", key, "--stack", self.name, stdin=value)

    def up(self, *arguments: str, fails: bool | None = False) -> Run:
        """`fails` is what the test expects; None: either."""
        return self._operate("up", "--yes", "--skip-preview", *arguments, fails=fails)

    def preview(self, *arguments: str, fails: bool | None = False) -> Run:
        return self._operate("preview", *arguments, fails=fails)

    def refresh(self, *arguments: str) -> Run:
        return self._operate("refresh", "--yes", "--skip-preview", *arguments, fails=False)

    def destroy(self, *arguments: str, fails: bool = False) -> Run:
        return self._operate("destroy", "--yes", "--skip-preview", *arguments, fails=fails)

    def export(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.pulumi("stack", "export", "--stack", self.name))
        return state

    def outputs(self) -> dict[str, Any]:
        outputs: dict[str, Any] = json.loads(self.pulumi("stack", "output", "--json", "--stack", self.name))
        return outputs

    def pulumi(self, *words: str, stdin: str | None = None) -> str:
        done = self._run(words, stdin)
        if done.returncode != 0:
            raise AssertionError(f"pulumi {' '.join(words)} exited {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    @contextmanager
    def started(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Pulumi at work, to be interrupted; it is gone when the block ends."""
        process = subprocess.Popen(
            ["pulumi", *words, "--stack", self.name, "--non-interactive"],
            cwd=self.checkout.root,
            env=self.checkout.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def events(self) -> str:
        """What the last operation wrote to its event log."""
        return self._event_log.read_text(encoding="utf-8")

    @property
    def _event_log(self) -> Path:
        return self.checkout.root / f"events-{self.name}.jsonl"

    def traced(self, calls: str, *words: str) -> tuple[str, str]:
        """Run pulumi. -> the system calls `calls` (strace's expression) of it and of all that it starts, its output."""
        trace = self.checkout.root / "trace"
        strace = ("strace", "-f", "-qq", "-s", "1000000", "-e", f"trace={calls}", "-o", str(trace))
        done = self._run(words, None, strace)
        assert done.returncode == 0, done.stdout + done.stderr
        return trace.read_text(errors="replace"), done.stdout + done.stderr

    def _operate(self, verb: str, *words: str, fails: bool | None) -> Run:
        log = self._event_log
        log.unlink(missing_ok=True)
        done = self._run((verb, "--stack", self.name, "--color=never", "--event-log", str(log), *words), None)
        output = done.stdout + done.stderr
        if fails is not None and (done.returncode != 0) != fails:
            expected = "a failure" if fails else "success"
            raise AssertionError(f"pulumi {verb}: {expected} was expected, it exited {done.returncode}:\n{output}")
        return Run(done.returncode, output, _operations(log))

    def _run(
        self, words: Sequence[str], stdin: str | None, before: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*before, "pulumi", *words, "--non-interactive"],
            cwd=self.checkout.root,
            env=self.checkout.environment,
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            check=False,
        )


def _operations(log: Path) -> dict[str, str]:
    operations: dict[str, str] = {}
    if not log.exists():
        return operations
    for line in log.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        metadata = (event.get("resourcePreEvent") or {}).get("metadata")
        if metadata is None or metadata["type"] == "pulumi:pulumi:Stack":
            continue
        name = f"{metadata['type'].split(':')[-1]} {metadata['urn'].split('::')[-1]}"
        operation = metadata["op"]
        # A replacement is told in steps (create-replacement, replace, delete-replaced): one word for all of them.
        if "replace" in operation:
            operation = "replace"
        if not metadata["type"].startswith("pulumi:providers:"):
            operations[name] = operation
    return operations
