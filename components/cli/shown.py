"""Ages as a person reads them."""

from __future__ import annotations

from datetime import timedelta


def shown_age(age: timedelta) -> str:
    """Whole days, or whole hours below two days, as `--older-than` takes them."""
    hours = max(0, age // timedelta(hours=1))
    return f"{hours // 24}d" if hours >= 48 else f"{hours}h"
