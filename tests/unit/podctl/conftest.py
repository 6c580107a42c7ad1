from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.on_pod.podctl import programs, waiting
from components.on_pod.podctl.programs import Ran
from tests.unit.podctl.engines import Engine
from tests.unit.podctl.fake_systemd import FakeSystemd, free_port
from tests.unit.podctl.pods import PodDirectory


@pytest.fixture
def pod(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> PodDirectory:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # no test pulls the plug, and this is most of their time
    # Some verbs ask systemd; this machine's own is none of the tests' business.
    monkeypatch.setattr(programs, "run", lambda *argv, **_: Ran(127, "", f"{argv[0]}: not in this test"))
    for name in ("SSH_CONNECTION", "SUDO_USER"):
        monkeypatch.delenv(name, raising=False)  # a lock says who holds it
    return PodDirectory(tmp_path, lambda: capsys.readouterr()[:2])


@pytest.fixture
def systemd(pod: PodDirectory, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSystemd]:
    fake = FakeSystemd(pod.units)
    monkeypatch.setattr(programs, "run", fake.run)
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.001)
    yield fake
    fake.close()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def engine(pod: PodDirectory, port: int, systemd: FakeSystemd) -> Engine:
    return Engine(pod, port)
