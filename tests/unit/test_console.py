"""Whom progress is shown to: a terminal on which pulumi draws its table, and nobody else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from components import console

PTS = "/dev/pts/3"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CI", "GITHUB_ACTIONS", "BUILD_ID", "TF_BUILD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    remembering = (console.watched, console.program_says)
    for each in remembering:
        each.cache_clear()
    yield
    for each in remembering:
        each.cache_clear()


def processes(
    proc: Path, stdin: str = PTS, stdout: str = PTS, arguments: tuple[str, ...] = ("up",), name: str = "pulumi"
) -> Path:
    """pulumi, the script that starts a provider's Python, and this process below them."""
    chain = [(os.getpid(), "python3 (a) b", 20), (20, "pulumi-resource", 10), (10, name, 1)]
    for pid, called, parent in chain:
        (proc / str(pid) / "fd").mkdir(parents=True)
        (proc / str(pid) / "stat").write_text(f"{pid} ({called}) S {parent} {pid} 1 34816")
        (proc / str(pid) / "cmdline").write_text("\0".join([called, *arguments, ""]))
    for end, target in (("0", stdin), ("1", stdout)):
        (proc / "10" / "fd" / end).symlink_to(target)
    return proc


def test_a_terminal_is_watched(tmp_path: Path) -> None:
    assert console.watched(processes(tmp_path))


def test_a_flag_that_is_off_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULUMI_OPTION_DIFF", "false")
    assert console.watched(processes(tmp_path, arguments=("up", "--diff=false")))


@pytest.mark.parametrize(
    "what",
    [
        {"stdout": "pipe:[77]"},
        {"stdin": "/dev/null"},
        {"stdout": "/tmp/log"},
        {"arguments": ("up", "--diff")},
        {"arguments": ("up", "--diff=true")},
        {"arguments": ("preview", "--json")},
        {"arguments": ("up", "--non-interactive")},
        {"name": "bash"},
    ],
)
def test_nobody_watches(tmp_path: Path, what: dict[str, object]) -> None:
    assert not console.watched(processes(tmp_path, **what))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"), [("CI", "true"), ("GITHUB_ACTIONS", "true"), ("TERM", "dumb"), ("PULUMI_OPTION_DIFF", "true")]
)
def test_nobody_watches_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert not console.watched(processes(tmp_path))


def test_a_system_that_does_not_tell_is_taken_for_nobody(tmp_path: Path) -> None:
    assert not console.watched(tmp_path / "proc")


def test_these_tests_have_no_pulumi_above_them_and_say_nothing() -> None:
    assert console.program_says() is None
    assert console.provider_says() is None


def test_a_provider_speaks_of_the_resource_that_its_caller_works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[str, str]] = []
    monkeypatch.setattr(console, "watched", lambda: True)
    monkeypatch.setattr(console, "_engine_log", lambda: lambda urn, line: logged.append((urn, line)))

    def create() -> None:
        say = console.provider_says()
        assert say is not None
        say("uploading a\x1b[2J")

    def servicer(request: SimpleNamespace) -> None:
        create()

    servicer(SimpleNamespace(urn="urn:pulumi:dev::p::t::n"))
    create()
    assert logged == [("urn:pulumi:dev::p::t::n", "uploading a\\x1b[2J"), ("", "uploading a\\x1b[2J")]


def test_a_line_that_cannot_be_said_ends_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def log(urn: str, line: str) -> None:
        tried.append(line)
        raise OSError("the engine is gone")

    monkeypatch.setattr(console, "watched", lambda: True)
    monkeypatch.setattr(console, "_engine_log", lambda: log)
    say = console.provider_says()
    assert say is not None
    say("one")
    say("two")
    assert tried == ["one"]
