"""Amounts of bytes as a person reads them."""

from __future__ import annotations


def shown_size(count: float) -> str:
    """Bytes: `151.6 MiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
