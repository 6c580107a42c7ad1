"""What `engines` keeps of a run that did not get everywhere, and what is said where that cannot be known."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pulumi
import pytest

from components import running as module
from components.running import Serving, running


class Recorded:
    """A pod whose run ended with this record."""

    switched_off = False

    def __init__(self, base: str, record: dict[str, Any] | None) -> None:
        self.base = base
        self._record = record

    async def record(self) -> dict[str, Any] | None:
        return self._record


class Off(Recorded):
    """A pod that is switched off."""

    switched_off = True

    def __init__(self, base: str) -> None:
        super().__init__(base, None)

    async def kept(self, record: Mapping[str, Any] | None) -> dict[str, Any] | None:
        return None if record is None else {**record, "running": False}


PODS = [cast("Serving", Recorded("a", {"unit": "new"})), cast("Serving", Recorded("b", None))]


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(pulumi.log, "warn", told.append)
    monkeypatch.setattr(pulumi.runtime, "is_dry_run", lambda: False)
    return told


def last(monkeypatch: pytest.MonkeyPatch, outputs: Mapping[str, Any] | None) -> None:
    async def last_outputs() -> Mapping[str, Any] | None:
        return outputs

    monkeypatch.setattr(module, "last_outputs", last_outputs)


def test_a_pod_that_was_not_finished_keeps_what_was_said_of_it(
    warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    last(monkeypatch, {"a": {"unit": "old"}, "b": {"unit": "old"}, "gone": {"unit": "old"}})
    assert asyncio.run(running(PODS)) == {"a": {"unit": "new"}, "b": {"unit": "old"}}
    last(monkeypatch, {})
    assert asyncio.run(running(PODS)) == {"a": {"unit": "new"}}
    assert warned == []


def test_records_are_not_lost_in_silence(warned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    last(monkeypatch, None)
    assert asyncio.run(running(PODS)) == {"a": {"unit": "new"}}
    (told,) = warned
    assert told.startswith("The stack's last outputs cannot be read, so that `engines` now leaves out the pods")


def test_where_every_pod_was_finished_nothing_is_asked(warned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    last(monkeypatch, None)
    assert asyncio.run(running(PODS[:1])) == {"a": {"unit": "new"}}
    assert warned == []


def test_a_pod_that_is_switched_off_keeps_what_was_said_of_it(
    warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = [*PODS[:1], cast("Serving", Off("b")), cast("Serving", Off("never served"))]
    last(monkeypatch, {"b": {"unit": "old"}})
    assert asyncio.run(running(pods)) == {"a": {"unit": "new"}, "b": {"unit": "old", "running": False}}
    assert warned == []


def test_a_preview_prints_the_outputs_neither_when_it_is_switched_off_nor_after(
    warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulumi.runtime, "is_dry_run", lambda: True)
    pods = [*PODS[:1], cast("Serving", Off("b")), cast("Serving", Off("never served"))]
    last(monkeypatch, {"b": {"unit": "old"}})
    assert asyncio.run(running(pods)) is pulumi.UNKNOWN
    last(monkeypatch, {"b": {"unit": "old", "running": False}})
    assert asyncio.run(running(pods)) == {"a": {"unit": "new"}, "b": {"unit": "old", "running": False}}
