"""What a stack file, an adapter, a pod, a server or a store can say, through every door that leads to a terminal or to
a pull request: it arrives as text, and steers nothing."""

from __future__ import annotations

import asyncio
import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncssh
import pulumi
import pytest

from components import ssh
from components.cli import pods, rollback
from components.cli.main import main
from components.cli.pods import Reached
from components.core.errors import UserError
from components.core.naming import engine_key
from components.pods import reach
from components.pods.reach import ReachedPodProvider
from components.provider import Provider
from components.settings import SettingsError
from components.ssh import Address, greet, open_session
from tests.components.graph import register
from tests.components.test_lora_status import stack
from tests.components.test_settings import ENGINE, HOST, MODEL, POD, PRIVATE_KEY, Config, project
from tests.components.test_ssh import CLIENT, SERVER, Handler, public, server, text
from tests.support.adapters import CONFIG, Json, lora_shapes, write_adapter

__all__ = ["project", "stack"]

# Clears the screen, the same in one byte (C1), sets the title, turns the line round, ends it, and is no UTF-8.
HOSTILE = "\x1b[2J\x9b2J\x1b]0;owned\x07\u202edlrow\u2066\r\n::error::hello\u2028\x7f\u200b\x00"
UNDECODABLE = "\udc9b"
EVIL = HOSTILE + UNDECODABLE


def harmless(said: str, own_lines: bool = False) -> None:
    """`own_lines`: who speaks is shown with all of its lines."""
    bad = {char for char in said if not (char.isprintable() or char == "\n")}
    assert not bad, f"{bad} in {said!r}"
    assert own_lines or "\n::error::" not in said, said


STACK_FILES: dict[str, dict[str, Any]] = {
    "base": {"pods": [{**POD, "base": EVIL}]},
    # What is one line, and has no control character that a schema would think of.
    "base with C1 and bidi": {"pods": [{**POD, "base": "org/\x9b2J\u202ebase"}]},
    "key": {"pods": [{**POD, EVIL: 1}]},
    "pod": {"pods": [EVIL]},
    "pods": {"pods": EVIL},
    "address": {"pods": [{**POD, "host": {**HOST, "address": EVIL}}]},
    "user": {"pods": [{**POD, "host": {**HOST, "user": EVIL}}]},
    "hostKey": {"pods": [{**POD, "host": {**HOST, "hostKey": EVIL}}]},
    "key type": {"pods": [{**POD, "host": {**HOST, "hostKey": "ssh-ed25519\x9b AAAA"}}]},
    "image": {"pods": [{"base": "/b", "sandbox": {"image": EVIL, "volumes": {EVIL: EVIL, "/m": "\x9bnowhere"}}}]},
    "ec2": {"pods": [{"base": "b", "ec2": dict.fromkeys(("instanceType", "region", "sshCidr", "profile"), EVIL)}]},
    "python": {"pods": [{**POD, "engine": {"python": "/" + EVIL}}]},
    "vllm": {"pods": [{**POD, "engine": {"vllm": {"version": EVIL}}}]},
    "listen": {"pods": [{**POD, "engine": {**ENGINE, "listen": EVIL}}]},
    "dtype": {"pods": [{**POD, "engine": {**ENGINE, "dtype": "\x9b\u202e"}}]},
    "certificate": {"pods": [{**POD, "engine": {**ENGINE, "listen": "::", "tls": {"certificate": "\x9b\u202e"}}}]},
    "argument": {"pods": [{**POD, "engine": {**ENGINE, "args": {EVIL: EVIL}}}]},
    "value of an argument": {"pods": [{**POD, "engine": {**ENGINE, "args": {"x": HOSTILE}}}]},
    "variable": {"pods": [{**POD, "engine": {**ENGINE, "env": {EVIL: EVIL}}}]},
    "value of a variable": {"pods": [{**POD, "engine": {**ENGINE, "env": {"A": HOSTILE}}}]},
    "baseConfig": {"pods": [{**POD, "baseConfig": "\x9b\u202e"}]},
    "id": {"pods": [POD], "models": [{**MODEL, "id": EVIL}]},
    "model's base": {"pods": [POD], "models": [{**MODEL, "base": EVIL}]},
    "model's other base": {"pods": [POD], "models": [{**MODEL, "base": "\x9b\u202e"}]},
    "adapter": {"pods": [POD], "models": [{**MODEL, "adapter": EVIL}]},
    "adapter that is one line": {"pods": [POD], "models": [{**MODEL, "adapter": "../a\x9b\u202e"}]},
    "store": {"pods": [POD], "store": f"s3://{EVIL}"},
    "store's folder": {"pods": [POD], "store": "s3://bucket/\x9b\u202e?\x9b=1"},
    "store that is no address": {"pods": [POD], "store": EVIL},
    "running": {"pods": [POD], "running": EVIL},
}  # fmt: skip


