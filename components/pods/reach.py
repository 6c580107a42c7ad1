"""The first word with a pod: is it there, is it the one that was pinned, does it let us in?

The command plugin tries every failure again, a wrong host key as long as a booting sshd, and tells them apart in the
words of its SSH library. So the connection is made here first, where each cause has its own sentence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, DiffResult, Resource, UpdateResult

from components.pods.credentials import private_key_text
from components.provider import Provider


class ReachedPodProvider(Provider):
    """Create and update connect; an unchanged connection is not tried."""

    def create(self, props: dict[str, Any]) -> CreateResult:
        return CreateResult(props["connection"]["address"], self._reached(props))

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> UpdateResult:
        return UpdateResult(self._reached(_news))

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> DiffResult:
        return DiffResult(changes=_olds.get("connection") != _news.get("connection"))

    def _reached(self, props: Mapping[str, Any]) -> dict[str, Any]:
        # Here, since asyncssh takes a third of a second to load and a preview reaches no pod.
        from components.ssh import Address, vouched_host_key

        described = props["connection"]
        key = private_key_text(described["credential"], self.settings())
        return {**props, "plugin_host_key": asyncio.run(vouched_host_key(Address.of(described), key))}


class ReachedPod(Resource, module="lora-pods", name="ReachedPod"):
    """A pod that answered. `plugin_host_key` is the host key that the command plugin will be shown.

    A machine has several host keys, and the plugin's library asks for one kind before the others, whichever was pinned
    (golang.org/x/crypto/ssh 0.58: ECDSA, then RSA, then Ed25519). The pinned key vouches for that one.
    """

    plugin_host_key: pulumi.Output[str]

    def __init__(self, name: str, connection: Mapping[str, pulumi.Input[Any]], opts: pulumi.ResourceOptions) -> None:
        super().__init__(ReachedPodProvider(), name, {"connection": connection, "plugin_host_key": None}, opts)
