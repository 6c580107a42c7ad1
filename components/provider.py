"""What this project's dynamic resource providers have in common. They run in a process of Pulumi's own.

The only owner of `pulumi.dynamic`'s provider side. Every preview waits for that process, which needs the settings (and
pydantic) only where something is to be done: modules of providers import them late, or for their types alone.
"""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Any

from pulumi.dynamic import ConfigureRequest, ResourceProvider

from components.core.errors import UserError, printable_text

if TYPE_CHECKING:
    from components.settings import RawConfig, Settings

_format_exc = traceback.format_exc


def _sentence_or_traceback(*arguments: Any, **options: Any) -> str:
    error = sys.exc_info()[1]
    return printable_text(error if isinstance(error, UserError) else _format_exc(*arguments, **options))


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

    def settings(self) -> Settings:
        """What the configuration says, parsed once: every resource asks, and a stack may have a thousand."""
        from components.settings import load

        if self._loaded is None or self._loaded[0] is not self._config:
            self._loaded = (self._config, load(self._config))
        return self._loaded[1]
