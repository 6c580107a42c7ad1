"""The connection for bundles, against a real SSH server in this process."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from components import ssh
from components.core.errors import UserError
from components.core.ssh_key import shown_key
from components.ssh import Address, OtherHostKey, greet, open_session

Handler = Callable[["asyncssh.SSHServerProcess[bytes]"], object]
CLIENT, SERVER, STRANGER = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(3))


def text(key: asyncssh.SSHKey) -> str:
    return key.export_private_key().decode()


def public(key: asyncssh.SSHKey) -> str:
    return " ".join(key.export_public_key().decode().split()[:2])


@asynccontextmanager
async def server(handler: Handler, host_key: asyncssh.SSHKey = SERVER) -> AsyncIterator[Address]:
    allowed = asyncssh.import_authorized_keys(public(CLIENT))
    listener = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_host_keys=[host_key],
        authorized_client_keys=allowed,
        process_factory=handler,
        encoding=None,
    )
    async with listener:
        yield Address("127.0.0.1", listener.get_port(), "root", public(SERVER))


async def swallow(process: asyncssh.SSHServerProcess[bytes]) -> None:
    received = await process.stdin.read()
    process.stdout.write(b'{"received": %d, "command": "%s"}\n' % (len(received), (process.command or "").encode()))
    process.exit(0)


def test_a_stream_arrives_whole_and_the_answer_comes_back() -> None:
    async def run() -> None:
        async with server(swallow) as address, open_session(address, text(CLIENT)) as session:
            answer = await session.stream("podctl receive-all", (bytes(1 << 20) for _ in range(9)))
            assert answer == {"received": 9 << 20, "command": "podctl receive-all"}

    asyncio.run(run())


def test_every_packet_of_a_stream_has_bytes_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[int] = []
    logged = asyncssh.SSHServerConnection.log_received_packet

    def log(self: asyncssh.SSHServerConnection, kind: int, *rest: Any, **options: Any) -> None:
        kinds.append(kind)
        logged(self, kind, *rest, **options)

    monkeypatch.setattr(asyncssh.SSHServerConnection, "log_received_packet", log)

    async def run() -> None:
        async with server(swallow) as address, open_session(address, text(CLIENT)) as session:
            assert (await session.stream("podctl receive-all", [bytes(9 << 20)]))["received"] == 9 << 20

    asyncio.run(run())
    assert kinds.count(ssh.MSG_IGNORE) < 10, "a few are sent before the login is over"


def test_a_refusal_is_told_in_podctls_words_and_made_harmless() -> None:
    async def refuse(process: asyncssh.SSHServerProcess[bytes]) -> None:
        process.stderr.write(b"sha256:%s is here (159.0 MiB)\n" % (b"ab" * 32))
        process.stderr.write(b"not enough disk: 3 GiB are needed\n\x1b[31mred")
        process.exit(1)

    async def run() -> None:
        async with server(refuse) as address, open_session(address, text(CLIENT)) as session:
            with pytest.raises(UserError) as caught:
                await session.stream("podctl", (bytes(1 << 20) for _ in range(64)))
        assert str(caught.value) == "not enough disk: 3 GiB are needed\n\\x1b[31mred"

    asyncio.run(run())


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_said_meanwhile_is_heard_line_by_line(fails: bool) -> None:
    heard: list[str] = []

    async def work(process: asyncssh.SSHServerProcess[bytes]) -> None:
        await process.stdin.read()
        for piece in (b"1 of 2 bun", b"dles\n2 of 2 bundles\nno end"):
            process.stderr.write(piece)
        process.stdout.write(b"{}\n" if fails else b'{"fetched": 2}\n')
        process.exit(int(fails))

    async def run() -> None:
        async with server(work) as address, open_session(address, text(CLIENT)) as session:
            if fails:
                with pytest.raises(UserError, match=r"\A1 of 2 bundles\n2 of 2 bundles\nno end\Z"):
                    await session.call("podctl fetch", {}, heard.append)
            else:
                assert await session.call("podctl fetch", {}, heard.append) == {"fetched": 2}

    asyncio.run(run())
    assert heard == ["1 of 2 bundles", "2 of 2 bundles"]


def test_a_source_that_fails_ends_the_command_and_is_told() -> None:
    async def run() -> None:
        def chunks() -> Iterator[bytes]:
            yield bytes(1 << 20)
            raise UserError("the adapter changed while it was sent")

        async with server(swallow) as address, open_session(address, text(CLIENT)) as session:
            with pytest.raises(UserError, match="the adapter changed while it was sent"):
                await session.stream("podctl", chunks())

    asyncio.run(run())


def test_a_refused_key_is_told_at_once() -> None:
    async def run() -> None:
        async with server(swallow) as address:
            with pytest.raises(UserError, match="refuses the SSH key: put its public half into"):
                async with open_session(address, text(STRANGER)):
                    pass

    asyncio.run(run())


@pytest.mark.parametrize(
    ("pinned", "shown"),
    [
        ("ssh-ed25519", "ssh-ed25519"),
        # A machine that has no key of the pinned kind at all.
        ("ssh-ed25519", "ecdsa-sha2-nistp256"),
        ("ecdsa-sha2-nistp384", "ssh-rsa"),
        ("ssh-rsa", "ssh-ed25519"),
    ],
)
def test_another_host_key_is_told_at_once_with_both(pinned: str, shown: str, tmp_path: Path) -> None:
    keys = {name: asyncssh.generate_private_key(kind) for name, kind in (("pinned", pinned), ("shown", shown))}
    told = {name: keygen_says(key, tmp_path / name) for name, key in keys.items()}

    async def run() -> None:
        async with server(never, host_key=keys["shown"]) as address:
            there = replace(address, host_key=public(keys["pinned"]))
            for ask in (open_session(there, text(CLIENT)).__aenter__(), greet(there, text(CLIENT), "true")):
                with pytest.raises(OtherHostKey) as caught:
                    await ask
                assert str(caught.value) == (
                    f"{there} shows another host key, {told['shown']}, than the pinned one, {told['pinned']}: it is "
                    "another machine, or someone is in between, and nothing was sent; if a host was replaced on "
                    "purpose, set its new hostKey (an ec2 instance or a sandbox: `pulumi up --replace` its URN)"
                )

    asyncio.run(run())


async def never(process: asyncssh.SSHServerProcess[bytes]) -> None:
    raise AssertionError("nothing may be sent to another machine")


def keygen_says(key: asyncssh.SSHKey, path: Path) -> str:
    """`SHA256:… (ED25519)`, of `256 SHA256:… no comment (ED25519)`."""
    path.write_bytes(key.export_public_key())
    done = subprocess.run(["ssh-keygen", "-lf", str(path)], check=True, capture_output=True, text=True)
    words = done.stdout.split()
    return f"{words[1]} {words[-1]}"


def test_a_second_key_that_nothing_vouches_for_is_told_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a Go client would be shown is of another kind than the pinned key, and not in the machine's /etc/ssh."""

    async def meets(*_: object, **__: object) -> asyncssh.SSHKey:
        return STRANGER

    monkeypatch.setattr(asyncssh, "get_server_host_key", meets)

    async def run() -> None:
        async with server(swallow) as address:
            with pytest.raises(UserError) as caught:
                await greet(address, text(CLIENT), "true")
        assert str(caught.value) == (
            f"{address} has another host key, {shown_key(public(STRANGER))}, beside the pinned one, "
            f"{shown_key(public(SERVER))}; the command plugin would be shown it, and it is not in its /etc/ssh, so "
            "nothing was sent: pin that one instead, if it is the machine's own"
        )

    asyncio.run(run())


