"""An AWS without network, accounts or settings of this machine: moto's, with a wire that can be watched and cut."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from botocore.loaders import create_loader
from moto import mock_aws

from tests.cloud.wire import Wire
from tests.support.s3 import ENVIRONMENT

_LOADER = create_loader()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("AWS_") or name.upper() in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.delenv(name)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    # One for all sessions, since each would parse the same megabyte of what S3 is: half of a test's time.
    monkeypatch.setattr("botocore.session.create_loader", lambda *_: _LOADER)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """moto's AWS in this process, and what goes over the wire to it."""
    wire = Wire()
    wire.tap(monkeypatch)
    with mock_aws(config={"core": {"mock_credentials": False}}):
        yield wire
