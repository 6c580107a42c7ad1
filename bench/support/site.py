"""A pod in a container and a stack for it, as a user would have them: what every measurement of a run starts from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support.scratch import scratch
from tests.support.large_adapters import LLAMA_2, large_adapters
from tests.support.machines import STANDIN_IMAGE, Machine, generate_key
from tests.support.stacks import Checkout, Stack

BASE = "/models/tiny"
UNPROVEN = {"python": "/opt/vllm/bin/python", "device": "cpu", "readyTimeoutSeconds": 300}


@dataclass
class Site:
    """`key` opens the pod; `work` is for whatever else a measurement needs."""

    machine: Machine
    key: Path
    stack: Stack
    work: Path

    def configure(
        self,
        adapters: Mapping[str, Path],
        *,
        base: str = BASE,
        port: int | None = None,
        engine: Mapping[str, Any] = UNPROVEN,
    ) -> None:
        """Let the stack serve these adapters from the pod, reached at `port` of this machine."""
        host = {
            "address": "127.0.0.1",
            "port": port or self.machine.port(),
            "user": "root",
            "hostKey": self.machine.host_key,
        }
        models = [{"id": model, "base": base, "adapter": str(path)} for model, path in adapters.items()]
        pod = {"base": base, "host": host, "engine": dict(engine)}
        self.stack.configure([pod], models, sshPrivateKey=self.key.read_text())

    def up(self, *words: str) -> None:
        self.stack.pulumi("up", "--yes", "--skip-preview", "--stack", self.stack.name, *words)

    def preview(self) -> None:
        self.stack.pulumi("preview", "--stack", self.stack.name, "--expect-no-changes")

    def destroy(self) -> None:
        self.stack.pulumi("destroy", "--yes", "--skip-preview", "--stack", self.stack.name)

    def forget_digests(self) -> None:
        """As on a machine that has never seen the adapters."""
        shutil.rmtree(self.stack.checkout.environment["XDG_CACHE_HOME"], ignore_errors=True)

    @property
    def unit(self) -> str:
        (engine,) = self.stack.outputs()["engines"].values()
        return str(engine["unit"])

    def known_hosts(self, port: int | None = None) -> Path:
        """A file that pins the pod's host key for OpenSSH."""
        path = self.work / f"known_hosts-{port or self.machine.port()}"
        path.write_text(f"[127.0.0.1]:{port or self.machine.port()} {self.machine.host_key}\n")
        return path

    def ssh_options(self, port: int | None = None) -> Sequence[str]:
        return (
            *("-i", str(self.key), "-o", f"UserKnownHostsFile={self.known_hosts(port)}", "-o", "BatchMode=yes"),
            *("-o", "IdentitiesOnly=yes", "-F", "none"),
        )


@contextmanager
def site(image: str = STANDIN_IMAGE) -> Iterator[Site]:
    """A pod that runs and a stack without anything in it; both are gone when the block ends."""
    with scratch() as work:
        public = generate_key(work / "key")
        machine = Machine.start(work / "machines", public, image)
        try:
            machine.run("mkdir", "-p", BASE)
            machine.run("tee", f"{BASE}/config.json", stdin="{}")
            checkout = Checkout.make(work / "checkout", work / "backend")
            # An event log is written where this is set.
            checkout.environment.pop("PULUMI_DEBUG_COMMANDS")
            yield Site(machine, work / "key", checkout.stack("bench"), work)
        finally:
            machine.remove()


def adapters_of(directory: Path, count: int) -> dict[str, Path]:
    """`count` adapters of Llama 2 7B, of 160 MB of random bytes each, by model id."""
    return {path.name: path for path in large_adapters(directory, count, LLAMA_2, random_bytes=True)}


def replace_weights(adapter: Path) -> None:
    """Other tensors in the same file, as a training run would write them."""
    weights = adapter / "adapter_model.safetensors"
    with weights.open("rb") as file:
        prefix = file.read(8)
        header = file.read(int.from_bytes(prefix, "little"))
    size = weights.stat().st_size
    aside = adapter / "aside"
    with aside.open("wb") as file:
        file.write(prefix + header)
        while (left := size - file.tell()) > 0:
            file.write(os.urandom(min(left, 2**20)))
    aside.rename(weights)


def total_size(adapters: Mapping[str, Path]) -> int:
    return sum(file.stat().st_size for path in adapters.values() for file in path.iterdir())
