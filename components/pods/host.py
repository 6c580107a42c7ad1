"""`host`: a machine that is already there. Nothing of it is ours but what podctl puts on it."""

from __future__ import annotations

import pulumi

from components.core.naming import url_host
from components.core.ssh_key import fingerprint
from components.pods.contract import Machine
from components.pods.credentials import STACK_KEY, private_key_text
from components.remote import Connection
from components.settings import LOOPBACK, Host, Pod, Settings


def machine(host: Host, pod: Pod, settings: Settings) -> Machine:
    if host.insecure_host_key:
        pulumi.log.warn(
            f"{host.address}: insecureHostKey accepts any host key, so whoever answers there is sent the engine's "
            "secrets and the adapters; set hostKey to what the machine says of itself."
        )
    reached_at = "127.0.0.1" if pod.listen in LOOPBACK else host.address
    return Machine(
        connection=Connection(
            address=host.address,
            port=host.port,
            user=host.user,
            host_key=host.host_key,
            credential=STACK_KEY,
            private_key=pulumi.Output.secret(private_key_text(STACK_KEY, settings)),
        ),
        identity=fingerprint(host.host_key) if host.host_key else "any host key",
        endpoint=pulumi.Output.from_input(f"{pod.scheme}://{url_host(reached_at)}:{pod.engine.port}/v1"),
    )
