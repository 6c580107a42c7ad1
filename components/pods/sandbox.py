"""`sandbox`: a container on this machine, with systemd and sshd inside, where a rented GPU would be.

It is kept from run to run, also while it is stopped, and named after the stack; `pulumi destroy` removes it with all
that is on it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pulumi
from pulumi.dynamic import CreateResult, DiffResult, ReadResult, Resource, UpdateResult

from components.core.adapter_files import is_absent, is_directory
from components.core.errors import UserError, printable
from components.core.ssh_key import fingerprint, normalise_host_key
from components.pods.contract import Machine
from components.pods.credentials import private_key_text, sandbox_credential, sandbox_keys
from components.pods.keys import new_key
from components.provider import Provider
from components.remote import Connection
from components.stack_files import path_here, stack_directory

if TYPE_CHECKING:
    from components.settings import Pod, Sandbox, Settings

# What a refresh records in place of since when a container runs.
GONE, STOPPED = "the container is gone", "the container is stopped"
KEYS_IN_CONTAINER = "/etc/lora-pods-keys"
_SPEC_LABEL = "lora-pods.spec"
# The stack directory whose `pulumi up` made the container: two checkouts may have stacks of the same name.
_CHECKOUT_LABEL = "lora-pods.checkout"
_SPEC_KEYS = ("name", "image", "volumes", "shmMiB", "enginePort", "hostKey")
# The engine's unit is given a minute to stop, and longer where it drains requests.
_STOP_SECONDS = 300
# A stock ulimit of millions of files makes sshd and others in the container close each of them at every start.
_LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=8192:8192")


def machine(sandbox: Sandbox, pod: Pod, settings: Settings, stack: str, opts: pulumi.ResourceOptions) -> Machine:
    name = f"lora-pods-{stack}"
    host_key = _generated_keys(name)
    container = SandboxContainer(name, sandbox, pod.engine.port, host_key, settings.running, opts)
    credential = sandbox_credential(name)
    return Machine(
        connection=Connection(
            address="127.0.0.1",
            port=container.ssh_port.apply(int),
            user="root",
            host_key=host_key,
            credential=credential,
            private_key=pulumi.Output.secret(private_key_text(credential, settings)),
        ),
        identity=pulumi.Output.format("{0} since {1}", fingerprint(host_key), container.started),
        endpoint=container.endpoint_port.apply(lambda port: f"http://127.0.0.1:{int(port)}/v1"),
        resource=container,
    )


class SandboxContainerProvider(Provider):
    """Create and update both make the container run as described; an unchanged one that runs is left alone.

    One that is to be stopped is stopped and no more: how it is described matters when it is to run again.
    """

    def create(self, props: dict[str, Any]) -> CreateResult:
        identifier, outputs = _make_it_be(props)
        return CreateResult(identifier, {**props, **outputs})

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> UpdateResult:
        if _off(_news):
            _stop(container_engine(), _id)
            return UpdateResult({**_olds, "running": False})
        _, outputs = _make_it_be(_news, _id)
        return UpdateResult({**_news, **outputs})

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> DiffResult:
        if _off(_news):
            state = _inspect(container_engine(), _id)
            runs = state is not None and state["State"]["Running"]
            return DiffResult(changes=runs or not _off(_olds))
        changed = [key for key in _SPEC_KEYS if _olds.get(key) != _news.get(key)]
        state = _inspect(container_engine(), _olds["name"])
        if state is None or state["Id"] != _id or _label(state, _SPEC_LABEL) != _spec(_news):
            changed.append("container")
        # Started again without Pulumi, it may have other ports.
        other = state is not None and (
            _off(_olds)
            or not state["State"]["Running"]
            or any(_olds.get(key) != value for key, value in _outputs(state, _olds).items())
        )
        return DiffResult(
            changes=bool(changed) or other, replaces=changed, delete_before_replace=True, stables=["name"]
        )

    def read(self, id_: str, props: dict[str, Any]) -> ReadResult:
        """Of a container that is gone its resource stays: what is on it is undone with it, or made anew."""
        state = _inspect(container_engine(), id_)
        if state is not None and (_off(props) or state["State"]["Running"]):
            return ReadResult(id_, props)  # what else may differ, every preview compares
        found = GONE if state is None else STOPPED
        # Without --diff, Pulumi shows that there is a difference, and not which.
        print(f"drift of {props['name']}: sandbox: {found}", file=sys.stderr, flush=True)
        return ReadResult(id_, {**props, "started": found})

    def delete(self, _id: str, _props: dict[str, Any]) -> None:
        engine = container_engine()
        state = _inspect(engine, _props["name"])
        if state is not None and state["Id"] == _id:
            _remove(engine, _id)


class SandboxContainer(Resource, module="lora-pods", name="SandboxContainer"):
    """The container. Its outputs: since when it runs, and the ports on this machine's loopback that lead into it."""

    started: pulumi.Output[str]
    ssh_port: pulumi.Output[float]
    endpoint_port: pulumi.Output[float]

    def __init__(
        self,
        name: str,
        sandbox: Sandbox,
        engine_port: int,
        host_key: str,
        running: bool,
        opts: pulumi.ResourceOptions,
    ) -> None:
        props: dict[str, Any] = {
            "name": name,
            "image": sandbox.image,
            "volumes": dict(sandbox.volumes),
            "shmMiB": sandbox.shm_mi_b,
            "enginePort": engine_port,
            "hostKey": host_key,
            "started": None,
            "ssh_port": None,
            "endpoint_port": None,
        }
        # Left out as long as it runs, so that it is no difference from what earlier releases recorded.
        if not running:
            props["running"] = False
        super().__init__(SandboxContainerProvider(), name, props, opts)


