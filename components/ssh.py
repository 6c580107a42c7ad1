"""One SSH connection to a pod, for the bytes that no command's text or standard input should carry.

The only owner of asyncssh.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import asyncssh

from components.core.errors import UserError, printable
from components.core.meter import Say
from components.core.ssh_key import shown_key

# AES-GCM is what two CPUs with AES instructions encrypt fastest: 107-147 MB/s against 45-87 for the default
# chacha20 on the two cores this was measured on.
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "chacha20-poly1305@openssh.com")
# golang.org/x/crypto/ssh v0.58.0, common.go: defaultHostKeyAlgos.
GO_HOST_KEY_ORDER = (
    *("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
    *("rsa-sha2-256", "rsa-sha2-512", "ssh-rsa", "ssh-ed25519"),
)
_ARRIVED = re.compile(r"sha256:[0-9a-f]{64} is here \(")
MSG_IGNORE = 2  # RFC 4253, 11.2
CONNECT_SECONDS: float = 60
PAUSE_SECONDS: float = 2
ATTEMPT_SECONDS = 15
KEEPALIVE_SECONDS = 15


@dataclass(frozen=True)
class Address:
    """Where a pod's sshd answers and as which user; `host_key` is the only key it may show, "" any."""

    address: str
    port: int
    user: str
    host_key: str

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> Address:
        """From the inputs of a resource; numbers come back from Pulumi as floats."""
        return cls(described["address"], int(described["port"]), described["user"], described["hostKey"])

    def __str__(self) -> str:
        return f"{self.user}@{self.address}:{self.port}"


class Gone(UserError):
    """Nobody answers where the pod was, or another machine does: `what` says so, without what to do about it."""

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(what + advice)
        self.what = what


class OtherHostKey(Gone):
    """The machine shows another host key than the pinned one; both as `type base64`."""

    def __init__(self, address: Address, pinned: str, shown: str) -> None:
        super().__init__(
            f"{address} shows another host key, {shown_key(shown)}, than the pinned one, {shown_key(pinned)}",
            ": it is another machine, or someone is in between, and nothing was sent; if a host was replaced on "
            "purpose, set its new hostKey (an ec2 instance or a sandbox: `pulumi up --replace` its URN)",
        )


class _Pinned(asyncssh.SSHClient):
    """Trusts no key but the pinned one, and keeps what was shown instead."""

    shown = ""

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.shown = _text(key)
        return False


class PodSession:
    """An open connection on which podctl's verbs run."""

    def __init__(self, connection: asyncssh.SSHClientConnection, address: Address) -> None:
        self._connection = connection
        self._address = address

    async def run(self, command: str) -> str:
        """Run a shell line that reads nothing; return what it prints. Raises UserError where the connection is lost."""
        try:
            done = await self._connection.run(
                command, check=False, stdin=asyncssh.DEVNULL, encoding="utf-8", errors="replace"
            )
        except (asyncssh.Error, OSError) as error:
            raise UserError(
                f"the connection to {self._address} was lost ({printable(error)}): run this again"
            ) from None
        return str(done.stdout)

    async def call(self, command: str, document: Any, heard: Say | None = None) -> dict[str, Any]:
        """Run a verb with a JSON document on standard input; return the JSON line it answers with."""
        return await self.stream(command, [json.dumps(document, sort_keys=True).encode()], heard)

    async def stream(
        self, command: str, chunks: Iterable[bytes | memoryview], heard: Say | None = None
    ) -> dict[str, Any]:
        """Run a verb with `chunks` on standard input. Raises UserError with what podctl says where it refuses.

        `heard` gets each line that podctl says meanwhile.
        """
        try:
            process = await self._connection.create_process(command, encoding=None)
        except (asyncssh.Error, OSError) as error:
            raise UserError(f"{self._address} lets us in and runs no command ({printable(error)})") from None
        said = asyncio.ensure_future(_read_all(process, heard))
        try:
            for chunk in chunks:
                # asyncssh copies what it is given, so that a view is as good as bytes, and one copy less.
                process.stdin.write(cast(bytes, chunk))
                await process.stdin.drain()
            process.stdin.write_eof()
        except (BrokenPipeError, ConnectionError, asyncssh.Error):
            # podctl stopped listening; what it printed says why.
            pass
        except BaseException:
            process.close()
            said.cancel()
            raise
        lost = (
            f"the connection to {self._address} was lost while podctl ran: run pulumi up again, it goes on from there"
        )
        try:
            output, complaint = await said
            await process.wait_closed()
        except (asyncssh.Error, OSError):
            raise UserError(lost) from None
        if process.exit_status != 0:
            raise UserError(_refusal(complaint) or lost)
        answer = _object(output.decode("utf-8", "replace"))
        if not answer:
            raise UserError(
                f"podctl on {self._address} answered with something other than a JSON object: does a .bashrc or "
                "a forced command print there?"
            )
        return answer


