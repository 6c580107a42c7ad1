"""Pods for tests: containers with systemd and sshd, reached as `host:` pods are."""

from __future__ import annotations

import json
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.pods.sandbox import KEYS_IN_CONTAINER, free_port, machine_options
from components.pods.sandbox import container_engine as container_engine

STANDIN_IMAGE = "localhost/lora-pods-standin"
ROOT = "/var/lib/lora-pods"
MOST_EXPOSED = 3.0


def call(*arguments: str, check: bool = True, stdin: str | None = None) -> str:
    done = subprocess.run([*container_engine(), *arguments], capture_output=True, text=True, input=stdin, check=False)
    if check and done.returncode != 0:
        raise AssertionError(f"{' '.join(arguments)} exited {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def generate_key(path: Path) -> str:
    """Make a key pair; return the public half as `type base64`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True)
    return " ".join(path.with_name(path.name + ".pub").read_text().split()[:2])


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it does not happen"
        time.sleep(0.2)


@dataclass
class Machine:
    """A running container; `host_key` is its sshd's, `keys` the directory that decides who may log in."""

    name: str
    host_key: str
    keys: Path

    @classmethod
    def start(cls, directory: Path, authorized: str, image: str = STANDIN_IMAGE) -> Machine:
        name = f"lora-pods-test-{uuid.uuid4().hex[:12]}"
        keys = directory / name
        host_key = generate_key(keys / "ssh_host_ed25519_key")
        (keys / "authorized_keys").write_text(authorized + "\n")
        call(
            *("run", "--detach", f"--name={name}", *machine_options(container_engine()), "--shm-size=512m"),
            *(f"--publish=127.0.0.1:{free_port()}:22", f"--publish=127.0.0.1:{free_port()}:8000"),
            *(f"--volume={keys}:{KEYS_IN_CONTAINER}:ro", image, "/sbin/init"),
        )
        machine = cls(name, host_key, keys)
        machine.wait_until_running()
        return machine

    def wait_until_running(self, seconds: float = 60) -> None:
        give_up = time.monotonic() + seconds
        while self.run("systemctl", "is-system-running", "--wait", check=False).strip() not in ("running", "degraded"):
            assert time.monotonic() < give_up, f"{self.name} does not come up"

    def port(self, inside: int = 22) -> int:
        return int(call("port", self.name, str(inside)).split(":")[-1])

    def run(self, *words: str, check: bool = True, stdin: str | None = None) -> str:
        return call("exec", *(("-i",) if stdin is not None else ()), self.name, *words, check=check, stdin=stdin)

    def read(self, path: str) -> str:
        return self.run("cat", path)

    def authorize(self, public_key: str) -> None:
        """Let this key in and no other."""
        (self.keys / "authorized_keys").write_text(public_key + "\n")
        self.run("/usr/local/sbin/lora-pods-keys")

    def get(self, path: str, headers: Mapping[str, str] | None = None, port: int = 8000) -> Any:
        """GET a JSON document from an engine on the machine's loopback."""
        sent = [part for name, value in (headers or {}).items() for part in ("-H", f"{name}: {value}")]
        return json.loads(self.run("curl", "-sS", "--fail", *sent, f"http://127.0.0.1:{port}{path}"))

    def ask(self, model: str, port: int = 8000, headers: Mapping[str, str] | None = None) -> str:
        """One completion at temperature 0."""
        sent = [part for name, value in (headers or {}).items() for part in ("-H", f"{name}: {value}")]
        body = json.dumps({"model": model, "prompt": "hello", "max_tokens": 16, "temperature": 0})
        answer = self.run(
            *("curl", "-sS", "--fail", "-H", "Content-Type: application/json", *sent, "-d", body),
            f"http://127.0.0.1:{port}/v1/completions",
        )
        return str(json.loads(answer)["choices"][0]["text"])

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        lines = self.run("systemctl", "show", unit, *(f"--property={name}" for name in properties)).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def pid(self, unit: str) -> int:
        return int(self.show(unit, "MainPID")["MainPID"])

    def argv(self, pid: int) -> list[str]:
        return self.read(f"/proc/{pid}/cmdline").split("\0")[:-1]

    def gateway(self) -> str:
        """The address at which the machine reaches this one: of the bridge that both are on."""
        for line in self.read("/proc/net/route").splitlines()[1:]:
            _, destination, gateway, *_ = line.split()
            if destination == "00000000":
                return ".".join(str(byte) for byte in bytes.fromhex(gateway)[::-1])
        raise AssertionError(f"{self.name} has no default route")

    def exposure(self, *words: str) -> float:
        """What systemd-analyze makes of a unit: 0 is shut, 10 is open."""
        told = self.run("systemd-analyze", "security", "--no-pager", *words, check=False)
        return float(told.rsplit("exposure level for ", 1)[1].split()[1])

    def kill(self) -> None:
        """As if the machine had been switched off."""
        call("kill", "--signal=KILL", self.name, check=False)

    def boot(self) -> None:
        """Switch it on again: what was enabled starts by itself."""
        call("start", self.name)
        self.wait_until_running()

    def received(self) -> int:
        """How many bytes have come over its network since it was switched on."""
        return int(self.read("/sys/class/net/eth0/statistics/rx_bytes"))

    def remove(self) -> None:
        call("rm", "--force", "--volumes", self.name, check=False)