def ssh_port(stack: str) -> int | None:
    """The port of this machine that leads to the sshd of a stack's sandbox; None where it does not run."""
    state = _inspect(container_engine(), f"lora-pods-{stack}")
    bindings = (state["NetworkSettings"].get("Ports") or {}).get("22/tcp") if state else None
    return int(bindings[0]["HostPort"]) if state and state["State"]["Running"] and bindings else None


def remove_left_over(stack: str, checkout: Path) -> bool:
    """Remove the container of a stack of which Pulumi's state is gone; return whether there was one.

    Raises UserError where the container is not of the checkout in this directory.
    """
    engine, name = container_engine(), f"lora-pods-{stack}"
    state = _inspect(engine, name)
    if state is None:
        return False
    _refuse_foreign(engine, state, name, stack_directory(checkout).resolve())
    _remove(engine, state["Id"])
    return True


def _off(props: Mapping[str, Any]) -> bool:
    return props.get("running") is False


def _stop(engine: Sequence[str], identifier: str) -> None:
    """Stop a container, if it is there."""
    state = _inspect(engine, identifier)
    if state is not None and state["State"]["Running"]:
        _call(engine, ["stop", "-t", str(_STOP_SECONDS), identifier])


def _make_it_be(props: Mapping[str, Any], identifier: str | None = None) -> tuple[str, dict[str, Any]]:
    """Make the container run as described, or lie there stopped if it is to be off.

    Return the container's id and what the resource's outputs say of it.

    `identifier` is the id that the stack knows: that container is the stack's own, whichever checkout made it.
    """
    engine, name = container_engine(), props["name"]
    state = _inspect(engine, name)
    if state is not None and state["Id"] != identifier:
        _refuse_foreign(engine, state, name, stack_directory().resolve())
    if state is not None and _label(state, _SPEC_LABEL) != _spec(props):
        _remove(engine, state["Id"])
        state = None
    if state is None:
        _call(engine, [*(["create"] if _off(props) else ["run", "--detach"]), *_arguments(engine, props)])
    elif _off(props):
        _stop(engine, state["Id"])
    elif not state["State"]["Running"]:
        try:
            _call(engine, ["start", state["Id"]])
        except UserError as error:
            # Another program may have taken one of its ports, which podman keeps for its whole life.
            raise UserError(
                f"{error}: if it stays so, {_removal(engine, name)}, and `pulumi up` makes another"
            ) from None
    state = _inspect(engine, name)
    if state is None:
        raise UserError(f"the container {name} was started and is gone again")
    outputs = _outputs(state, props)
    if _off(props):
        return state["Id"], outputs
    if None in outputs.values():
        raise UserError(f"the container {name} does not run, or none of this machine's ports leads into it")
    return state["Id"], outputs