def test_a_host_key_that_nobody_knows() -> None:
    assert shown_key("") == "none that can be read"
    assert shown_key("ssh-dss\x1b[2J AAAA") == "one of an unknown kind (ssh-dss\\x1b[2J)"


def test_any_host_key_is_accepted_where_none_is_pinned() -> None:
    async def run() -> None:
        async with server(swallow, host_key=STRANGER) as address:
            anyone = Address(address.address, address.port, address.user, "")
            async with open_session(anyone, text(CLIENT)) as session:
                assert (await session.call("podctl", {}))["received"] == 2
            greeting = await greet(anyone, text(CLIENT), "true")
            assert greeting.plugin_host_key == ""

    asyncio.run(run())


def test_nothing_listening_is_tried_again_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "CONNECT_SECONDS", 0.2)
    monkeypatch.setattr(ssh, "PAUSE_SECONDS", 0.05)

    async def run() -> None:
        async with server(swallow) as address:
            pass
        with pytest.raises(UserError, match=r"root@127.0.0.1:\d+ cannot be reached for 0.2 s \(Connection refused\)"):
            async with open_session(address, text(CLIENT)):
                pass

    asyncio.run(run())


def test_a_caller_says_how_long_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "PAUSE_SECONDS", 0.05)

    async def run() -> None:
        async with server(swallow) as address:
            pass
        with pytest.raises(UserError, match=r"root@127.0.0.1:\d+ cannot be reached for 0.1 s \(Connection refused\)"):
            await greet(address, text(CLIENT), "true", patience=0.1)

    asyncio.run(run())


def test_an_sshd_that_is_still_booting_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "PAUSE_SECONDS", 0.05)

    async def run() -> None:
        async with server(swallow) as address:
            pass

        async def boot() -> asyncssh.SSHAcceptor:
            await asyncio.sleep(0.3)
            allowed = asyncssh.import_authorized_keys(public(CLIENT))
            return await asyncssh.listen(
                "127.0.0.1",
                address.port,
                server_host_keys=[SERVER],
                authorized_client_keys=allowed,
                process_factory=swallow,
                encoding=None,
            )

        booting = asyncio.ensure_future(boot())
        async with open_session(address, text(CLIENT)) as session:
            assert (await session.call("podctl missing", {}))["received"] == 2
        (await booting).close()

    asyncio.run(run())


def test_a_name_that_does_not_resolve_is_told_at_once() -> None:
    async def run() -> None:
        with pytest.raises(UserError, match=r"the name pod\.invalid cannot be resolved"):
            async with open_session(Address("pod.invalid", 22, "root", public(SERVER)), text(CLIENT)):
                pass

    asyncio.run(run())


def test_a_key_that_only_looks_like_one() -> None:
    async def run() -> None:
        damaged = text(CLIENT).replace("b3BlbnNzaC1rZXk", "b3BlbnNzaC1rZXkAAAA", 1)
        with pytest.raises(UserError, match="sshPrivateKey is damaged"):
            async with open_session(Address("127.0.0.1", 1, "root", public(SERVER)), damaged):
                pass

    asyncio.run(run())


def test_a_connection_that_is_lost_on_the_way_is_told_and_not_hung_on() -> None:
    async def drop(process: asyncssh.SSHServerProcess[bytes]) -> None:
        await process.stdin.read(1 << 20)
        process.channel.get_connection().abort()

    async def run() -> None:
        async with server(drop) as address:
            with pytest.raises(UserError, match=r"the connection to root@127\.0\.0\.1:.* was lost while podctl ran"):
                async with open_session(address, text(CLIENT)) as session:
                    await session.stream("podctl receive-all", (bytes(1 << 20) for _ in range(64)))

    asyncio.run(run())
