"""Ansible and pyinfra from PyPI, in an environment of their own: they are no part of this project's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.support.timing import tell

# As `bench/peers` was written for them; ansible 12 brings ansible.posix, which has `synchronize`.
REQUIRED = ("ansible>=12,<13", "pyinfra>=3,<4")


def peers_venv() -> Path:
    """The directory of its programs; made once, and kept."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = caches / "lora-pods" / "bench-peers"
    mark = root / ".made"
    if not mark.exists() or mark.read_text() != " ".join(REQUIRED):
        tell(f"installing {' and '.join(REQUIRED)} (600 MB; rm -rf {root} removes them)")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(root)], check=True)
        subprocess.run([str(root / "bin/python"), "-m", "pip", "install", "--quiet", *REQUIRED], check=True)
        mark.write_text(" ".join(REQUIRED))
    return root / "bin"