def _refuse_foreign(engine: Sequence[str], state: Mapping[str, Any], name: str, stacks: Path) -> None:
    """Raise UserError unless the container was made from this directory of stack files."""
    maker = _label(state, _CHECKOUT_LABEL)
    if maker == str(stacks):
        return
    if maker is None:
        whose, way_out = "was not made by any checkout of this project", _removal(engine, name)
    elif not is_absent(Path(maker)):
        whose = f"belongs to another checkout, {printable(maker)}"
        way_out = "run `./dev down` or `pulumi destroy` there"
    else:
        whose, way_out = f"belongs to another checkout, {printable(maker)}, which is gone", _removal(engine, name)
    raise UserError(f"the container {name} {whose}: {way_out}, or use another stack name")


def _removal(engine: Sequence[str], name: str) -> str:
    return f"remove it (`{Path(engine[0]).name} rm --force --volumes {name}`)"


def _label(state: Mapping[str, Any], label: str) -> str | None:
    value = (state["Config"].get("Labels") or {}).get(label)
    return None if value is None else str(value)


def _spec(props: Mapping[str, Any]) -> str:
    described = {**props, "volumes": {inside: str(path) for inside, path in _volumes(props).items()}}
    return hashlib.sha256(json.dumps([described[key] for key in _SPEC_KEYS], sort_keys=True).encode()).hexdigest()


def _volumes(props: Mapping[str, Any]) -> dict[str, Path]:
    """Where on this machine each volume lies. Only the container knows that: state holds the paths as written."""
    stacks = stack_directory()
    # Path.resolve raises for a loop of links.
    return {inside: Path(os.path.realpath(path_here(stacks, path))) for inside, path in props["volumes"].items()}


def _outputs(state: Mapping[str, Any], props: Mapping[str, Any]) -> dict[str, Any]:
    """What the resource's outputs say of this container; a port is None where none of this machine's leads into it.

    While it does not run, the ports are those that are kept for it.
    """
    running = state["State"]["Running"]
    ports = (state["NetworkSettings"].get("Ports") if running else state["HostConfig"]["PortBindings"]) or {}

    def published(port: int) -> int | None:
        bindings = ports.get(f"{port}/tcp")
        return int(bindings[0]["HostPort"]) if bindings else None

    return {
        "started": state["State"]["StartedAt"],
        "ssh_port": published(22),
        "endpoint_port": published(int(props["enginePort"])),
    }


def _arguments(engine: Sequence[str], props: Mapping[str, Any]) -> list[str]:
    name, image = props["name"], props["image"]
    if subprocess.run([*engine, "image", "inspect", image], capture_output=True, check=False).returncode != 0:
        raise UserError(f"there is no container image {image} on this machine: `./dev image` builds the sandbox's")
    volumes = _volumes(props)
    for directory in volumes.values():
        if not is_directory(directory):
            raise UserError(
                f"sandbox.volumes: {printable(directory)} is no directory on this machine, or not for this user"
            )
    volumes[KEYS_IN_CONTAINER] = sandbox_keys(name)
    return [
        f"--name={name}",
        f"--hostname={name[:63]}",
        f"--label={_SPEC_LABEL}={_spec(props)}",
        f"--label={_CHECKOUT_LABEL}={stack_directory().resolve()}",
        *machine_options(engine),
        f"--shm-size={int(props['shmMiB'])}m",
        f"--publish=127.0.0.1:{free_port()}:22",
        f"--publish=127.0.0.1:{free_port()}:{int(props['enginePort'])}",
        *(f"--volume={outside}:{inside}:ro" for inside, outside in sorted(volumes.items())),
        image,
        "/sbin/init",
    ]


