"""A directory for one measurement, on a real disk; it is gone afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch() -> Iterator[Path]:
    # /tmp may be memory, which is neither as large nor as slow.
    with tempfile.TemporaryDirectory(prefix="lora-pods-bench-", dir="/var/tmp") as directory:
        yield Path(directory)
