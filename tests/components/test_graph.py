"""The resource graph. Types, names and the providers' module paths are in every stack's state: a change here is a
migration, with an alias and a line in docs/naming.md."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pulumi
import pytest

from components.bundles import AdapterBundleProvider, BundleUploadProvider
from components.core.digest_cache import DigestCache
from components.pods.reach import ReachedPodProvider
from components.pods.sandbox import SandboxContainerProvider
from components.settings import SettingsError
from tests.components.graph import Registered, register
from tests.components.test_settings import ENGINE, HOST, PRIVATE_KEY, Config
from tests.support.adapters import seeded_adapter
from tests.support.certificates import self_signed

BASE = "org/base"
# How Pulumi's protocol marks a secret value: sdk/python/lib/pulumi/runtime/rpc.py.
SECRET_SIGNATURE, SECRET_VALUE = "4dabf18193072939515e22adb298388d", "1b47061264138c4ac30d75fd1eb44270"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "Pulumi.yaml").write_text("name: lora-pods\nruntime: python\nstackConfigDir: stacks\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "stacks").mkdir()
    for name in ("v1", "v2"):
        seeded_adapter(tmp_path / "adapters" / name, seed=ord(name[1]))
    return tmp_path


def stack_file(**more: Any) -> Config:
    pods = [
        {"base": BASE, "host": HOST, "engine": ENGINE},
        {"base": "/models/tiny", "sandbox": {"volumes": {"/models": "../models"}}},
    ]
    models = [
        {"id": "acme-v1", "base": BASE, "adapter": "../adapters/v1"},
        {"id": "acme-v2", "base": BASE, "adapter": "../adapters/v2"},
        {"id": "plain", "base": BASE},
        {"id": "tiny-v1", "base": "/models/tiny", "adapter": "../adapters/v1"},
    ]
    secrets = {"sshPrivateKey": PRIVATE_KEY, "apiKey": "CANARY-API", "hfToken": "CANARY-HF"}
    return Config({"pods": pods, "models": models, **secrets, **more})


def one(registered: list[Registered], name: str) -> Mapping[str, Any]:
    (found,) = [item for item in registered if item.name == name]
    return found.inputs


def test_types_and_names(project: Path) -> None:
    registered, _ = register(stack_file())
    assert [(item.type, item.name) for item in registered] == [
        ("command:remote:Command", "/models/tiny-activate"),
        ("command:remote:Command", "/models/tiny-place"),
        ("command:remote:Command", "/models/tiny-prepare"),
        ("command:remote:Command", "/models/tiny-secrets"),
        ("command:remote:Command", "org/base-activate"),
        ("command:remote:Command", "org/base-place"),
        ("command:remote:Command", "org/base-prepare"),
        ("command:remote:Command", "org/base-secrets"),
        ("lora-pods:index:Deployment", "lora-pods"),
        ("lora-pods:index:GpuPod", "/models/tiny"),
        ("lora-pods:index:GpuPod", "org/base"),
        ("lora-pods:index:PlacedBundles", "/models/tiny"),
        ("lora-pods:index:PlacedBundles", "org/base"),
        ("lora-pods:index:VllmEngine", "/models/tiny"),
        ("lora-pods:index:VllmEngine", "org/base"),
        ("pulumi-python:dynamic/lora-pods:AdapterBundle", "acme-v1"),
        ("pulumi-python:dynamic/lora-pods:AdapterBundle", "acme-v2"),
        ("pulumi-python:dynamic/lora-pods:AdapterBundle", "tiny-v1"),
        ("pulumi-python:dynamic/lora-pods:BundleUpload", "/models/tiny-upload"),
        ("pulumi-python:dynamic/lora-pods:BundleUpload", "org/base-upload"),
        ("pulumi-python:dynamic/lora-pods:ReachedPod", "/models/tiny-reach"),
        ("pulumi-python:dynamic/lora-pods:ReachedPod", "org/base-reach"),
        ("pulumi-python:dynamic/lora-pods:SandboxContainer", "lora-pods-acme"),
    ]


def test_providers_are_found_by_module_and_name() -> None:
    kinds = (AdapterBundleProvider, BundleUploadProvider, ReachedPodProvider, SandboxContainerProvider)
    assert [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds] == [
        "components.bundles.AdapterBundleProvider",
        "components.bundles.BundleUploadProvider",
        "components.pods.reach.ReachedPodProvider",
        "components.pods.sandbox.SandboxContainerProvider",
    ]


def test_order_in_the_file_means_nothing(project: Path) -> None:
    turned = stack_file()
    turned["pods"] = turned["pods"][::-1]
    turned["models"] = turned["models"][::-1]
    assert register(stack_file()) == register(turned)


def test_what_a_pod_is_told(project: Path) -> None:
    registered, exported = register(stack_file())
    digests = {f"acme-{name}": DigestCache().describe(project / "adapters" / name).digest for name in ("v1", "v2")}
    place = one(registered, f"{BASE}-place")
    assert json.loads(place["stdin"])["models"] == digests
    assert json.loads(place["stdin"])["stack"] == "acme"
    podctl = place["create"].split()[1]
    assert place["create"] == f"python3 {podctl} place"
    assert place["delete"] == (
        f"if [ -e {podctl} ]; then python3 {podctl} unplace --stack acme --base org/base; else cat >/dev/null; fi"
    )
    assert one(registered, f"{BASE}-upload")["bundles"] == digests
    activate = json.loads(one(registered, f"{BASE}-activate")["stdin"])
    blobs = {model: f"/var/lib/lora-pods/blobs/sha256/{digest[7:]}" for model, digest in digests.items()}
    assert activate["ready"]["models"] == {BASE: BASE, "plain": BASE, **blobs}
    assert activate["secretsRevision"] == 1
    assert exported["engines"][BASE] == {
        "endpoint": "http://127.0.0.1:8000/v1",
        "unit": activate["unit"]["name"],
        "unitSha256": hashlib.sha256(activate["unit"]["text"].encode()).hexdigest(),
        "secretsRevision": 1,
        "models": {BASE: None, "plain": None, **digests},
        "flags": {"max-loras": "2", "max-lora-rank": "8", "max-cpu-loras": "2"},
    }


def test_any_host_key_is_accepted_only_where_that_is_said(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(pulumi.log, "warn", lambda text, *_, **__: warned.append(text))
    register(stack_file())
    assert [text for text in warned if "host key" in text] == []

    host = {"address": "10.0.0.7", "insecureHostKey": True}
    registered, _ = register(stack_file(pods=[{"base": BASE, "host": host, "engine": ENGINE}], models=[]))
    assert [text for text in warned if "host key" in text] == [
        "10.0.0.7: insecureHostKey accepts any host key, so whoever answers there is sent the engine's secrets and the "
        "adapters; set hostKey to what the machine says of itself."
    ]
    assert one(registered, f"{BASE}-reach")["connection"]["hostKey"] == ""
    connection = one(registered, f"{BASE}-activate")["connection"]["value"]
    assert "hostKey" not in connection


def test_a_user_who_is_not_root_goes_through_sudo(project: Path) -> None:
    pods = [{"base": BASE, "host": {**HOST, "user": "ops"}, "engine": ENGINE}]
    registered, _ = register(stack_file(pods=pods, models=[]))
    assert one(registered, f"{BASE}-prepare")["create"].startswith("sudo -n sh -c '")
    for verb in ("place", "secrets", "activate"):
        assert one(registered, f"{BASE}-{verb}")["create"].startswith("sudo -n python3 /var/lib/lora-pods/bin/podctl-")


def test_secrets_are_where_they_belong_only(project: Path) -> None:
    registered, exported = register(stack_file())
    for item in registered:
        inputs = dict(item.inputs)
        if item.type == "command:remote:Command":
            assert inputs["addPreviousOutputInEnv"] is False
            assert "environment" not in inputs
            assert "triggers" not in inputs
            connection = inputs.pop("connection")
            assert connection[SECRET_SIGNATURE] == SECRET_VALUE, "the private key is encrypted in the state"
        if item.name.endswith("-secrets"):
            stdin = inputs.pop("stdin")
            assert stdin[SECRET_SIGNATURE] == SECRET_VALUE, "the secrets' document is encrypted in the state"
            assert "CANARY-API" in stdin["value"]
            assert inputs["logging"] == "none"
        assert "CANARY" not in json.dumps(inputs)
        assert PRIVATE_KEY.splitlines()[1] not in json.dumps(inputs)
    assert "CANARY" not in json.dumps(exported)


def test_no_path_of_this_machine_is_recorded(project: Path) -> None:
    registered, _ = register(stack_file())
    assert str(project) not in json.dumps([item.inputs for item in registered])


def test_what_systemd_could_not_pass_on_is_a_fault_of_the_stack_file(project: Path) -> None:
    pods = [{"base": BASE, "host": HOST, "engine": {**ENGINE, "args": {"chatTemplate": "a\nb"}}}]
    with pytest.raises(SettingsError) as caught:
        register(stack_file(pods=pods, models=[]))
    (fault,) = caught.value.faults
    assert fault.startswith("pods[0].engine: ")


@pytest.mark.parametrize(
    ("address", "listen", "endpoint", "vllm", "proxy"),
    [
        ("10.0.0.7", "::1", "http://127.0.0.1:8000/v1", "http://[::1]:8000", None),
        ("10.0.0.7", "0.0.0.0", "http://10.0.0.7:8000/v1", "http://127.0.0.1:18000", "http://127.0.0.1:8000"),
        ("2001:db8::7", "::", "http://[2001:db8::7]:8000/v1", "http://127.0.0.1:18000", "http://[::1]:8000"),
        ("pod.example", "10.1.2.3", "http://pod.example:8000/v1", "http://127.0.0.1:18000", "http://10.1.2.3:8000"),
    ],
)
def test_where_an_engine_is_reached(
    project: Path, address: str, listen: str, endpoint: str, vllm: str, proxy: str | None
) -> None:
    pods = [{"base": BASE, "host": {**HOST, "address": address}, "engine": {**ENGINE, "listen": listen}}]
    registered, exported = register(stack_file(pods=pods, models=[]))
    assert exported["engines"][BASE]["endpoint"] == endpoint
    activate = json.loads(one(registered, f"{BASE}-activate")["stdin"])
    assert activate["ready"]["url"] == vllm
    assert (activate.get("proxy") or {}).get("url") == proxy
    prepare = json.loads(one(registered, f"{BASE}-prepare")["stdin"])
    assert prepare["needs"].get("proxy") == (True if proxy else None)


@pytest.mark.parametrize(
    ("engine", "gpus"),
    [
        ({}, None),
        ({"args": {"tensorParallelSize": 4}}, 4),
        ({"args": {"tensorParallelSize": 4}, "device": "cpu"}, None),
    ],
)
def test_a_base_on_several_gpus_asks_its_pod_for_them(project: Path, engine: dict[str, Any], gpus: int | None) -> None:
    registered, _ = register(stack_file(pods=[{"base": BASE, "host": HOST, "engine": {**ENGINE, **engine}}], models=[]))
    assert json.loads(one(registered, f"{BASE}-prepare")["stdin"])["needs"].get("gpus") == gpus


@pytest.mark.parametrize(
    ("engine", "release"),
    [
        ({"python": "/opt/vllm/bin/python"}, "0.18.0"),
        ({"python": "/opt/vllm/bin/python", "args": {"shutdownTimeout": 0}}, None),
        ({"python": "/opt/vllm/bin/python", "args": {"shutdown_timeout": 5}}, "0.18.0"),
        ({"vllm": {"version": "0.11.0"}}, None),
    ],
)
def test_the_pod_says_whether_an_interpreters_vllm_knows_the_flags(
    project: Path, engine: dict[str, Any], release: str | None
) -> None:
    """Of `engine.vllm` the program knows it."""
    registered, _ = register(stack_file(pods=[{"base": BASE, "host": HOST, "engine": engine}], models=[]))
    assert json.loads(one(registered, f"{BASE}-prepare")["stdin"])["needs"].get("vllmAtLeast") == release


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(pulumi.log, "warn", lambda text, **_: told.append(text))
    return told


def test_a_public_engine_stands_behind_a_proxy(project: Path, warned: list[str]) -> None:
    pods = [{"base": BASE, "host": HOST, "engine": {**ENGINE, "listen": "0.0.0.0"}}]
    registered, _ = register(stack_file(pods=pods, models=[]))
    activate = json.loads(one(registered, f"{BASE}-activate")["stdin"])
    unit = activate["unit"]["name"].removesuffix(".service")
    assert activate["port"] == 18000
    assert " --host 127.0.0.1" in activate["unit"]["text"]
    assert " --port 18000" in activate["unit"]["text"]
    assert activate["proxy"]["unit"]["name"] == f"{unit}-proxy.service"
    assert (activate["proxy"]["port"], activate["proxy"]["certificate"]) == (8000, None)
    assert "listen 0.0.0.0:8000;" in activate["proxy"]["config"]
    assert warned == [
        "0.0.0.0:8000 has no TLS: the API key, questions and answers can be read on the way. Give engine.tls a "
        "certificate, unless only a network of your own reaches it."
    ]


def test_a_certificate_goes_along_and_its_key_apart(project: Path, warned: list[str]) -> None:
    certificate, key = self_signed("acme")
    (project / "stacks" / "acme.pem").write_text("whatever stands before it\n" + certificate)
    engine = {**ENGINE, "listen": "0.0.0.0", "port": 443, "tls": {"certificate": "acme.pem"}}
    pods = [{"base": BASE, "host": HOST, "engine": engine}]
    registered, exported = register(stack_file(pods=pods, models=[], tlsKey=key))
    assert exported["engines"][BASE]["endpoint"] == "https://10.0.0.7:443/v1"
    proxy = json.loads(one(registered, f"{BASE}-activate")["stdin"])["proxy"]
    assert (proxy["certificate"], proxy["url"]) == (certificate, "https://127.0.0.1:443")
    assert warned == []
    secrets = one(registered, f"{BASE}-secrets")["stdin"]
    assert secrets[SECRET_SIGNATURE] == SECRET_VALUE
    tls = json.loads(secrets["value"])["tls"]
    assert tls["key"] == key
    assert f"-{tls['name']}.key " in proxy["unit"]["text"]
    for item in registered:
        inputs = {name: value for name, value in item.inputs.items() if not item.name.endswith("-secrets")}
        assert key.splitlines()[1] not in json.dumps(inputs)


def test_faults_of_a_certificate_are_told_with_the_others(project: Path) -> None:
    (project / "stacks" / "acme.pem").write_text(self_signed("acme")[0])
    engine = {**ENGINE, "listen": "0.0.0.0", "args": {"chatTemplate": "a\nb"}, "tls": {"certificate": "acme.pem"}}
    pods = [{"base": BASE, "host": HOST, "engine": engine}]
    with pytest.raises(SettingsError) as caught:
        register(stack_file(pods=pods, models=[], tlsKey=self_signed("other")[1]))
    assert caught.value.faults[0] == (
        "pods[0].engine: tls.certificate: acme.pem: belongs to another key than lora-pods:tlsKey; its own certificate "
        "must come first"
    )
    assert caught.value.faults[1].startswith("pods[0].engine: engine.args: chat-template ")


def test_another_ready_timeout_restarts_nothing(project: Path) -> None:
    """It is podctl's to wait with: the unit's text, a change of which restarts, has nothing of it."""
    documents = []
    for seconds in (600, 3600):
        pods = [{"base": BASE, "host": HOST, "engine": {**ENGINE, "readyTimeoutSeconds": seconds}}]
        registered, _ = register(stack_file(pods=pods, models=[]))
        documents.append(json.loads(one(registered, f"{BASE}-activate")["stdin"]))
    assert [document["ready"]["timeoutSeconds"] for document in documents] == [600, 3600]
    assert documents[0]["unit"] == documents[1]["unit"]
