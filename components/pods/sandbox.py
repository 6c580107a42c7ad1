"""`sandbox`: a container on this machine, with systemd and sshd inside, where a rented GPU would be.

It is kept from run to run and named after the stack; `pulumi destroy` removes it with all that is on it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, DiffResult, Resource, UpdateResult

from components.core.errors import UserError, printable
from components.core.ssh_key import fingerprint, normalise_host_key
from components.pods.contract import Machine
from components.pods.credentials import private_key_text, sandbox_credential, sandbox_keys
from components.provider import Provider
from components.remote import Connection
from components.settings import Pod, Sandbox, Settings, stack_directory

KEYS_IN_CONTAINER = "/etc/lora-pods-keys"
_SPEC_LABEL = "lora-pods.spec"
_SPEC_KEYS = ("name", "image", "volumes", "shmMiB", "enginePort", "hostKey")
# A stock ulimit of millions of files makes sshd and others in the container close each of them at every start.
_LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=8192:8192")


def machine(sandbox: Sandbox, pod: Pod, settings: Settings, stack: str, opts: pulumi.ResourceOptions) -> Machine:
    name = f"lora-pods-{stack}"
    host_key = _generated_keys(name)
    container = SandboxContainer(name, sandbox, pod.engine.port, host_key, opts)
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
    """Create and update both make the container run as described; an unchanged one that runs is left alone."""

    def create(self, props: dict[str, Any]) -> CreateResult:
        identifier, running = _make_it_run(props)
        return CreateResult(identifier, {**props, **running})

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> UpdateResult:
        _, running = _make_it_run(_news)
        return UpdateResult({**_news, **running})

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> DiffResult:
        changed = [key for key in _SPEC_KEYS if _olds.get(key) != _news.get(key)]
        state = _inspect(_container_engine(), _olds["name"])
        if state is None or state["Id"] != _id:
            changed.append("container")
        stopped = state is not None and not state["State"]["Running"]
        return DiffResult(
            changes=bool(changed) or stopped, replaces=changed, delete_before_replace=True, stables=["name"]
        )

    def delete(self, _id: str, _props: dict[str, Any]) -> None:
        _remove(_container_engine(), _props["name"])


class SandboxContainer(Resource, module="lora-pods", name="SandboxContainer"):
    """The container. Its outputs: since when it runs, and the ports on this machine's loopback that lead into it."""

    started: pulumi.Output[str]
    ssh_port: pulumi.Output[float]
    endpoint_port: pulumi.Output[float]

    def __init__(
        self, name: str, sandbox: Sandbox, engine_port: int, host_key: str, opts: pulumi.ResourceOptions
    ) -> None:
        props = {
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
        super().__init__(SandboxContainerProvider(), name, props, opts)


def _make_it_run(props: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the container's id and what the resource's outputs say of it."""
    engine, name = _container_engine(), props["name"]
    spec = hashlib.sha256(json.dumps([props[key] for key in _SPEC_KEYS], sort_keys=True).encode()).hexdigest()
    state = _inspect(engine, name)
    if state is not None and (state["Config"].get("Labels") or {}).get(_SPEC_LABEL) != spec:
        _remove(engine, name)
        state = None
    if state is None:
        _call(engine, _run_arguments(engine, props, spec))
    elif not state["State"]["Running"]:
        _call(engine, ["start", name])
    state = _inspect(engine, name)
    if state is None:
        raise UserError(f"the container {name} was started and is gone again")
    ports = state["NetworkSettings"]["Ports"]

    def published(port: int) -> int:
        return int(ports[f"{port}/tcp"][0]["HostPort"])

    return state["Id"], {
        "started": state["State"]["StartedAt"],
        "ssh_port": published(22),
        "endpoint_port": published(int(props["enginePort"])),
    }


def _run_arguments(engine: Sequence[str], props: Mapping[str, Any], spec: str) -> list[str]:
    name, image = props["name"], props["image"]
    if subprocess.run([*engine, "image", "inspect", image], capture_output=True, check=False).returncode != 0:
        raise UserError(f"there is no container image {image} on this machine: `./dev image` builds the sandbox's")
    volumes = {KEYS_IN_CONTAINER: str(sandbox_keys(name))}
    for inside, outside in props["volumes"].items():
        directory = (stack_directory() / Path(outside).expanduser()).resolve()
        if not directory.is_dir():
            raise UserError(f"sandbox.volumes: {printable(directory)} is no directory on this machine")
        volumes[inside] = str(directory)
    systemd = ["--systemd=always"] if "podman" in engine[0] else ["--cgroupns=private", "--tmpfs=/run"]
    return [
        "run",
        "--detach",
        f"--name={name}",
        f"--hostname={name[:63]}",
        f"--label={_SPEC_LABEL}={spec}",
        *systemd,
        # Without it a hardened unit ends with 226/NAMESPACE: systemd may not mount in its own mount namespace.
        "--cap-add=SYS_ADMIN",
        f"--shm-size={int(props['shmMiB'])}m",
        *_LIMITS,
        "--publish=127.0.0.1::22",
        f"--publish=127.0.0.1::{int(props['enginePort'])}",
        *(f"--volume={outside}:{inside}:ro" for inside, outside in sorted(volumes.items())),
        image,
        "/sbin/init",
    ]


def _container_engine() -> tuple[str, ...]:
    """The words that begin a call of podman or docker, whichever this machine has. Raises UserError."""
    chosen = os.environ.get("LORA_PODS_CONTAINER_ENGINE")
    for name in (chosen,) if chosen else ("podman", "docker"):
        path = shutil.which(name)
        if path is None:
            continue
        # crun, podman's default, refuses machines that mix both versions of cgroups.
        mixed = Path("/sys/fs/cgroup").is_dir() and not Path("/sys/fs/cgroup/cgroup.controllers").exists()
        runtime = ("--runtime", "runc") if "podman" in name and mixed and shutil.which("runc") else ()
        return (path, *runtime)
    raise UserError(f"a sandbox needs {chosen or 'podman or docker'} on PATH; `./dev setup` installs podman")


def _inspect(engine: Sequence[str], name: str) -> dict[str, Any] | None:
    done = subprocess.run([*engine, "container", "inspect", name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found[0]


def _remove(engine: Sequence[str], name: str) -> None:
    if _inspect(engine, name) is not None:
        _call(engine, ["rm", "--force", "--volumes", name])


def _call(engine: Sequence[str], arguments: Sequence[str]) -> None:
    done = subprocess.run([*engine, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        complaint = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise UserError(f"{Path(engine[0]).name} {arguments[0]} failed: {printable(complaint[0], 500)}")


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
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(private)
    path.with_name(path.name + ".pub").write_bytes(public + b"\n")
