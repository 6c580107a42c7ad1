from __future__ import annotations

import os
from pathlib import Path

import pytest

from components.on_pod import podctl
from tests.unit.podctl.pods import PodDirectory


@pytest.fixture
def pod(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> PodDirectory:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # no test pulls the plug, and this is most of their time
    # Some verbs ask systemd; this machine's own is none of the tests' business.
    monkeypatch.setattr(podctl, "run", lambda *argv, **_: podctl.Ran(127, "", f"{argv[0]}: not in this test"))
    return PodDirectory(tmp_path, lambda: capsys.readouterr()[:2])
