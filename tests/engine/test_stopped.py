"""`lora-pods:running: false`: machines that are ours are switched off for a while, and keep what is on them."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator

import pytest

from tests.engine.conftest import BASE, Client
from tests.engine.test_lock_only import lora_lock
from tests.engine.test_preview import said
from tests.engine.test_sandbox import containers, describe, served
from tests.support.adapters import seeded_adapter
from tests.support.machines import ROOT, call
from tests.support.stacks import Checkout

pytestmark = pytest.mark.pod

COMMANDS = [f"Command {BASE}-{verb}" for verb in ("prepare", "place", "secrets", "activate")]
ALL_OF_IT = dict.fromkeys([f"ReachedPod {BASE}-reach", f"BundleUpload {BASE}-upload", *COMMANDS], "update")
# Seconds that a machine which does not answer is tried for.
A_TRY = 60


@pytest.fixture
def client(checkout: Checkout) -> Iterator[Client]:
    client = describe(checkout, f"test-{uuid.uuid4().hex[:8]}")
    yield client
    call("rm", "--force", "--volumes", container(client), check=False)


@pytest.fixture
def stopped(client: Client) -> Client:
    client.up()
    switch(client, on=False)
    client.stack.up()
    return client


def switch(client: Client, on: bool) -> None:
    client.stack.pulumi("config", "set", "running", str(on).lower(), "--stack", client.stack.name)


def container(client: Client) -> str:
    return f"lora-pods-{client.stack.name}"


def machine(client: Client) -> str:
    return f"SandboxContainer {container(client)}"


def urns(client: Client) -> set[str]:
    found = {str(each["urn"]) for each in client.stack.export()["deployment"]["resources"]}
    return {urn for urn in found if "pulumi:providers:" not in urn}


def runs(client: Client) -> bool:
    return call("inspect", "--format={{.State.Running}}", container(client)).strip() == "true"


def inside(client: Client, *words: str) -> str:
    return call("exec", container(client), *words)


def digests(client: Client) -> dict[str, str]:
    """What each adapter is, as the state has it."""
    resources = client.stack.export()["deployment"]["resources"]
    return {r["urn"].split("::")[-1]: r["id"] for r in resources if r["type"].endswith(":AdapterBundle")}


def blobs(client: Client, model: str) -> set[str]:
    """A model's unpacked files, each with its inode and the time of its last change."""
    blob = f"{ROOT}/blobs/sha256/{digests(client)[model][7:]}"
    return set(inside(client, "find", blob, "-type", "f", "-printf", "%p %i %C@\n").splitlines())


def all_blobs(client: Client) -> set[str]:
    return {f"sha256:{name}" for name in inside(client, "ls", f"{ROOT}/blobs/sha256").split()}


def test_off_over_night_and_on_again(client: Client) -> None:
    client.up()
    recorded, (made,), before = client.stack.outputs(), containers(client), blobs(client, "acme-v1")
    switch(client, on=False)

    preview = client.stack.preview()
    assert said(preview) == [f"{BASE}: 1 adapter, switched off now, keeps what is on it"]
    assert "\nOutputs:\n" not in preview.output
    off = {machine(client): "update", f"ReachedPod {BASE}-reach": "update"}
    assert preview.changes == off
    assert client.stack.up().changes == off
    assert not runs(client)
    assert client.stack.outputs() == {"engines": {BASE: {**recorded["engines"][BASE], "running": False}}}

    assert client.stack.up("--expect-no-changes").changes == {}
    assert client.stack.outputs() == {"engines": {BASE: {**recorded["engines"][BASE], "running": False}}}
    assert said(client.stack.preview("--expect-no-changes")) == [f"{BASE}: 1 adapter, stays switched off"]

    switch(client, on=True)
    assert said(client.stack.preview()) == [
        f"{BASE}: 1 adapter, switched on again, none changes; the engine starts as it was"
    ]
    assert client.stack.up().changes == {machine(client): "update", **ALL_OF_IT}
    assert client.stack.outputs() == recorded, "the same ports, and it is on"
    assert containers(client) == [made]
    assert blobs(client, "acme-v1") == before
    assert served(client) == {BASE, "acme-v1"}
    assert client.stack.up("--expect-no-changes").changes == {}


