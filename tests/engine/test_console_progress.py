"""Where progress is seen: on a terminal's table, and nowhere else. By a program and a provider of two seconds."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.pod

REPOSITORY = Path(__file__).resolve().parents[2]
SLOW = """
import time
from pulumi.dynamic import CreateResult, Resource, ResourceProvider
from components.console import provider_says
from components.core.meter import Meter

def work(verb, say):
    meter = Meter(verb, 1, 4096, say)
    meter.begin("acme-v1")
    for _ in range(2):
        time.sleep(1.1)
        meter.add(1024)
    return meter

class Slow(ResourceProvider):
    def create(self, props):
        work("uploading", provider_says())
        return CreateResult("id", props)

class Thing(Resource, module="lora-pods", name="Thing"):
    def __init__(self, name):
        super().__init__(Slow(), name, {"a": 1})
"""
PROGRAM = """
import os
from components.console import program_says
from slow import Thing, work
work("hashing", program_says()).end("hashed")
Thing(os.environ["THING"])
"""


def up_on_a_terminal(directory: Path, environment: Mapping[str, str]) -> str:
    """What a terminal of 160 columns shows in the course of an update, one line for each row that was drawn."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    command = ["pulumi", "up", "--yes", "--skip-preview", "--stack", "dev", "--color=never"]
    with subprocess.Popen(
        command, cwd=directory, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as pulumi:
        os.close(theirs)
        shown = b""
        while piece := _read(ours):
            shown += piece
    os.close(ours)
    assert pulumi.returncode == 0, shown
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "\n", shown.decode("utf-8", "replace"))


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # nobody has the other end any more
        return b""


def test_progress_is_seen_on_a_terminal_alone(tmp_path: Path) -> None:
    (tmp_path / "components").symlink_to(REPOSITORY / "components")
    (tmp_path / "state").mkdir()
    for name, text in (("Pulumi.yaml", "name: slow\nruntime: python\n"), ("slow.py", SLOW), ("__main__.py", PROGRAM)):
        (tmp_path / name).write_text(text)
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("CI", "GITHUB_ACTIONS", "BUILD_ID")},
        "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        "PULUMI_BACKEND_URL": f"file://{tmp_path}/state",
        "PULUMI_CONFIG_PASSPHRASE": "tests",
        "PULUMI_SKIP_UPDATE_CHECK": "1",
        "TERM": "xterm",
        "THING": "thing",
    }

    def pulumi(*words: str) -> str:
        done = subprocess.run(
            ["pulumi", *words, "--stack", "dev"],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    pulumi("stack", "init")
    piped = pulumi("up", "--yes", "--skip-preview")
    assert "hash" not in piped
    assert "upload" not in piped

    table = up_on_a_terminal(tmp_path, {**environment, "THING": "another"})
    assert re.search(r"pulumi:pulumi:Stack +slow-dev .*hashing acme-v1: 1\.0 KiB of 4\.0 KiB, \d+ bytes/s", table)
    assert re.search(r"lora-pods:Thing +another .*uploading acme-v1: 2\.0 KiB of 4\.0 KiB, \d+ bytes/s", table)
    rows: list[str] = re.findall(r"lora-pods:Thing +another +(.*)", table)
    assert re.fullmatch(r"created \(\d+s\)\s*", rows[-1]), "it is gone once the work is done"
