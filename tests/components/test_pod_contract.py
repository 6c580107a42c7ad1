"""One contract for every kind of pod: what is put on a machine, in which order and by which way, whatever it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pulumi.runtime import MockResourceArgs

from components.core.ssh_key import fingerprint
from tests.components.test_graph import project
from tests.components.test_settings import HOST_KEY as HOST_KEY_OF_HOST
from tests.components.test_settings import Config
from tests.support import ec2
from tests.support.ec2 import CLIENT_KEY, Cloud, Plan, opened, plan
from tests.support.pulumi_aws import need_pulumi_aws

need_pulumi_aws()

__all__ = ["project"]

pytestmark = [
    pytest.mark.usefixtures("project"),
    pytest.mark.filterwarnings("ignore:aws.ec2/:DeprecationWarning"),
]

BASE = "/models/tiny"
ENGINE = {"python": "/opt/vllm/bin/python", "device": "cpu", "listen": "127.0.0.1"}
KINDS: Mapping[str, dict[str, Any]] = {
    "host": {"host": {"address": "10.0.0.7", "hostKey": HOST_KEY_OF_HOST}},
    "sandbox": {"sandbox": {}},
    "ec2": {"ec2": {**ec2.EC2, "user": "root"}},
}
COMMANDS = ("prepare", "place", "secrets", "activate")


class Machines(Cloud):
    def new_resource(self, args: MockResourceArgs) -> tuple[str | None, dict[Any, Any]]:
        found, outputs = super().new_resource(args)
        if args.typ.endswith(":SandboxContainer"):
            outputs.update(started="today", ssh_port=40022.0, endpoint_port=40023.0)
        return found, outputs


def planned(kind: str) -> Plan:
    models = [{"id": f"tiny-{name}", "base": BASE, "adapter": f"../adapters/{name}"} for name in ("v1", "v2")]
    config = Config(
        pods=[{"base": BASE, **KINDS[kind], "engine": ENGINE}], models=models, sshPrivateKey=CLIENT_KEY, apiKey="k" * 20
    )
    return plan(config, cloud=Machines())


def inputs(of: Plan, command: str) -> dict[str, Any]:
    (found,) = [item.inputs for item in of.declared if item.name == f"{BASE}-{command}"]
    return found


def document(of: Plan, command: str) -> dict[str, Any]:
    stdin = inputs(of, command)["stdin"]
    parsed: dict[str, Any] = json.loads(stdin if isinstance(stdin, str) else opened(stdin))
    return parsed


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_put_on_a_machine_is_the_same_on_all(kind: str, project: Path) -> None:
    this, host = planned(kind), planned("host")
    on_it = {"Command", "BundleUpload", "ReachedPod"}
    assert [item.name for item in this.declared if item.type.split(":")[-1] in on_it] == [
        item.name for item in host.declared if item.type.split(":")[-1] in on_it
    ]
    for command in COMMANDS:
        assert inputs(this, command)["create"] == inputs(host, command)["create"]
    for command in ("place", "secrets"):
        mine, theirs = document(this, command), document(host, command)
        assert {**mine, "identity": ""} == {**theirs, "identity": ""}
    mine, theirs = document(this, "activate"), document(host, "activate")
    assert (mine["ready"], mine["port"]) == (theirs["ready"], theirs["port"])
    own = {"IPAddressDeny=169.254.169.254 fd00:ec2::254"} if kind == "ec2" else set()
    lines = [set(found["unit"]["text"].splitlines()) for found in (mine, theirs)]
    assert {line for line in lines[0] ^ lines[1] if not line.startswith("#")} == own
    assert inputs(this, "upload")["bundles"] == inputs(host, "upload")["bundles"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_it_is_the_pinned_one(kind: str, project: Path) -> None:
    this = planned(kind)
    reach = this.one("ReachedPod").inputs["connection"]
    assert set(reach) == {"address", "port", "user", "hostKey", "credential"}
    assert reach == inputs(this, "upload")["connection"]
    for command in COMMANDS:
        connection = opened(inputs(this, command)["connection"])
        assert (connection["host"], connection["port"], connection["user"]) == (
            reach["address"],
            reach["port"],
            reach["user"],
        )
        assert connection["hostKey"] == "ssh-rsa AAAA", "what the pinned key vouched for"
        assert "PRIVATE KEY" in connection["privateKey"], "which is within the secret"


@pytest.mark.parametrize("kind", KINDS)
def test_one_identity_tells_whether_it_is_still_the_same_machine(kind: str, project: Path) -> None:
    this = planned(kind)
    identities = {document(this, command)["identity"] for command in COMMANDS} | {inputs(this, "upload")["identity"]}
    (identity,) = identities
    assert identity.startswith(fingerprint(this.one("ReachedPod").inputs["connection"]["hostKey"]))
    assert identity.endswith("0123 reached")


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_waits_for_the_one_before(kind: str, project: Path) -> None:
    this = planned(kind)
    behind = {item.name: item.after for item in this.declared}

    def all_before(name: str) -> set[str]:
        found = set(behind.get(name, ()))
        return found.union(*(all_before(one) for one in found)) if found else found

    order = ["reach", "prepare", "upload", "place", "activate"]
    for before, after in pairwise(order):
        assert f"{BASE}-{before}" in all_before(f"{BASE}-{after}")
    assert f"{BASE}-secrets" in all_before(f"{BASE}-activate")


@pytest.mark.parametrize(
    ("kind", "resource"), [("host", f"{BASE}-reach"), ("sandbox", "lora-pods-acme"), ("ec2", f"{BASE}-instance")]
)
def test_what_is_on_a_machine_goes_with_it_or_with_the_way_to_it(kind: str, resource: str, project: Path) -> None:
    this = planned(kind)
    on_it = [item for item in this.declared if item.type.split(":")[-1] in ("Command", "BundleUpload")]
    assert {item.deleted_with for item in on_it} == {resource}


@pytest.mark.parametrize("kind", KINDS)
def test_clients_are_told_where_it_answers(kind: str, project: Path) -> None:
    engine = planned(kind).engines[BASE]
    assert engine["endpoint"] == f"http://127.0.0.1:{40023 if kind == 'sandbox' else 8000}/v1"
    assert set(engine["models"]) >= {"tiny-v1", "tiny-v2"}