@dataclass(frozen=True)
class Greeting:
    """What a pod says of itself: the host key that a Go client is shown, /etc/machine-id, and what `question` answers.

    The answer is empty where the pod has nothing that could.
    """

    plugin_host_key: str
    machine_id: str
    answer: Mapping[str, Any]


async def greet(address: Address, private_key: str, question: str, patience: float | None = None) -> Greeting:
    """Log in, seeing the pinned host key. It vouches for the one of another kind that a Go client is shown.

    `question` is a shell line that prints a JSON object; `patience` is `open_session`'s.

    Raises UserError where the pod cannot be reached, shows another key, refuses ours, or has a key nothing vouches for.
    """
    async with open_session(address, private_key, patience) as session:
        machine_id = printable(next(iter((await session.run("cat /etc/machine-id")).split()), "none"), 40)
        listed = await session.run("cat /etc/ssh/ssh_host_*_key.pub 2>/dev/null")
        answered = (await session.run(question)).strip()
    if not address.host_key:
        return Greeting("", machine_id, _object(answered))
    shown = await shown_to_go(address)
    if shown != address.host_key and shown.split() not in [line.split()[:2] for line in listed.splitlines()]:
        raise UserError(
            f"{address} has another host key, {shown_key(shown)}, beside the pinned one, "
            f"{shown_key(address.host_key)}; the command plugin would be shown it, and it is not in its /etc/ssh, so "
            "nothing was sent: pin that one instead, if it is the machine's own"
        )
    return Greeting(shown, machine_id, _object(answered))


async def shown_to_go(address: Address) -> str:
    """The host key, as `type base64`, that a Go client is shown. Nothing is sent, and nobody logs in.

    Raises UserError where none is shown.
    """
    try:
        key = await asyncio.wait_for(
            asyncssh.get_server_host_key(
                address.address, address.port, server_host_key_algs=list(GO_HOST_KEY_ORDER), config=None
            ),
            ATTEMPT_SECONDS,
        )
    except (OSError, asyncssh.Error, ValueError, asyncio.TimeoutError) as error:
        raise UserError(f"{address} answers no more ({printable(error)}): run this again") from None
    return _text(key) if key else ""


def _text(key: asyncssh.SSHKey) -> str:
    return " ".join(key.export_public_key().decode().split()[:2])


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


async def _read_all(process: asyncssh.SSHClientProcess[bytes], heard: Say | None) -> tuple[bytes, bytes]:
    output, complaint = await asyncio.gather(process.stdout.read(), _read_lines(process.stderr, heard))
    return output, complaint


async def _read_lines(stream: asyncssh.SSHReader[bytes], heard: Say | None) -> bytes:
    if heard is None:
        return await stream.read()
    whole, rest = b"", b""
    while piece := await stream.read(1 << 16):
        whole += piece
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            heard(line.decode("utf-8", "replace"))
    return whole


