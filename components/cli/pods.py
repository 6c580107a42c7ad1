"""The pods of a stack as the commands reach them: without pulumi's engine, and all at the same time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.cli.pulumi_cli import ask_pulumi
from components.core.adapter_files import shown_path
from components.core.errors import UserError, os_reason, printable
from components.core.naming import engine_key
from components.core.ssh_key import normalise_host_key, normalise_private_key
from components.on_pod.boot import piped_line, podctl_source
from components.pods.credentials import sandbox_keys
from components.settings import PROJECT, Pod, Settings, SettingsError, parse_models
from components.stack_files import path_here, stack_config, stack_directory

if TYPE_CHECKING:
    from components.ssh import Address

KEY = "the SSH key that opens the pods"


@dataclass(frozen=True)
class Reached:
    """One pod of a stack: where it is, and what podctl answered there or why it did not.

    `address` is None where nobody knows it, `off` where the pod is switched off on purpose: then it was not asked.
    """

    base: str
    engine: str
    address: Address | None
    answer: Mapping[str, Any]
    fault: str = ""
    off: bool = False

    @property
    def at(self) -> str:
        return str(self.address) if self.address else "-"


@dataclass(frozen=True)
class _Way:
    address: Address | None = None
    key: str = ""
    fault: str = ""
    off: bool = False


def stack_settings(stack: str) -> Settings:
    """What a stack file says of its pods. Raises UserError for a stack there is none of, or a file with faults."""
    config = stack_config(stack_directory(), stack, PROJECT)
    settings, faults = parse_models(config)
    if faults:
        raise SettingsError(faults)
    return settings


def ask_pods(
    stack: str,
    pods: Sequence[Pod],
    running: bool,
    identity: str | None,
    seconds: float | None,
    verb: str,
    engine_argument: bool = False,
) -> list[Reached]:
    """Run a verb of podctl on each of these pods, on all at once; each is given `seconds` to answer (None: no end).

    Those that `running` (`Settings`) says are switched off are not asked.
    """
    ways = _ways(stack, pods, not running, identity)

    async def ask_all() -> list[Reached]:
        asked = (
            _ask(pod.base, engine_key(stack, pod.base), way, seconds, verb, engine_argument)
            for pod, way in zip(pods, ways, strict=True)
        )
        return list(await asyncio.gather(*asked))

    return asyncio.run(ask_all())


async def _ask(base: str, engine: str, way: _Way, seconds: float | None, verb: str, engine_argument: bool) -> Reached:
    from components.ssh import open_session

    if way.address is None or way.off:
        return Reached(base, engine, way.address, {}, way.fault, way.off)
    arguments = ["--engine", engine] if engine_argument else []
    line = piped_line(way.address.user, verb, arguments)

    async def ask(address: Address) -> dict[str, Any]:
        async with open_session(address, way.key, patience=0) as session:
            return await session.stream(line, [podctl_source().encode()])

    try:
        return Reached(base, engine, way.address, await asyncio.wait_for(ask(way.address), seconds))
    except UserError as error:
        return Reached(base, engine, way.address, {}, str(error))
    except asyncio.TimeoutError:
        return Reached(base, engine, way.address, {}, f"{way.address} does not answer within {seconds:g} s")


def _ways(stack: str, pods: Sequence[Pod], off: bool, identity: str | None) -> list[_Way]:
    key = _private_key(stack, identity) if any(not (pod.sandbox or (off and pod.ec2)) for pod in pods) else ""
    recorded = _recorded(stack) if any(pod.ec2 and not off for pod in pods) else {}
    return [_way(stack, pod, key, recorded, off) for pod in pods]


def _way(stack: str, pod: Pod, key: str, recorded: Mapping[str, Any], off: bool) -> _Way:
    from components.ssh import Address

    if off and not pod.host:
        return _Way(off=True)
    if pod.host:
        return _Way(Address(pod.host.address, pod.host.port, pod.host.user, pod.host.host_key), key)
    if pod.ec2:
        connection = recorded.get(pod.base)
        if connection is None:
            return _Way(fault="is not in the stack's state: `pulumi up` makes it")
        return _Way(Address.of(connection), key)
    return _sandbox_way(stack)


def _sandbox_way(stack: str) -> _Way:
    # Here, since that loads pulumi, which takes longer than all the rest.
    from components.pods.sandbox import ssh_port
    from components.ssh import Address

    try:
        port = ssh_port(stack)
        if port is None:
            return _Way(fault=f"the container lora-pods-{stack} is not there, or does not run: `pulumi up` starts it")
        keys = sandbox_keys(f"lora-pods-{stack}")
        host_key = normalise_host_key((keys / "ssh_host_ed25519_key.pub").read_text(encoding="utf-8"))
        return _Way(Address("127.0.0.1", port, "root", host_key), (keys / "id_ed25519").read_text(encoding="utf-8"))
    except OSError as error:
        return _Way(fault=f"the sandbox's key {printable(error.filename)} cannot be read ({os_reason(error)})")
    except UserError as error:
        return _Way(fault=str(error))


def _private_key(stack: str, identity: str | None) -> str:
    if identity is not None:
        path = path_here(Path(), identity)
        try:
            return normalise_private_key(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"--identity {shown_path(path)}: cannot be read ({os_reason(error)})") from None
        except UnicodeDecodeError:
            raise UserError(f"--identity {shown_path(path)}: is not the text of a private key") from None
        except UserError as error:
            raise UserError(f"--identity {shown_path(path)}: {error}") from None
    try:
        text = ask_pulumi("config", "get", f"{PROJECT}:sshPrivateKey", "--stack", stack, to_ask_for=KEY)
    except UserError as error:
        raise UserError(f"{KEY} cannot be had: {error}; or give it with --identity FILE") from None
    return normalise_private_key(text)


def _recorded(stack: str) -> dict[str, Any]:
    """By base, how the last update reached each pod: of an instance, only the state knows its address."""
    text = ask_pulumi("stack", "export", "--stack", stack, to_ask_for="the addresses of instances")
    try:
        resources = json.loads(text)["deployment"].get("resources") or []
        return {
            resource["urn"].rsplit("::", 1)[-1].removesuffix("-reach"): resource["outputs"]["connection"]
            for resource in resources
            if resource["type"] == "pulumi-python:dynamic/lora-pods:ReachedPod"
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"the state of stack {printable(stack)} cannot be made sense of") from None
