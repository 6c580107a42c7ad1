"""An SSH host key that is made before its machine is, so that the first connection is pinned already."""

from __future__ import annotations

from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, DiffResult, Resource

from components.core.ssh_key import fingerprint
from components.pods.keys import new_key
from components.provider import Provider


class HostKeyProvider(Provider):
    """Create makes the key; nothing ever changes it."""

    def create(self, props: dict[str, Any]) -> CreateResult:
        private, public = new_key()
        return CreateResult(fingerprint(public), {**props, "private_key": private, "public_key": public})

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> DiffResult:
        return DiffResult(changes=False)


class HostKey(Resource, module="lora-pods", name="HostKey"):
    """A host key of one pod. The state holds its private half encrypted: nobody else has it but the pod."""

    private_key: pulumi.Output[str]
    public_key: pulumi.Output[str]

    def __init__(self, name: str, opts: pulumi.ResourceOptions) -> None:
        secret = pulumi.ResourceOptions(additional_secret_outputs=["private_key"])
        props = {"private_key": None, "public_key": None}
        super().__init__(HostKeyProvider(), name, props, pulumi.ResourceOptions.merge(opts, secret))
