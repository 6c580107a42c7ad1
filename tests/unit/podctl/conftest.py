from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.podctl.pods import PodDirectory


@pytest.fixture
def pod(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> PodDirectory:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # no test pulls the plug, and this is most of their time
    return PodDirectory(tmp_path, lambda: capsys.readouterr()[:2])