def _refusal(text: bytes) -> str:
    """What podctl said, without the bundles that arrived before it refused."""
    lines = text.decode("utf-8", "replace").strip().splitlines()
    return "\n".join([printable(line, 500) for line in lines if not _ARRIVED.match(line)][-30:])


@asynccontextmanager
async def open_session(address: Address, private_key: str, patience: float | None = None) -> AsyncIterator[PodSession]:
    """Connect, trying again for `patience` seconds (a minute, if not given) while nothing answers.

    Raises UserError, told apart by cause: Gone where the pod is not there.
    """
    try:
        key = asyncssh.import_private_key(private_key)
    except (asyncssh.KeyImportError, ValueError):
        raise UserError("lora-pods:sshPrivateKey is damaged: it has the form of a key, and is none") from None
    connection = await _connect(address, [key], CONNECT_SECONDS if patience is None else patience)
    _send_no_ignored_packets(connection)
    async with connection:
        yield PodSession(connection, address)


def _send_no_ignored_packets(connection: asyncssh.SSHClientConnection) -> None:
    """Asyncssh sends an empty packet before each, against an attack on ciphers in CBC mode (RFC 4251, 9.3.1).

    None of ours is one, and half as many packets take a tenth less of a core here and on the pod.
    """
    send = connection.send_packet

    def send_packet(pkttype: int, *args: bytes, handler: Any = None) -> None:
        if pkttype != MSG_IGNORE:
            send(pkttype, *args, handler=handler)

    connection.send_packet = send_packet  # type: ignore[method-assign]


async def _connect(address: Address, keys: Sequence[asyncssh.SSHKey], patience: float) -> asyncssh.SSHClientConnection:
    pinned = asyncssh.import_public_key(address.host_key) if address.host_key else None
    # A machine that has no key of the pinned kind shows another one, and does not look like one that is down.
    own = [alg.decode() for alg in pinned.sig_algorithms if not alg.startswith(b"webauthn-")] if pinned else []
    kinds = list(dict.fromkeys([*own, *GO_HOST_KEY_ORDER])) if pinned else ()
    give_up = asyncio.get_running_loop().time() + patience
    while True:
        client = _Pinned()
        try:
            return await asyncssh.connect(
                address.address,
                address.port,
                username=address.user,
                client_keys=list(keys),
                client_factory=lambda client=client: client,
                known_hosts=([pinned], [], []) if pinned else None,  # None checks nothing
                server_host_key_algs=kinds,
                agent_path=None,
                config=None,
                encryption_algs=list(CIPHERS),
                compression_algs=["none"],
                connect_timeout=ATTEMPT_SECONDS,
                login_timeout=ATTEMPT_SECONDS,
                keepalive_interval=KEEPALIVE_SECONDS,
            )
        except asyncssh.HostKeyNotVerifiable:
            raise OtherHostKey(address, address.host_key, client.shown) from None
        except asyncssh.PermissionDenied:
            raise UserError(
                f"{address} refuses the SSH key: put its public half into ~{address.user}/.ssh/authorized_keys there"
            ) from None
        except socket.gaierror as error:
            what = f"the name {printable(address.address)} cannot be resolved ({error.strerror})"
            if error.errno != socket.EAI_AGAIN:
                raise Gone(what) from None
            # No name server answers: that says nothing of the pod, which must not be forgotten for it.
            if asyncio.get_running_loop().time() > give_up:
                raise UserError(f"{what}: is this machine online?") from None
            await asyncio.sleep(PAUSE_SECONDS)
        # A ValueError: what a server says of itself is no ASCII.
        except (OSError, asyncssh.Error, ValueError, asyncio.TimeoutError) as error:
            if asyncio.get_running_loop().time() > give_up:
                known = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else printable(error)
                waited = f" for {patience:g} s" if patience else ""
                raise Gone(
                    f"{address} cannot be reached{waited} ({known or 'no answer'})",
                    ": is the machine up, and its SSH port open to this one?",
                ) from None
            await asyncio.sleep(PAUSE_SECONDS)
