"""The sandbox pod: a container that is made, kept, brought back and removed with its stack."""

from __future__ import annotations

import json
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import BASE, Client, Key
from tests.engine.test_drift import lora
from tests.support.adapters import BASE_CONFIG
from tests.support.machines import STANDIN_IMAGE, call
from tests.support.stacks import Checkout

pytestmark = pytest.mark.pod


def describe(checkout: Checkout, name: str) -> Client:
    """A stack with a sandbox and one adapter; nothing is deployed yet."""
    (checkout.root / "models" / "tiny").mkdir(parents=True)
    (checkout.root / "models" / "tiny" / "config.json").write_text(json.dumps(BASE_CONFIG))
    pod = {
        "base": BASE,
        "sandbox": {"image": STANDIN_IMAGE, "volumes": {"/models": "../models"}, "shmMiB": 256},
        "engine": {"readyTimeoutSeconds": 60},
    }
    client = Client(checkout.stack(name), Key("", ""), [pod])
    client.add("acme-v1", seed=1)
    return client


@pytest.fixture
def client(checkout: Checkout) -> Iterator[Client]:
    client = describe(checkout, f"test-{uuid.uuid4().hex[:8]}")
    yield client
    call("rm", "--force", "--volumes", f"lora-pods-{client.stack.name}", check=False)


def served(client: Client) -> set[str]:
    """The ids that the engine lists to this machine, through the container's published port."""
    endpoint = client.stack.outputs()["engines"][BASE]["endpoint"]
    with urllib.request.urlopen(f"{endpoint}/models", timeout=10) as answer:
        return {model["id"] for model in json.load(answer)["data"]}


def containers(client: Client) -> list[str]:
    return call("ps", "--all", "--quiet", "--no-trunc", "--filter", f"name=lora-pods-{client.stack.name}").split()


def test_its_whole_life(client: Client) -> None:
    client.up()
    assert served(client) == {BASE, "acme-v1"}
    (made,) = containers(client)
    assert client.stack.up("--expect-no-changes").changes == {}
    code, said = lora(client, "status", "-s", client.stack.name)
    assert (code, said.splitlines()[2]) == (0, f"  serves {BASE}, acme-v1")

    # The machine was rebooted: the container is there, and stopped.
    call("stop", f"lora-pods-{client.stack.name}")
    assert lora(client, "status", "-s", client.stack.name) == (
        1,
        f"{BASE}  NOT REACHED: the container lora-pods-{client.stack.name} is not there, or does not run: "
        "`pulumi up` starts it\n",
    )
    assert client.stack.preview().changes[f"SandboxContainer lora-pods-{client.stack.name}"] == "update"
    client.stack.up()
    assert containers(client) == [made]
    assert served(client) == {BASE, "acme-v1"}

    # Somebody started it again: its ports may be others.
    call("restart", f"lora-pods-{client.stack.name}")
    assert client.stack.up().changes[f"SandboxContainer lora-pods-{client.stack.name}"] == "update"
    assert client.stack.up("--expect-no-changes").changes == {}
    assert served(client) == {BASE, "acme-v1"}

    # Somebody removed it: everything arrives again.
    call("rm", "--force", f"lora-pods-{client.stack.name}")
    seen = client.stack.refresh("--diff").output
    assert '=> "the container is gone"' in seen
    assert f"drift of lora-pods-{client.stack.name}: sandbox: the container is gone\n" in seen
    assert client.up().changes[f"SandboxContainer lora-pods-{client.stack.name}"] == "replace"
    assert containers(client) != [made]
    assert served(client) == {BASE, "acme-v1"}

    run = client.stack.destroy()
    assert set(run.operations.values()) == {"delete"}
    assert containers(client) == []


def test_two_checkouts_with_stacks_of_one_name(client: Client, tmp_path: Path) -> None:
    client.up()
    (made,) = containers(client)
    # This machine's paths are the container's to know.
    assert str(tmp_path) not in json.dumps(client.stack.export())

    other = describe(Checkout.make(tmp_path / "other", tmp_path / "other-backend"), client.stack.name)
    run = other.up(fails=True)
    assert f"the container lora-pods-{client.stack.name} belongs to another checkout, {client.stack.checkout.root}" in (
        run.output
    )
    assert "Traceback" not in run.output
    other.stack.destroy()
    assert containers(client) == [made]
    assert client.stack.up("--expect-no-changes").changes == {}
    assert served(client) == {BASE, "acme-v1"}


def test_an_image_that_is_not_there(client: Client) -> None:
    client.pods[0]["sandbox"]["image"] = "localhost/lora-pods-absent"
    run = client.up(fails=True)
    assert "there is no container image localhost/lora-pods-absent on this machine" in run.output
    assert "Traceback" not in run.output
