"""The demo: `pulumi up` of the stack file it is told, one question to each model, and what a second preview says."""

import json
import os
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

from bootstrap.demo.ask import ask
from bootstrap.demo.container import ROOT
from bootstrap.demo.personas import QUESTION
from bootstrap.demo.prepare import DEMO, prepare
from components.core.errors import UserError
from components.pods.sandbox import remove_left_over

# The demo's own and no secret: the salt that goes with it is in the stack file.
PASSPHRASE = "lora-pods-demo"


def up(stack: str) -> None:
    """Brings the demo up and shows it. Raises subprocess.CalledProcessError when a step fails."""
    prepare()
    if stack not in _stacks():
        _pulumi("stack", "init", "--no-select", stack)
    _pulumi("up", "--yes", "--stack", stack)
    engines: dict[str, Any] = json.loads(_pulumi_output("stack", "output", "--json", "--stack", stack))["engines"]
    for base, engine in engines.items():
        print(f"\n{base} at {engine['endpoint']} ({engine['unit']}), asked: {QUESTION}\n", flush=True)
        answers = {model: ask(engine["endpoint"], model, QUESTION) for model in engine["models"]}
        print(table(engine["models"], answers), flush=True)
    print("\nAnd a second preview:\n", flush=True)
    _pulumi("preview", "--expect-no-changes", "--stack", stack)
    print(_what_next(stack), flush=True)


def _what_next(stack: str) -> str:
    """How to go on with the demo's stack by hand, and how to end it."""
    return "\n".join(
        [
            "\nDone. To go on with this stack by hand, in this directory:\n",
            '  eval "$(./dev env)"',
            *(f"  export {name}={shlex.quote(value)}" for name, value in _own_environment().items()),
            f"  pulumi preview --stack {stack}     # or: lora status -s {stack}",
            "\n`./dev down` removes the stack and the pod.",
        ]
    )


def down(stack: str) -> None:
    """Destroys the demo's stack and its pod; the model and the adapters stay for the next time."""
    if stack in _stacks():
        _pulumi("destroy", "--yes", "--skip-preview", "--stack", stack)
        _pulumi("stack", "rm", "--yes", "--preserve-config", stack)
    else:
        print(_without_a_stack(stack), flush=True)
    kept = DEMO.parent
    size = _size(kept)
    if size >= 1e6:
        remove = f"rm -rf {shlex.quote(str(kept))}"
        size_and_remedy = f"({size / 1e6:.0f} MB); {remove} removes them."
        print(f"The model and the adapters stay for the next time {size_and_remedy}", flush=True)


def _without_a_stack(stack: str) -> str:
    """Removes the pod of a demo whose state somebody has deleted; returns what there is to say."""
    try:
        left_over = remove_left_over(stack, ROOT)
    except UserError as error:
        return f"The demo is not up here; {error}."
    if left_over:
        return f"The demo's state was gone, but its container lora-pods-{stack} was there: it is removed."
    return "The demo is not up."


def _size(directory: Path) -> int:
    """The bytes of all files below; links are not followed."""
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def table(digests: dict[str, str | None], answers: dict[str, str]) -> str:
    """One row a model: its id, the digest of its adapter, and what it said."""
    rows = [("model", "digest", "answer")]
    rows += [(model, (digests[model] or "(the base)")[:19], answer) for model, answer in answers.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    indent = sum(widths) + 4
    room = max(40, shutil.get_terminal_size().columns - indent)
    lines = []
    for model, digest, answer in rows:
        start, *rest = textwrap.wrap(answer, room) or [""]
        lines.append(f"{model:<{widths[0]}}  {digest:<{widths[1]}}  {start}")
        lines += [" " * indent + line for line in rest]
    return "\n".join(lines)


def _stacks() -> list[str]:
    return [stack["name"] for stack in json.loads(_pulumi_output("stack", "ls", "--json"))]


def _pulumi(*words: str) -> None:
    print(f"$ pulumi {' '.join(words)}", flush=True)
    subprocess.run(["pulumi", *words, "--non-interactive"], check=True, cwd=ROOT, env=_environment())


def _pulumi_output(*words: str) -> str:
    return subprocess.run(
        ["pulumi", *words, "--non-interactive"],
        check=True,
        cwd=ROOT,
        env=_environment(),
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def _environment() -> dict[str, str]:
    """The demo's own state, beside it; the login, the stacks and the SSH agent of who runs it are not touched."""
    (DEMO / "state").mkdir(parents=True, exist_ok=True)
    return {
        # The command plugin dials the agent for every connection, and fails where it is gone.
        **{name: value for name, value in os.environ.items() if name != "SSH_AUTH_SOCK"},
        **_own_environment(),
        "PULUMI_SKIP_UPDATE_CHECK": "1",
    }


def _own_environment() -> dict[str, str]:
    return {"PULUMI_BACKEND_URL": f"file://{DEMO / 'state'}", "PULUMI_CONFIG_PASSPHRASE": PASSPHRASE}
