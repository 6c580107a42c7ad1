"""A stack with a store: adapters are pushed once, and pods fetch them from there, also for those who have none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from components.core.digest_cache import DigestCache
from tests.engine.conftest import Client, host_pod
from tests.engine.test_lock_only import pull, served, sha256
from tests.support.machines import Machine
from tests.support.s3 import ENVIRONMENT, S3, s3_service
from tests.support.stacks import LOUD, Checkout, Stack

pytestmark = pytest.mark.pod

LORA = "from components.cli.main import main; raise SystemExit(main())"


def lora(stack: Stack, *words: str) -> str:
    command = [sys.executable, "-c", LORA, *words, "-s", stack.name]
    where = stack.checkout
    done = subprocess.run(command, cwd=where.root, env=where.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def s3(machine: Machine) -> Iterator[S3]:
    """At the address that this machine has on the pods' own network."""
    try:
        with s3_service(machine.gateway()) as service:
            yield service
    except OSError as error:
        pytest.skip(f"{machine.gateway()}, which the pods' network leads to, is no address of this machine ({error})")


@pytest.fixture
def stored(client: Client, s3: S3) -> Client:
    """The laptop's stack, with a store; nothing is pushed or deployed yet."""
    client.stack.checkout.environment.update(ENVIRONMENT)
    client.stack.configure(client.pods, client.models, {"store": s3.store})
    return client


@pytest.fixture
def elsewhere(stored: Client, tmp_path: Path) -> Callable[[], Stack]:
    """Another machine's checkout of the same state: no adapter, no digest cache."""

    def make() -> Stack:
        backend = Path(stored.stack.checkout.environment["PULUMI_BACKEND_URL"].removeprefix("file://"))
        checkout = Checkout.make(tmp_path / "ci" / "checkout", backend)
        checkout.environment.update(ENVIRONMENT)
        stack = Stack(checkout, stored.stack.name)
        pull(stored.stack, stack)
        return stack

    return make


def weights(client: Client) -> int:
    return sum(DigestCache().describe(path).size for path in client.adapters.iterdir())


def test_who_pushes_and_who_deploys_may_be_two_machines(
    stored: Client, elsewhere: Callable[[], Stack], s3: S3, machine: Machine
) -> None:
    lora(stored.stack, "lock")
    lora(stored.stack, "push")
    assert sum(each.sent for each in s3.uploads) == weights(stored)
    s3.requests.clear()
    second = elsewhere()

    up = second.up(*LOUD)

    assert served(machine, "acme-v1") == sha256(stored, "acme-v1")
    assert served(machine, "acme-v2") == sha256(stored, "acme-v2")
    assert s3.uploads == []
    assert len(s3.downloads) == 2
    assert second.preview("--expect-no-changes").changes == {}
    assert stored.stack.preview("--expect-no-changes").changes == {}, "nor is there anything to do on the laptop"

    # A presigned URL is a key to the object for as long as it lasts.
    told = up.output + json.dumps(second.export())
    told += second.events()
    told += machine.run("sh", "-c", "grep -rhoa 'X-Amz[A-Za-z-]*' /var/lib/lora-pods /etc/systemd/system || true")
    told += machine.run("journalctl", "--no-pager")
    assert "X-Amz-Signature" not in told
    assert "X-Amz-Credential=" not in told
    assert ENVIRONMENT["AWS_ACCESS_KEY_ID"] not in told
    assert ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in told


def test_a_second_pod_of_the_same_adapters_is_sent_nothing_by_the_laptop(
    stored: Client, s3: S3, new_machine: Callable[[], Machine], machine: Machine
) -> None:
    stored.stack.up()
    assert sum(each.sent for each in s3.uploads) == weights(stored), "each bundle went to the store, once"
    stored.stack.preview()  # where the first run met files younger than two seconds, it kept no digest of them
    s3.requests.clear()
    other, base = new_machine(), "/models/other"
    other.run("mkdir", "-p", base)
    other.run("tee", f"{base}/config.json", stdin="{}")
    stored.pods.append(host_pod(other, base, port=8001))
    twins = [{**model, "id": f"{model['id']}-twin", "base": base} for model in stored.models]
    stored.stack.configure(stored.pods, [*stored.models, *twins], {"store": s3.store})

    trace, _ = stored.stack.traced("openat", "up", "--yes", "--skip-preview", "--stack", stored.stack.name)

    twin = other.ask("acme-v1-twin", port=8001)
    assert f"weights={sha256(stored, 'acme-v1')}" in twin
    assert "adapter_config.json" in trace, "what is opened is seen: the check reads the twins' configs"
    opened = [line for line in trace.splitlines() if "adapter_model.safetensors" in line]
    assert s3.uploads == []
    assert len(s3.downloads) == 2
    assert len(opened) <= 2, "the check read two headers for the other base, and nobody the weights"


def test_a_store_that_is_added_later_gets_what_is_deployed(client: Client, s3: S3) -> None:
    client.stack.checkout.environment.update(ENVIRONMENT)
    client.up()
    assert s3.requests == []
    client.stack.configure(client.pods, client.models, {"store": s3.store})

    up = client.stack.up()

    assert up.changes == {"AdapterBundle acme-v1": "update", "AdapterBundle acme-v2": "update"}
    assert sum(each.sent for each in s3.uploads) == weights(client)


def test_what_nobody_has_is_named_unless_the_pod_has_it(
    stored: Client, elsewhere: Callable[[], Stack], s3: S3, machine: Machine
) -> None:
    lora(stored.stack, "lock")
    second = elsewhere()
    failed = second.up(fails=True)
    absent = [
        f"{name} ({DigestCache().describe(stored.adapters / name).digest}) at ../adapters/{name}"
        for name in ("acme-v1", "acme-v2")
    ]
    assert (
        f"the pod lacks what neither s3://lora-pods-tests/team at {s3.endpoint} nor this machine has: "
        f"{', '.join(absent)}; run `lora push` where they are, or put the adapters there"
    ) in failed.output
    assert "Traceback" not in failed.output
    assert "lora-pods-acme" not in machine.run("ls", "/etc/systemd/system")

    stored.stack.up()
    for key in s3.objects():
        s3.remove(key)
    stored.stack.checkout.root.joinpath("adapters").rename(stored.stack.checkout.root / "away")
    # As after `git revert` to a lock whose objects were collected: going back takes no bytes.
    stored.models.pop()
    stored.stack.configure(stored.pods, stored.models)
    stored.stack.up()
    stored.add("acme-v2", seed=2)
    (stored.adapters / "acme-v2").rename(stored.stack.checkout.root / "gone")
    stored.stack.configure(stored.pods, stored.models)
    again = stored.stack.up()
    assert again.changes["AdapterBundle acme-v2"] == "create"
    assert machine.ask("acme-v2")
    assert s3.objects() == {}
    assert stored.stack.preview().changes == {"AdapterBundle acme-v2": "update"}, "the store lacks it still"
