"""What a dynamic provider waits for, and what ends it."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from functools import wraps
from types import SimpleNamespace

import pytest

from components import provider
from components.core.errors import UserError


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `configure` and a cancel change for good."""
    monkeypatch.setattr(traceback, "format_exc", traceback.format_exc)
    monkeypatch.setattr(provider, "_cancelled", threading.Event())


def test_what_runs_ends_where_the_engine_tells_pulumis_process_to_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Servicer:
        def Cancel(self, request: object, context: object) -> object:
            raise AssertionError("the code of this is replaced")

    held = Servicer().Cancel  # as gRPC holds it
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(DynamicResourceProviderServicer=Servicer))
    provider.Provider().configure(SimpleNamespace(config={}))  # type: ignore[arg-type]
    undone = []

    async def upload() -> None:
        threading.Thread(target=held, args=("nothing", None)).start()
        try:
            await asyncio.sleep(20)
            raise AssertionError("it was not cancelled")
        finally:
            undone.append(True)

    with pytest.raises(UserError) as error:
        provider.run(upload())
    assert str(error.value) == "it was cancelled: run the same command again, it goes on from there"
    assert undone == [True]
    with pytest.raises(UserError, match="was cancelled"):
        provider.run(upload())
    assert undone == [True], "nothing begins any more"
    assert held("nothing", None) == "nothing", "and nothing is left to be cancelled"


def test_what_ends_by_itself_is_answered() -> None:
    async def answer() -> int:
        return 7

    assert provider.run(answer()) == 7


def test_another_sdk_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Decorated:
        Cancel = staticmethod(wraps(len)(lambda *arguments: monkeypatch and arguments))  # closes over something

    for main in (
        SimpleNamespace(),
        SimpleNamespace(DynamicResourceProviderServicer=SimpleNamespace(Cancel=len)),
        SimpleNamespace(DynamicResourceProviderServicer=Decorated),
    ):
        monkeypatch.setitem(sys.modules, "__main__", main)
        provider.Provider().configure(SimpleNamespace(config={}))  # type: ignore[arg-type]
