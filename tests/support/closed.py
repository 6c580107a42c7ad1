"""A directory that nobody may look into, root included, who runs many of these tests."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def close(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system refuse to look at whatever is in it."""
    for name in ("stat", "lstat", "open", "scandir"):
        monkeypatch.setattr(os, name, _refusing(getattr(os, name), directory))


def _refusing(call: Any, directory: Path) -> Any:
    def refusing(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        inside = isinstance(path, str | os.PathLike) and directory in Path(os.path.normpath(path)).parents
        if inside:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return call(path, *arguments, **options)

    return refusing
