"""What this project's dynamic resource providers have in common. They run in a process of Pulumi's own.

The only owner of `pulumi.dynamic`'s provider side. Every preview waits for that process, which needs the settings (and
pydantic) only where something is to be done: modules of providers import them late, or for their types alone.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from pulumi.dynamic import ConfigureRequest, ResourceProvider

from components.core.errors import UserError, printable_text

if TYPE_CHECKING:
    from components.settings import RawConfig, Settings

T = TypeVar("T")

_format_exc = traceback.format_exc
_running: set[asyncio.Task[Any]] = set()
_cancelled = threading.Event()


def _sentence_or_traceback(*arguments: Any, **options: Any) -> str:
    error = sys.exc_info()[1]
    return printable_text(error if isinstance(error, UserError) else _format_exc(*arguments, **options))


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs what a resource waits for, until it is done or Pulumi is told to stop (Ctrl-C). Raises UserError then."""

    async def noted() -> T:
        task = asyncio.current_task()
        assert task is not None
        _running.add(task)
        try:
            if _cancelled.is_set():
                work.close()
                raise asyncio.CancelledError
            return await work
        finally:
            _running.discard(task)

    try:
        return asyncio.run(noted())
    except asyncio.CancelledError:
        raise UserError("it was cancelled: run the same command again, it goes on from there") from None


def end_all() -> None:
    """Ends what runs, at its next step, and what is about to. Called on another thread."""
    _cancelled.set()
    for task in tuple(_running):
        with suppress(RuntimeError):  # its loop was closed meanwhile
            task.get_loop().call_soon_threadsafe(task.cancel)


def _cancel(_self: Any, request: Any, _context: Any) -> Any:
    # Imported here, since this code runs as that of a method of another module.
    from components.provider import end_all

    end_all()
    return request  # which is empty, as the answer is


def _hear_of_cancel() -> None:
    """Has Pulumi's process do something where the engine tells it to cancel.

    Its method for that does nothing (`Cancel` in pulumi/dynamic/__main__.py, SDK 3.272), so that the first Ctrl-C would
    wait for the end of an upload. gRPC holds that very method: only its code can still be another.
    """
    servicer = getattr(sys.modules["__main__"], "DynamicResourceProviderServicer", None)
    with suppress(AttributeError, ValueError):  # of another SDK, whose own way is as good
        servicer.Cancel.__code__ = _cancel.__code__  # type: ignore[union-attr]


class Provider(ResourceProvider):
    """A provider that is stored by reference, not by value, and whose UserErrors reach the console as they are.

    Credentials come from the stack's configuration, which `configure` is handed decrypted; so state never holds a stale
    key.
    """

    serialize_as_secret_always = False
    _config: RawConfig
    _loaded: tuple[RawConfig, Settings] | None = None

    def configure(self, req: ConfigureRequest) -> None:
        self._config = req.config
        # Pulumi's process answers every exception with `traceback.format_exc()` (pulumi/dynamic/__main__.py, SDK
        # 3.272) and leaves a provider no other way to fail. A user's mistake is not worth a traceback.
        traceback.format_exc = _sentence_or_traceback
        _hear_of_cancel()

    def settings(self) -> Settings:
        """What the configuration says, parsed once: every resource asks, and a stack may have a thousand."""
        from components.settings import load

        if self._loaded is None or self._loaded[0] is not self._config:
            self._loaded = (self._config, load(self._config))
        return self._loaded[1]