@pytest.mark.parametrize("config", STACK_FILES.values(), ids=STACK_FILES)
def test_a_stack_file(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    for level in ("info", "warn", "error"):
        monkeypatch.setattr(pulumi.log, level, lambda text, *_, **__: logged.append(text))
    monkeypatch.setenv("LORA_PODS_CONTAINER_ENGINE", "true")
    registered: list[Any] = []
    try:
        registered, _ = register(Config({"models": [], "sshPrivateKey": PRIVATE_KEY, "apiKey": "k", **config}))
    except SettingsError as error:
        logged += error.faults
    except UserError as error:
        logged.append(str(error))
    assert registered or logged
    for said in [*logged, *(item.name for item in registered)]:
        harmless(said)


@pytest.fixture
def adapters(tmp_path: Path) -> list[Path]:
    """Adapters with something hostile in every place that has text."""
    names = {tensor.replace("self_attn", HOSTILE): shape for tensor, shape in lora_shapes().items()}
    strings = dict.fromkeys(("base_model_name_or_path", "task_type", "bias", "peft_version", HOSTILE), HOSTILE)
    kinds: list[Json] = [HOSTILE, [HOSTILE], {HOSTILE: HOSTILE}]
    directory = os.fsdecode(b"\x9b2J\x1b[2J\n::error::\xe2\x80\xae\xff")
    return [
        write_adapter(tmp_path / "names", weights=names),
        write_adapter(tmp_path / "strings", {**CONFIG, **strings}),
        *(
            write_adapter(tmp_path / f"{key}-{kind}", {**CONFIG, key: value})
            for key in ("peft_type", "target_modules", "r", "lora_alpha", "rank_pattern", "modules_to_save", "use_dora")
            for kind, value in enumerate(kinds)
        ),
        write_adapter(tmp_path / "header", weights=len(HOSTILE.encode()).to_bytes(8, "little") + HOSTILE.encode()),
        write_adapter(tmp_path / "json", HOSTILE.encode()),
        write_adapter(tmp_path / directory, b"{"),
        tmp_path / f"nowhere{directory}",
    ]  # fmt: skip


def test_adapters(adapters: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    base = adapters[0].parent / os.fsdecode(b"config\x9b\n\xff.json")
    base.write_text(json.dumps({"architectures": [HOSTILE], "model_type": HOSTILE, "hidden_size": HOSTILE}))
    for more in ([], ["--base-config", str(base)], ["--base-config", f"{base}x"], ["--vllm", HOSTILE]):
        with suppress(SystemExit):  # argparse
            main(["check", *map(str, adapters), *more])
        told = capsys.readouterr()
        assert "owned" in told.out + told.err or more
        # argparse shows what was typed, by whoever reads it.
        harmless(told.out + (told.err if "--vllm" not in more else ""))


async def _write_hostile(process: asyncssh.SSHServerProcess[bytes], status: int) -> None:
    await process.stdin.read()
    process.stderr.write(HOSTILE.encode() + b"\n\x9b\xff")
    process.stdout.write(json.dumps(HOSTILE).encode() + HOSTILE.encode() + b"\xff")
    process.exit(status)


async def refuses(process: asyncssh.SSHServerProcess[bytes]) -> None:
    await _write_hostile(process, 1)


async def chatters(process: asyncssh.SSHServerProcess[bytes]) -> None:
    await _write_hostile(process, 0)


async def hangs_up(process: asyncssh.SSHServerProcess[bytes]) -> None:
    process.channel.get_connection().disconnect(asyncssh.DISC_PROTOCOL_ERROR, HOSTILE, "\x9b")


@pytest.mark.parametrize("handler", [refuses, chatters, hangs_up])
def test_a_pod_over_ssh(handler: Handler) -> None:
    async def run() -> list[str]:
        said = []
        async with server(handler) as address:
            try:
                said.append((await greet(address, text(CLIENT), "true")).machine_id)
            except UserError as error:
                said.append(str(error))
            with pytest.raises(UserError) as caught:
                async with open_session(address, text(CLIENT)) as session:
                    await session.call("podctl", {})
        return [*said, str(caught.value)]

    for said in asyncio.run(run()):
        harmless(said, own_lines=handler is refuses)


@pytest.mark.parametrize(
    "greeting",
    [
        b"SSH-2.0-\x1b[2J\x9b\x00\r\n",
        b"\x1b[2J\x9b\r\nSSH-1.0-\x1b[2J\r\n",
        HOSTILE.encode() * 9 + b"\n",
        # A version, and a disconnect with a reason instead of a key exchange.
        b"SSH-2.0-x\r\n" + (lambda text: (len(text) + 18).to_bytes(4, "big") + b"\x04\x01\0\0\0\x02"
        + (len(text)).to_bytes(4, "big") + text + b"\0\0\0\0" + bytes(3))(HOSTILE.encode().ljust(63)),
    ],
)  # fmt: skip
def test_a_server_before_anybody_logs_in(greeting: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "ATTEMPT_SECONDS", 2)

    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await writer.drain()
        writer.close()

    async def run() -> str:
        listening = await asyncio.start_server(speak, "127.0.0.1", 0)
        async with listening:
            address = Address("127.0.0.1", listening.sockets[0].getsockname()[1], "root", public(SERVER))
            with pytest.raises(UserError) as caught:
                async with open_session(address, text(CLIENT), patience=-1):
                    pass
        return str(caught.value)

    harmless(asyncio.run(run()))


def shapes(good: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The document with each of its values, at any depth, as something else."""
    for key, value in good.items():
        for other in (EVIL, [EVIL], {EVIL: EVIL}, 10**400, -1, None, True, float("nan")):
            yield {**good, key: other}
        if isinstance(value, dict):
            yield from ({**good, key: inner} for inner in shapes(value))
        if isinstance(value, list) and value and isinstance(value[-1], dict):
            yield from ({**good, key: [inner]} for inner in shapes(value[-1]))


def test_what_lora_status_and_rollback_are_answered(
    stack: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = {"engine": engine_key("acme", "org/base-0"), "state": "x", "since": 1, "models": ["m"], "vllm": "1"}
    engine["drift"] = {"unit": "was edited"}
    gpu = {"name": "x", "usedMiB": 1, "totalMiB": 2}
    disk = {"freeBytes": 1, "totalBytes": 2}
    answers = list(shapes({"machineId": "x", "disk": disk, "gpus": [gpu], "engines": [engine], "fault": ""}))
    answers += list(shapes({"models": {"m": "sha256:a"}, "before": {"m": "sha256:b"}}))
    assert len(answers) > 100
    monkeypatch.setattr(rollback, "ask_pulumi", lambda *_, **__: "")
    stack(1)
    for answer in answers:
        reached = Reached("org/base-0", str(engine["engine"]), None, json.loads(json.dumps(answer)))
        monkeypatch.setattr(pods, "_ask", _answering(reached))
        for words in (["status"], ["status", "--json"], ["rollback", "--base", "org/base-0"]):
            main([*words, "-s", "acme", "--identity", "key"])
            harmless("".join(capsys.readouterr()))


def _answering(reached: Any) -> Any:
    async def ask(*_: object) -> Any:
        return reached

    return ask


def test_what_a_refresh_and_a_delete_are_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Pod(ReachedPodProvider):
        def settings(self) -> Any:
            return None

    async def answers(*_: object) -> dict[str, Any]:
        return {"left": [EVIL, 1]}

    async def greets(*_: object) -> Any:
        return ssh.Greeting("k", EVIL, {"drift": {EVIL: EVIL, "serves": [EVIL]}})

    monkeypatch.setattr(reach, "private_key_text", lambda *_: "a key")
    monkeypatch.setattr(reach, "_leave", answers)
    monkeypatch.setattr(ssh, "greet", greets)
    connection = {"address": "10.0.0.7", "port": 22.0, "user": "root", "hostKey": "", "credential": "x"}
    props = {"engine": "acme", "connection": connection, "machine": f"{EVIL} reached", "plugin_host_key": ""}
    for before in (props, {**props, "machine": "0123 reached"}):
        read = Pod().read("id", before)
        Pod().diff("id", read.outs or {}, read.inputs or {})
    Pod().delete("id", props)
    harmless("".join(capsys.readouterr()))


def test_an_error_that_nobody_foresaw() -> None:
    provider = Provider()
    before = traceback.format_exc
    try:
        provider.configure(type("Request", (), {"config": {}})())
        for error in (ValueError(EVIL), UserError(EVIL), KeyError(EVIL)):
            try:
                raise error
            except Exception:
                harmless(traceback.format_exc(), own_lines=True)
    finally:
        traceback.format_exc = before
