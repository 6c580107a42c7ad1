"""What a stack does about a pod that leaves it: podctl is sent there, and a pod that is gone holds nobody up."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import asyncssh
import pytest

from components import ssh
from components.core.errors import UserError
from components.core.naming import engine_key
from components.core.ssh_key import shown_key
from components.on_pod.boot import podctl_source
from components.on_pod.podctl import names
from components.pods import reach
from components.pods.reach import ReachedPodProvider
from components.remote import leave_line
from components.ssh import Address, Greeting
from tests.components.test_ssh import CLIENT, SERVER, STRANGER, Handler, public, server, text

ENGINE = engine_key("acme", "org/base")
LEFT = (
    f"lora-pods-{ENGINE}.service serves on there, from /var/lib/lora-pods; to take both off, log in as root and run: "
    f"python3 /var/lib/lora-pods/bin/podctl leave --engine {ENGINE}\n"
)


class Leaving(ReachedPodProvider):
    def settings(self) -> Any:
        return None


@pytest.fixture
def leaving(monkeypatch: pytest.MonkeyPatch) -> Leaving:
    monkeypatch.setattr(reach, "private_key_text", lambda *_: text(CLIENT))
    monkeypatch.setattr(reach, "LEAVING_PATIENCE", 0.1)
    monkeypatch.setattr(ssh, "PAUSE_SECONDS", 0.05)
    return Leaving()


@contextmanager
def pod(handler: Handler, host_key: asyncssh.SSHKey = SERVER) -> Iterator[dict[str, Any]]:
    """An SSH server on a thread of its own, and the outputs of a resource that reached it."""
    ready, over = threading.Event(), threading.Event()
    where: list[Address] = []

    async def serve() -> None:
        async with server(handler, host_key) as address:
            where.append(address)
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(20)
    try:
        yield outputs(where[0].port)
    finally:
        over.set()
        thread.join()


def outputs(port: int, host_key: str = public(SERVER), address: str = "127.0.0.1") -> dict[str, Any]:
    connection = {
        "address": address, "port": float(port), "user": "root", "hostKey": host_key,
        "credential": "config:sshPrivateKey",
    }  # fmt: skip
    return {"engine": ENGINE, "connection": connection, "machine": "0123 reached today", "plugin_host_key": host_key}


def test_a_pod_is_sent_podctl_to_leave_it(leaving: Leaving, capfd: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str | None, bytes]] = []

    async def answer(process: asyncssh.SSHServerProcess[bytes]) -> None:
        asked.append((process.command, await process.stdin.read()))
        process.stdout.write(json.dumps({"removed": False, "left": ["model a of stack other"]}).encode() + b"\n")
        process.exit(0)

    with pod(answer) as props:
        leaving.delete("id", props)
        at = f"root@127.0.0.1:{int(props['connection']['port'])}"
    assert asked == [(leave_line("root", ENGINE), podctl_source().encode())]
    assert capfd.readouterr().out == f"{at} stays as it is, for others still use it: model a of stack other\n"


def test_what_podctl_refuses_is_an_error(leaving: Leaving) -> None:
    async def refuse(process: asyncssh.SSHServerProcess[bytes]) -> None:
        await process.stdin.read()
        process.stderr.write(b"the unit does not stop\n")
        process.exit(1)

    with pod(refuse) as props, pytest.raises(UserError, match=r"^the unit does not stop$"):
        leaving.delete("id", props)


async def never(process: asyncssh.SSHServerProcess[bytes]) -> None:
    raise AssertionError("nothing may be sent to another machine")


def test_a_pod_that_does_not_answer_is_forgotten(leaving: Leaving, capfd: pytest.CaptureFixture[str]) -> None:
    with pod(never) as props:
        pass
    leaving.delete("id", props)
    at = f"root@127.0.0.1:{int(props['connection']['port'])}"
    assert capfd.readouterr().out == (
        f"warning: {at} cannot be reached for 0.1 s (Connection refused), so it is forgotten as it is. "
        f"Where it lives, {LEFT}"
    )


def test_a_pod_that_is_another_machine_now_is_forgotten(leaving: Leaving, capfd: pytest.CaptureFixture[str]) -> None:
    with pod(never, host_key=STRANGER) as props:
        leaving.delete("id", props)
        at = f"root@127.0.0.1:{int(props['connection']['port'])}"
    assert capfd.readouterr().out == (
        f"warning: {at} shows another host key, {shown_key(public(STRANGER))}, than the pinned one, "
        f"{shown_key(public(SERVER))}, so it is forgotten as it is. Where it lives, {LEFT}"
    )


def test_no_pod_is_forgotten_by_a_machine_that_is_offline(leaving: Leaving, monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(asyncssh, "connect", connect)
    with pytest.raises(UserError) as caught:
        leaving.delete("id", outputs(22, address="pod.example"))
    assert str(caught.value) == (
        "the name pod.example cannot be resolved (Temporary failure in name resolution): is this machine online?"
    )


def test_a_pod_that_refuses_the_key_is_not_forgotten(leaving: Leaving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "private_key_text", lambda *_: text(STRANGER))
    with pod(never) as props, pytest.raises(UserError, match="refuses the SSH key"):
        leaving.delete("id", props)


def test_a_pod_that_is_switched_off_is_not_asked(leaving: Leaving) -> None:
    leaving.delete("id", {**outputs(1), "running": False})


def test_a_machine_in_anothers_place_is_told(
    leaving: Leaving, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def greet(*_: object) -> Greeting:
        return Greeting("ssh-ed25519 AAAA", "0123", {"fault": ""})

    monkeypatch.setattr(ssh, "greet", greet)
    before = outputs(22, address="10.0.0.7")
    leaving.update("id", before, outputs(22, "ssh-ed25519 BBBB", "10.0.0.8"))
    assert capfd.readouterr().out == f"root@10.0.0.8:22 takes the place of root@10.0.0.7:22. Where that lives, {LEFT}"
    leaving.update("id", before, outputs(22, address="10.0.0.9"))
    assert capfd.readouterr().out == "", "a machine that moved is the same"


def test_podctl_calls_engines_as_the_program_does() -> None:
    for stack, base in (
        ("acme", "Qwen/Qwen2.5-7B-Instruct"),
        ("a-b", "/models/ tiny.v1/"),
        ("x", "é" * 200),
        ("y", "--"),
    ):
        assert names.engine_of(stack, base) == engine_key(stack, base)
