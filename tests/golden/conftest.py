"""`pytest tests/golden --update-golden` writes what the code gives now; review the diff before committing it."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the expected files anew")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    # Unknown to pytest when it was started on another directory: this file is read too late then.
    return bool(request.config.getoption("update_golden", default=False))