def test_what_changes_meanwhile_is_deployed_when_it_is_switched_on(client: Client) -> None:
    client.add("acme-v2", seed=2)
    client.up()
    kept, on_pod = blobs(client, "acme-v1"), all_blobs(client)
    switch(client, on=False)
    client.stack.up()
    lora_lock(client.stack)
    # So the bytes of an adapter that stays cannot be sent again: they are nowhere but on the pod.
    shutil.rmtree(client.adapters / "acme-v1")
    old = digests(client)["acme-v2"]
    seeded_adapter(client.adapters / "acme-v2", seed=12)
    client.add("acme-v3", seed=3)
    client.models.append({"id": "plain", "base": BASE})
    client.pods[0]["engine"].update(maxModelLen=128)
    client.configure()

    waits = "stays switched off; what is to change there waits until it is switched on"
    preview = client.stack.preview()
    assert said(preview) == [f"{BASE}: 3 adapters, {waits}"]
    assert preview.changes == {"AdapterBundle acme-v2": "replace", "AdapterBundle acme-v3": "create"}
    assert client.stack.up().changes == preview.changes
    assert not runs(client)
    assert client.stack.outputs()["engines"][BASE]["models"].keys() == {BASE, "acme-v1", "acme-v2"}
    assert client.stack.up("--expect-no-changes").changes == {}

    switch(client, on=True)
    new = digests(client)
    assert said(client.stack.preview()) == [
        f"{BASE}: 3 adapters, switched on again, 1 changed, 1 added",
        f"  ~ acme-v2 {old[7:19]} → {new['acme-v2'][7:19]}",
        f"  + acme-v3 {new['acme-v3'][7:19]}",
        "  --max-loras 3 (was 2): 3 adapters, all may share a batch",
        "  --max-lora-rank 8: largest rank is 8 (acme-v1)",
        "  --max-cpu-loras 3 (was 2): 3 adapters, all stay in CPU memory",
        "  the engine restarts: adapters, flags changed",
    ]
    client.stack.up()
    assert all_blobs(client) - on_pod == {new["acme-v2"], new["acme-v3"]}
    assert blobs(client, "acme-v1") == kept
    assert served(client) == {BASE, "acme-v1", "acme-v2", "acme-v3", "plain"}
    assert "--max-model-len 128" in inside(client, "systemctl", "cat", client.unit).replace("=", " ")
    assert client.stack.up("--expect-no-changes").changes == {}


def test_a_machine_that_is_off_is_left_off_and_not_waited_for(stopped: Client) -> None:
    call("start", container(stopped))
    assert stopped.stack.up().changes == {machine(stopped): "update"}, "somebody had started it by hand"
    assert not runs(stopped)

    begun = time.monotonic()
    assert stopped.stack.up("--refresh", "--expect-no-changes").changes == {}
    assert time.monotonic() - begun < A_TRY
    assert not runs(stopped)

    begun = time.monotonic()
    run = stopped.stack.destroy()
    assert time.monotonic() - begun < A_TRY
    assert set(run.operations.values()) == {"delete"}
    assert containers(stopped) == []


def test_a_base_is_renamed_only_while_its_machine_is_on(stopped: Client) -> None:
    before = urns(stopped)
    stopped.pods[0]["base"] = "/models/other"
    for model in stopped.models:
        model["base"] = "/models/other"
    stopped.configure()
    failed = stopped.stack.up(fails=True)
    assert f"lora-pods:running is false, and {BASE} left the stack file" in failed.output
    assert "Traceback" not in failed.output
    assert urns(stopped) == before
    stopped.stack.destroy()
    assert containers(stopped) == []


def test_a_pod_that_is_off_from_the_beginning(client: Client) -> None:
    client.configure()
    switch(client, on=False)
    preview = client.stack.preview()
    assert said(preview) == [f"{BASE}: 1 adapter, switched off; nothing is put on it before it is switched on"]
    run = client.stack.up()
    assert f"nothing serves {BASE} yet; that begins once lora-pods:running is true\n" in run.output
    assert set(run.changes) == {
        "Deployment lora-pods",
        f"GpuPod {BASE}",
        f"PlacedBundles {BASE}",
        f"VllmEngine {BASE}",
        "AdapterBundle acme-v1",
        f"ReachedPod {BASE}-reach",
        machine(client),
    }
    assert not runs(client)
    assert client.stack.outputs() == {"engines": {}}
    assert client.stack.up("--expect-no-changes").changes == {}

    switch(client, on=True)
    assert said(client.stack.preview())[-1] == "  the engine starts for the first time"
    client.stack.up()
    assert served(client) == {BASE, "acme-v1"}


def test_a_pod_that_is_switched_off_after_its_first_start_failed(client: Client) -> None:
    client.pods[0]["engine"].update(args={"noSuchFlag": 1}, readyTimeoutSeconds=10)
    client.up(fails=True)
    switch(client, on=False)

    begun = time.monotonic()
    run = client.stack.up()
    assert run.changes == {
        machine(client): "update",
        f"ReachedPod {BASE}-reach": "update",
    }, "what was put there stays declared, and nothing is tried there"
    assert time.monotonic() - begun < A_TRY
    assert not runs(client)
    assert client.stack.up("--expect-no-changes").changes == {}

    del client.pods[0]["engine"]["args"]
    client.configure()
    switch(client, on=True)
    client.stack.up()
    assert served(client) == {BASE, "acme-v1"}