def free_port() -> int:
    """A port of this machine's loopback for a container to keep while it is stopped.

    Below the range that connections take theirs from (Linux: 32768 and up), where a stopped container's port was seen
    to be taken by one.
    """
    for _ in range(100):
        port = random.randrange(20000, 32768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise UserError("no port between 20000 and 32767 is free on this machine's loopback")


def machine_options(engine: Sequence[str]) -> list[str]:
    """What podman or docker must be told for a container in which systemd is the first process."""
    if "podman" in Path(engine[0]).name:
        # Where SELinux is on, the container could not read its volumes; relabelling would change the user's files.
        systemd = ["--systemd=always", "--security-opt=label=disable"]
    else:
        systemd = [
            "--cgroupns=host",
            "--volume=/sys/fs/cgroup:/sys/fs/cgroup:rw",
            "--tmpfs=/run",
            "--tmpfs=/run/lock",
            "--security-opt=apparmor=unconfined",
            # What podman knows by itself: systemd takes docker's own signal for an order to start itself anew.
            "--stop-signal=SIGRTMIN+3",
        ]
    # Without SYS_ADMIN a hardened unit ends with 226/NAMESPACE: systemd may not mount in its own mount namespace.
    return [*systemd, "--cap-add=SYS_ADMIN", *_LIMITS]


def container_engine() -> tuple[str, ...]:
    """The words that begin a call of podman or docker, whichever this machine has. Raises UserError."""
    chosen = os.environ.get("LORA_PODS_CONTAINER_ENGINE")
    for name in (chosen,) if chosen else ("podman", "docker"):
        path = shutil.which(name)
        if path is None:
            continue
        # crun, podman's default, refuses machines that mix both versions of cgroups.
        mixed = Path("/sys/fs/cgroup").is_dir() and not Path("/sys/fs/cgroup/cgroup.controllers").exists()
        runtime = ("--runtime", "runc") if "podman" in Path(name).name and mixed and shutil.which("runc") else ()
        return (path, *runtime)
    raise UserError(f"a sandbox needs {chosen or 'podman or docker'} on PATH: `apt-get install podman`, or the like")


def _inspect(engine: Sequence[str], name: str) -> dict[str, Any] | None:
    done = subprocess.run([*engine, "container", "inspect", name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if "no such container" in done.stderr.lower():
            return None
        raise UserError(f"{Path(engine[0]).name} cannot say whether {name} is there: {_complaint(done.stderr)}")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found[0]


def _remove(engine: Sequence[str], identifier: str) -> None:
    _call(engine, ["rm", "--force", "--volumes", identifier])


def _call(engine: Sequence[str], arguments: Sequence[str]) -> None:
    done = subprocess.run([*engine, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"{Path(engine[0]).name} {arguments[0]} failed: {_complaint(done.stderr)}")


def _complaint(stderr: str) -> str:
    return printable((stderr.strip().splitlines() or ["it said nothing"])[-1], 500)


def _generated_keys(name: str) -> str:
    """Make the sandbox's key pairs where they are missing; return its host key. They are as old as the container."""
    directory = sandbox_keys(name)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    for key in ("ssh_host_ed25519_key", "id_ed25519"):
        if not (directory / f"{key}.pub").is_file():
            _generate(directory / key)
    authorized = directory / "authorized_keys"
    if not authorized.is_file():
        authorized.write_bytes((directory / "id_ed25519.pub").read_bytes())
    return normalise_host_key((directory / "ssh_host_ed25519_key.pub").read_text(encoding="utf-8"))


def _generate(path: Path) -> None:
    private, public = new_key()
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as out:
        out.write(private)
    path.with_name(path.name + ".pub").write_text(public + "\n", encoding="ascii")
