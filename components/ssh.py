"""One SSH connection to a pod, for the bytes that no command's text or standard input should carry.

The only owner of asyncssh.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import asyncssh

from components.core.errors import UserError, printable

# AES-GCM is what two CPUs with AES instructions encrypt fastest: 107-147 MB/s against 45-87 for the default
# chacha20 on the two cores this was measured on.
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "chacha20-poly1305@openssh.com")
# golang.org/x/crypto/ssh v0.58.0, common.go: defaultHostKeyAlgos.
GO_HOST_KEY_ORDER = (
    *("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
    *("rsa-sha2-256", "rsa-sha2-512", "ssh-rsa", "ssh-ed25519"),
)
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
    """The machine shows another host key than the pinned one."""


class PodSession:
    """An open connection on which podctl's verbs run."""

    def __init__(self, connection: asyncssh.SSHClientConnection, address: Address) -> None:
        self._connection = connection
        self._address = address

    async def run(self, command: str) -> str:
        """Run a shell line that reads nothing; return what it prints."""
        done = await self._connection.run(command, check=False, stdin=asyncssh.DEVNULL)
        return str(done.stdout)

    async def call(self, command: str, document: Any) -> dict[str, Any]:
        """Run a verb with a JSON document on standard input; return the JSON line it answers with."""
        return await self.stream(command, [json.dumps(document, sort_keys=True).encode()])

    async def stream(self, command: str, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
        """Run a verb with `chunks` on standard input. Raises UserError with what podctl says where it refuses."""
        process = await self._connection.create_process(command, encoding=None)
        said = asyncio.ensure_future(_read_all(process))
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
            raise UserError(printable_lines(complaint) or lost)
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
        machine_id = (await session.run("cat /etc/machine-id")).strip()
        listed = await session.run("cat /etc/ssh/ssh_host_*_key.pub 2>/dev/null")
        answered = (await session.run(question)).strip()
    if not address.host_key:
        return Greeting("", machine_id, _object(answered))
    try:
        offered = await asyncssh.get_server_host_key(
            address.address, address.port, server_host_key_algs=list(GO_HOST_KEY_ORDER), config=None
        )
    except (OSError, asyncssh.Error) as error:
        raise UserError(f"{address} let us in and then answered no more ({printable(error)}): run this again") from None
    shown = offered.export_public_key().decode().split()[:2] if offered else []
    if shown != address.host_key.split() and shown not in [line.split()[:2] for line in listed.splitlines()]:
        raise UserError(
            f"{address} has another host key beside the pinned one, {printable(shown[0] if shown else 'unknown')}, "
            "which the command plugin would be shown and which is not in its /etc/ssh: pin that one instead"
        )
    return Greeting(" ".join(shown), machine_id, _object(answered))


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


async def _read_all(process: asyncssh.SSHClientProcess[bytes]) -> tuple[bytes, bytes]:
    output, complaint = await asyncio.gather(process.stdout.read(), process.stderr.read())
    return output, complaint


def printable_lines(text: bytes) -> str:
    return "\n".join(printable(line, 500) for line in text.decode("utf-8", "replace").strip().splitlines()[-30:])


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
    async with connection:
        yield PodSession(connection, address)


async def _connect(address: Address, keys: Sequence[asyncssh.SSHKey], patience: float) -> asyncssh.SSHClientConnection:
    pinned = asyncssh.import_public_key(address.host_key) if address.host_key else None
    give_up = asyncio.get_running_loop().time() + patience
    while True:
        try:
            return await asyncssh.connect(
                address.address,
                address.port,
                username=address.user,
                client_keys=list(keys),
                known_hosts=([pinned], [], []) if pinned else None,  # None checks nothing
                agent_path=None,
                config=None,
                encryption_algs=list(CIPHERS),
                compression_algs=["none"],
                connect_timeout=ATTEMPT_SECONDS,
                login_timeout=ATTEMPT_SECONDS,
                keepalive_interval=KEEPALIVE_SECONDS,
            )
        except asyncssh.HostKeyNotVerifiable:
            raise OtherHostKey(
                f"{address} shows another host key than the pinned one",
                ": it is another machine, or someone is in between; if a host was replaced on purpose, set its new "
                "hostKey",
            ) from None
        except asyncssh.PermissionDenied:
            raise UserError(
                f"{address} refuses the SSH key: put its public half into ~{address.user}/.ssh/authorized_keys there"
            ) from None
        except socket.gaierror as error:
            raise Gone(f"the name {printable(address.address)} cannot be resolved ({error.strerror})") from None
        except (OSError, asyncssh.Error, asyncio.TimeoutError) as error:
            if asyncio.get_running_loop().time() > give_up:
                known = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else printable(error)
                raise Gone(
                    f"{address} cannot be reached for {patience:g} s ({known or 'no answer'})",
                    ": is the machine up, and its SSH port open to this one?",
                ) from None
            await asyncio.sleep(PAUSE_SECONDS)
