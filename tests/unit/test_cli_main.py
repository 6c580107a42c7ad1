"""The `lora` command itself: what is installed, how it starts, and how it ends where something is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bootstrap.lock_inputs import read_project
from components.cli import main as lora
from components.core.errors import UserError
from tests.support.adapters import write_adapter

ROOT = Path(__file__).resolve().parents[2]
LORA = Path(sys.prefix, "bin/lora")
HEAVY = {"pulumi", "pydantic", "yaml", "jinja2", "asyncssh", "grpc", "asyncio", "importlib.metadata"}


def run(*words: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LORA, *words], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_it_is_installed_and_says_its_version() -> None:
    project = read_project()["project"]
    assert isinstance(project, dict)
    assert run("--version").stdout == f"lora-pods {project['version']}\n"


def test_it_lists_its_commands() -> None:
    told = run("--help").stdout
    assert all(command in told for command in lora.COMMANDS)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["check"],
        ["check", "--nonsense", "x"],
        ["new-stack"],
        ["push"],
        ["gc-store"],
        ["gc-store", "--store", "http://bucket"],
        ["gc-store", "--store", "s3://bucket", "--older-than", "soon"],
    ],
)
def test_a_wrong_command_line_is_told_without_a_traceback(words: list[str]) -> None:
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("lora")
    assert "Traceback" not in done.stderr


def test_a_users_fault_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: object) -> int:
        raise UserError("the dog ate it; get another one")

    monkeypatch.setattr(lora, "_run", fail)
    assert lora.main(["check"]) == 2
    assert capsys.readouterr() == ("", "lora: the dog ate it; get another one\n")


def test_nobody_reading_on_is_no_fault(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([LORA, "check", adapter], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (lora.NOBODY_READS, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_what_cannot_be_written_or_found_is_told_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "components.cli.main", "check", str(write_adapter(tmp_path / "a"))]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "lora: no space left on device\n")
    long = run("check", "x" * 5000)
    assert (long.returncode, long.stderr) == (1, "")


def test_ctrl_c_ends_it_quietly() -> None:
    program = (
        "import time, components.cli.main as m\n"
        "m._run = lambda _: print('up', flush=True) or time.sleep(60)\n"
        "raise SystemExit(m.main([]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=10)[1] == ""
    assert process.returncode == lora.INTERRUPTED


def test_the_check_loads_nothing_from_outside(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a")
    program = (
        "import json, sys; from components.cli.main import main; code = main(['check', sys.argv[1]]); "
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, adapter], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert loaded & HEAVY == set()


def test_a_terminal_without_utf_8_is_no_fault(tmp_path: Path) -> None:
    done = run("check", tmp_path / "über", PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert "\\xfcber" in done.stdout
    assert "Traceback" not in done.stderr


def test_another_checkouts_program_is_its_own(tmp_path: Path) -> None:
    """An editable install names this checkout; a program that runs in another one with this venv has its own code."""
    (tmp_path / "components").mkdir()
    (tmp_path / "components/__init__.py").write_text("MINE = True\n", encoding="utf-8")
    (tmp_path / "__main__.py").write_text("import components\nprint(components.MINE)\n", encoding="utf-8")
    code = "import components; print(components.MINE)"
    for words in (["__main__.py"], ["-c", code], ["-m", "components"]):
        (tmp_path / "components/__main__.py").write_text(f"{code}\n", encoding="utf-8")
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == "True\n"
    # And the command is this installation's, wherever it is called.
    assert run("check", "nowhere", cwd=tmp_path).returncode == 1
