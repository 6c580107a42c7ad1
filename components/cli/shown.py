"""Sizes and ages as a person reads them."""

from __future__ import annotations

from datetime import timedelta


def shown_size(count: float) -> str:
    """Bytes: `151.6 MiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def shown_age(age: timedelta) -> str:
    """Whole days, or whole hours below two days, as `--older-than` takes them."""
    hours = max(0, age // timedelta(hours=1))
    return f"{hours // 24}d" if hours >= 48 else f"{hours}h"
