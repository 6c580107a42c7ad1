"""What needs the real pulumi CLI and a real pod: machines, checkouts, and the two put together."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapters import seeded_adapter
from tests.support.machines import Machine, call, container_engine, generate_key
from tests.support.stacks import Checkout, Run, Stack

BASE = "/models/tiny"


@dataclass(frozen=True)
class Key:
    """An SSH key pair of a stack."""

    private: str
    public: str


@pytest.fixture
def new_key(tmp_path: Path) -> Callable[[], Key]:
    made: list[Path] = []

    def make() -> Key:
        made.append(tmp_path / "keys" / f"key-{len(made)}")
        public = generate_key(made[-1])
        return Key(made[-1].read_text(), public)

    return make


@pytest.fixture
def key(new_key: Callable[[], Key]) -> Key:
    return new_key()


@pytest.fixture
def new_machine(tmp_path: Path, key: Key) -> Iterator[Callable[[], Machine]]:
    """Starts pods that let the stack's key in, with a base model on them; each is gone when the test ends."""
    started: list[Machine] = []

    def start() -> Machine:
        machine = Machine.start(tmp_path / "machines", key.public)
        started.append(machine)
        machine.run("mkdir", "-p", BASE)
        machine.run("tee", f"{BASE}/config.json", stdin="{}")
        return machine

    yield start
    for machine in started:
        machine.remove()


@pytest.fixture
def machine(new_machine: Callable[[], Machine]) -> Machine:
    return new_machine()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout.make(tmp_path / "checkout", tmp_path / "backend")


@dataclass
class Client:
    """A stack of one pod and some adapters, as a user would keep it: change the parts, `configure`, `up`."""

    stack: Stack
    key: Key
    pods: list[dict[str, Any]]
    models: list[dict[str, Any]] = field(default_factory=list)

    @property
    def adapters(self) -> Path:
        return self.stack.checkout.root / "adapters"

    @property
    def unit(self) -> str:
        return str(self.stack.outputs()["engines"][self.pods[0]["base"]]["unit"])

    def add(self, model: str, seed: int, **config: Any) -> None:
        seeded_adapter(self.adapters / model, seed=seed, **config)
        base = self.pods[0]["base"]
        self.models.append({"id": model, "base": base, "adapter": f"../adapters/{model}"})

    def configure(self, **secrets: str) -> None:
        self.stack.configure(self.pods, self.models, **secrets)

    def up(self, **options: Any) -> Run:
        self.configure()
        return self.stack.up(**options)


def host_pod(machine: Machine, base: str = BASE, user: str = "root", **engine: Any) -> dict[str, Any]:
    return {
        "base": base,
        "host": {"address": "127.0.0.1", "port": machine.port(), "user": user, "hostKey": machine.host_key},
        "engine": {"python": "/opt/vllm/bin/python", "device": "cpu", "readyTimeoutSeconds": 60, **engine},
    }


@pytest.fixture
def client(checkout: Checkout, machine: Machine, key: Key) -> Client:
    """Two versions of one client's adapter, on one pod; nothing is deployed yet."""
    client = Client(checkout.stack("acme"), key, [host_pod(machine)])
    client.add("acme-v1", seed=1)
    client.add("acme-v2", seed=2)
    client.configure(sshPrivateKey=key.private)
    return client


@pytest.fixture
def deployed(client: Client) -> Client:
    client.up()
    return client


@pytest.fixture(autouse=True, scope="session")
def _needs() -> None:
    for program in ("pulumi", "pulumi-language-python", "ssh-keygen", "strace", container_engine()[0]):
        if shutil.which(program) is None:
            pytest.fail(f"{program} is not on PATH; run these tests with ./dev test", pytrace=False)
    if not call("images", "--quiet", "localhost/lora-pods-standin", check=False):
        pytest.fail("the image localhost/lora-pods-standin is missing; run these tests with ./dev test", pytrace=False)
