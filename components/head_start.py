"""The process of the dynamic providers, asked for before the program is loaded.

Pulumi starts it when the first resource needs it, and the program, which has taken as long to load its own libraries,
waits for it then. Asked for at once, the one loads while the other does: half a second of every preview.
"""

from __future__ import annotations

from typing import Any

from pulumi.runtime.proto import resource_pb2
from pulumi.runtime.settings import get_monitor

# No function has this name; the engine has to have started the provider to know (`resmon.Invoke` in
# pkg/resource/deploy/source_eval.go, 3.274.1). It is the package of `pulumi.dynamic`, in the version that its
# resources ask for, which is none: so it is the same provider, not another one.
_NO_FUNCTION = "pulumi-python:dynamic:none"

# gRPC cancels a call that nobody holds, and what the program itself holds goes before its resources are registered.
_under_way: list[Any] = []


def head_start() -> None:
    """Let the engine start the dynamic providers' process, without waiting for it.

    The answer will be that there is no such function; nobody asks for it.
    """
    request = resource_pb2.ResourceInvokeRequest(tok=_NO_FUNCTION, acceptResources=True)
    monitor: Any = get_monitor()
    _under_way.append(monitor.Invoke.future(request))
