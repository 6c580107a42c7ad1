"""The stack file: what is accepted, and every fault at once, each with its path."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from components.core.errors import UserError
from components.settings import SettingsError, load

HOST_KEY = "ssh-ed25519 " + base64.b64encode(b"\0\0\0\x0bssh-ed25519\0\0\0\x20" + bytes(32)).decode()
PRIVATE_KEY = (
    "-----BEGIN OPENSSH PRIVATE KEY-----\n"
    + base64.b64encode(b"openssh-key-v1\0\0\0\0\x04none\0\0\0\x04none" + bytes(40)).decode()
    + "\n-----END OPENSSH PRIVATE KEY-----\n"
)
HOST = {"address": "10.0.0.7", "hostKey": HOST_KEY}
ENGINE = {"python": "/opt/vllm/bin/python"}
POD = {"base": "org/base", "host": HOST, "engine": ENGINE}
MODEL = {"id": "acme-v1", "base": "org/base", "adapter": "../adapters/acme"}


class Config(dict[str, Any]):
    """Configuration as Pulumi hands it over: nested values as JSON text."""

    def get(self, key: str, default: Any = None) -> Any:
        value = super().get(key, default)
        return value if value is None or isinstance(value, str) else json.dumps(value)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "Pulumi.yaml").write_text("name: lora-pods\nruntime: python\nstackConfigDir: stacks\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return tmp_path


def faults(**config: Any) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(Config({"sshPrivateKey": PRIVATE_KEY, **config}))
    return list(caught.value.faults)


@pytest.mark.parametrize(
    ("engine", "fault"),
    [
        ({"args": None}, ".args: is empty: give it a value"),
        ({"args": ["--max-num-seqs"]}, ".args: must be a mapping of keys to values; it is a list"),
        ({"maxModelLen": {}}, ".maxModelLen: must be a whole number; it is a mapping"),
        ({"vllm": "0.33.0"}, '.vllm: must be a mapping of keys to values; it is "0.33.0"'),
        (
            {"vllm": {"version": 0.33}},
            ".vllm.version: must be a text (YAML takes what is not in quotes for a number, or true or false, where it "
            "can); it is 0.33",
        ),
        ({"maxLoras": 1.5}, ".maxLoras: must be a whole number; it is 1.5"),
        ({"maxLoras": "3"}, '.maxLoras: must be a whole number; it is "3"'),
        (
            {"tensorParallelSize": 2},
            ".tensorParallelSize: unknown key; vLLM's own flags stand under args; known here: args, device, diskGiB, "
            "dtype, env, gpuMemoryGiB, gpuMemoryUtilization, listen, maxCpuLoras, maxLoraRank, maxLoras, maxModelLen, "
            "port, probe, python, readyTimeoutSeconds, tls, vllm",
        ),
        ({"device": "tpu"}, ".device: must be 'gpu' or 'cpu'; it is a text"),
        # What may be a secret in the wrong place is not shown.
        ({"maxLoras": "hf_secret"}, ".maxLoras: must be a whole number; it is a text"),
        ({"env": ["AWS_SECRET_ACCESS_KEY=x"]}, ".env: must be a mapping of keys to values"),
        (
            {"env": {"PIN": 123456}},
            ".env.PIN: must be a text (YAML takes what is not in quotes for a number, or true or false, where it can)",
        ),
        (
            {"apiKey": "secret"},
            ".apiKey: unknown key; it is a secret of the stack: `pulumi config set --secret apiKey`; known here: args, "
            "device, diskGiB, dtype, env, gpuMemoryGiB, gpuMemoryUtilization, listen, maxCpuLoras, maxLoraRank, "
            "maxLoras, maxModelLen, port, probe, python, readyTimeoutSeconds, tls, vllm",
        ),
    ],
)
def test_a_value_of_another_kind_is_shown_beside_what_is_wanted(engine: dict[str, Any], fault: str) -> None:
    assert faults(pods=[{**POD, "engine": {**ENGINE, **engine}}], models=[MODEL]) == [f"pods[0].engine{fault}"]


def test_an_unknown_key_that_is_the_name_of_a_type() -> None:
    (fault,) = faults(pods=[{**POD, "str": 1}], models=[MODEL])
    assert fault.startswith("pods[0].str: unknown key; known here: ")


def test_a_good_file(project: Path) -> None:
    settings = load(Config(pods=[POD], models=[MODEL], sshPrivateKey=PRIVATE_KEY))
    assert settings.pods[0].host is not None
    assert settings.pods[0].host.port == 22
    assert settings.pods[0].python == "/opt/vllm/bin/python"
    assert settings.pods[0].device == "gpu"
    assert settings.adapter_directory(settings.models[0]) == project / "stacks" / "../adapters/acme"


def test_every_fault_is_told_at_once_each_with_its_path() -> None:
    pods = [
        POD,
        {"base": "org/base", "host": {**HOST, "address": "10.0.0.8"}, "engine": ENGINE},
        {"base": "org/other", "host": HOST, "engine": {**ENGINE, "listen": "0.0.0.0"}},
        {"base": "x", "host": {"address": "a b"}, "engine": {"prot": 1, "port": "8000"}},
        {"base": "y", "host": HOST, "sandbox": {}},
    ]
    models = [
        MODEL,
        MODEL,
        {"id": "org/base", "base": "org/base"},
        {"id": "lost", "base": "org/absent"},
        {"id": "a", "base": "org/base", "adaptor": "x"},
    ]
    assert faults(pods=pods, models=models) == [
        "pods[1].base: org/base has a pod already (pods[0]); one pod serves every model of a base",
        "pods[2].engine.port: 8000 on 10.0.0.7 is taken by pods[0]; give each engine of a machine its own port",
        "pods[2].engine.listen: 0.0.0.0 lets in whoever reaches the machine; set a key for clients first: "
        "`pulumi config set --secret apiKey …`",
        "pods[3].host.address: must be a host name or an IP address, nothing else "
        "(the user and the port have their own keys)",
        "pods[3].host.hostKey: is missing",
        'pods[3].engine.port: must be a whole number; it is "8000"',
        "pods[3].engine.prot: unknown key; did you mean port? known here: args, device, diskGiB, dtype, env, "
        "gpuMemoryGiB, gpuMemoryUtilization, listen, maxCpuLoras, maxLoraRank, maxLoras, maxModelLen, port, probe, "
        "python, readyTimeoutSeconds, tls, vllm",
        "pods[4]: give exactly one kind of pod: `host: {address: …, hostKey: …}`, `sandbox: {}` or `ec2: {…}`",
        "models[1].id: acme-v1 is also models[0]; each id names one model",
        "models[2].id: 'org/base' cannot be used; an id has 1 to 96 letters, digits, dots, dashes and underscores, and "
        "begins with a letter or a digit",
        "models[2].id: org/base is the name a base is served under; choose another id",
        "models[3].base: no pod serves org/absent; pods serve org/base, org/other, x, y",
        "models[4].adaptor: unknown key; did you mean adapter? known here: adapter, base, id, mayEqualBase",
    ]


@pytest.mark.parametrize("model_id", ["", "run=3", "a,b", "two words", "ünïcode", "x" * 97, "-a", "a\nb", ".a", "a/b"])
def test_ids_that_cannot_be_used(model_id: str) -> None:
    (fault,) = faults(pods=[POD], models=[{**MODEL, "id": model_id}])
    assert fault.startswith("models[0].id: ")
    assert "cannot be used" in fault
    assert "\n" not in fault


@pytest.mark.parametrize("model_id", ["a", "0", "A.b_c-d", "x" * 96])
def test_ids_that_can(model_id: str) -> None:
    assert (
        load(Config(pods=[POD], models=[{**MODEL, "id": model_id}], sshPrivateKey=PRIVATE_KEY)).models[0].id == model_id
    )


@pytest.mark.parametrize("models", ["[a", "acme", {"id": "a"}, ["acme"]])
def test_models_of_another_shape(models: Any) -> None:
    (fault,) = faults(pods=[POD], models=models)
    assert fault in ("models: must be a list of mappings", "models[0]: must be a mapping")


def test_pods_of_another_shape() -> None:
    assert faults(pods="[a") == ["pods: must be a list of mappings"]


def test_no_pods() -> None:
    assert faults() == ["pods: at least one is needed (a base model and the machine that serves it)"]


def test_a_host_needs_a_key_and_a_vllm() -> None:
    with pytest.raises(SettingsError) as caught:
        load(Config(pods=[POD, {"base": "b", "host": {**HOST, "address": "other"}}]))
    assert list(caught.value.faults) == [
        "pods[0].host: needs the key that opens it: `pulumi config set --secret sshPrivateKey < ~/.ssh/id_ed25519`",
        "pods[1]: say which vLLM the host runs: `engine: {vllm: {version: …}}` installs one, "
        "`engine: {python: /…/bin/python}` names an interpreter that has it",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ssh-ed25519 AAAAC3Nza user@host", "this is a public key"),
        ("~/.ssh/id_ed25519", "this is a path, not a key"),
        ("hunter2-hunter2", "no private key"),
        (PRIVATE_KEY.replace("-----END OPENSSH PRIVATE KEY-----\n", ""), "cut off"),
        (
            "-----BEGIN OPENSSH PRIVATE KEY-----\n"
            + base64.b64encode(b"openssh-key-v1\0\0\0\0\x0aaes256-ctr" + bytes(40)).decode()
            + "\n-----END OPENSSH PRIVATE KEY-----\n",
            "protected by a passphrase",
        ),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\nAAAA\n-----END RSA PRIVATE KEY-----",
            "passphrase",
        ),
    ],
)
def test_private_keys_that_are_none(text: str, said: str) -> None:
    (fault,) = faults(pods=[POD], sshPrivateKey=text)
    assert fault.startswith("sshPrivateKey: ")
    assert said in fault
    assert "AAAA" not in fault
    assert "hunter2" not in fault


def test_a_private_key_with_foreign_line_ends_and_without_the_last_one() -> None:
    pasted = PRIVATE_KEY.replace("\n", "\r\n").rstrip()
    assert load(Config(pods=[POD], sshPrivateKey=pasted)).ssh_private_key == PRIVATE_KEY


def test_real_keys_of_ssh_keygen(tmp_path: Path) -> None:
    for name, options in {"plain": ["-N", ""], "locked": ["-N", "secret"]}.items():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", *options, "-f", str(tmp_path / name)], check=True)
    load(Config(pods=[POD], sshPrivateKey=(tmp_path / "plain").read_text()))
    assert "passphrase" in faults(pods=[POD], sshPrivateKey=(tmp_path / "locked").read_text())[0]


@pytest.mark.parametrize(
    "pasted", [f"10.0.0.7 {HOST_KEY}", f"{HOST_KEY} root@pod", f"# 10.0.0.7:22 SSH-2.0\n{HOST_KEY}"]
)
def test_a_host_key_as_tools_print_it(pasted: str) -> None:
    settings = load(Config(pods=[{**POD, "host": {**HOST, "hostKey": pasted}}], sshPrivateKey=PRIVATE_KEY))
    assert settings.pods[0].host is not None
    assert settings.pods[0].host.host_key == HOST_KEY


def test_any_host_key_takes_a_word_of_its_own() -> None:
    def host(**more: Any) -> dict[str, Any]:
        return {"pods": [{**POD, "host": {"address": "10.0.0.7", **more}}]}

    loaded = load(Config(**host(insecureHostKey=True), sshPrivateKey=PRIVATE_KEY)).pods[0].host
    assert loaded is not None
    assert (loaded.insecure_host_key, loaded.host_key) == (True, "")
    assert faults(**host(insecureHostKey=False)) == ["pods[0].host.hostKey: is missing"]
    assert faults(**host(hostKey=HOST_KEY, insecureHostKey=True)) == [
        "pods[0].host: give `hostKey`, or `insecureHostKey: true`, not both"
    ]
    (fault,) = faults(**host(hostKey=""))
    assert fault.startswith("pods[0].host.hostKey: one key is wanted")
    assert len(faults(**host(insecureHostKey="yes"))) == 2


@pytest.mark.parametrize(
    "pasted", ["", "SHA256:abc", "ssh-ed25519 AAAA", f"{HOST_KEY}\n{HOST_KEY}", "ssh-ed25519 !!!!"]
)
def test_a_host_key_that_is_none(pasted: str) -> None:
    (fault,) = faults(pods=[{**POD, "host": {**HOST, "hostKey": pasted}}])
    assert fault.startswith("pods[0].host.hostKey: ")


def test_a_dead_agent_socket_is_told_before_the_plugin_fails_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/nowhere/agent.1")
    (fault,) = faults(pods=[POD])
    assert fault.startswith("SSH_AUTH_SOCK names a socket that is not there")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/" + "x" * 300)
    assert faults(pods=[POD]) == [fault]


def test_half_a_character_is_told_before_a_file_is_looked_for() -> None:
    told = faults(pods=[{**POD, "baseConfig": "\ud800"}], models=[{**MODEL, "adapter": "a\udc80"}])
    assert [fault.partition(":")[0] for fault in told] == ["pods[0].baseConfig", "models[0].adapter"]
    assert all("holds half of a character" in fault for fault in told)


def test_secrets_are_in_no_fault() -> None:
    told = faults(pods=[{**POD, "base": ""}], sshPrivateKey="CANARY-1", apiKey="CANARY\n2", hfToken="CANARY\x003")
    assert "CANARY" not in "\n".join(told)
    assert [fault.split(":")[0] for fault in told] == ["pods[0].base", "sshPrivateKey", "apiKey", "hfToken"]


def test_outside_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    with pytest.raises(UserError, match=r"no Pulumi\.yaml in / or above it"):
        load(Config(pods=[POD], sshPrivateKey=PRIVATE_KEY))


def test_a_pod_with_a_fault_is_not_taken_for_absent() -> None:
    pods = [{**POD, "engine": {**ENGINE, "prot": 1}}]
    (fault,) = faults(pods=pods, models=[MODEL, {**MODEL, "id": "acme-v2"}])
    assert fault.startswith("pods[0].engine.prot: unknown key")


def test_a_thousand_faults_are_told_as_a_hundred_and_how_many_more() -> None:
    lines = str(SettingsError([f"models[{n}].id: x" for n in range(1000)], ["a doubt"])).splitlines()
    assert lines[0] == "the stack has 1000 faults; nothing was touched:"
    assert (lines[1], lines[100], lines[101:]) == ("  models[0].id: x", "  models[99].id: x", ["  and 901 more"])


EC2 = {"instanceType": "g6e.xlarge", "region": "eu-central-1", "sshCidr": "203.0.113.7/32", "volumeGiB": 200}
EC2_POD: dict[str, Any] = {"base": "org/base", "ec2": EC2, "engine": {"vllm": {"version": "0.33.0"}}}


def test_an_ec2_pod_that_says_no_more_than_it_must() -> None:
    ec2 = load(Config(pods=[EC2_POD], sshPrivateKey=PRIVATE_KEY)).pods[0].ec2
    assert ec2 is not None
    assert ec2.model_dump() == {
        "instance_type": "g6e.xlarge",
        "region": "eu-central-1",
        "ssh_cidr": "203.0.113.7/32",
        "volume_gi_b": 200,
        "engine_cidr": None,
        "subnet_id": None,
        "ami": None,
        "user": "ubuntu",
        "spot": False,
        "public_ip": True,
        "profile": None,
    }


def test_what_an_ec2_pod_may_not_say() -> None:
    wrong = {
        "instanceType": "large",
        "region": "Frankfurt",
        "sshCidr": "203.0.113.7/24",
        "volumeGiB": 1,
        "subnetId": "vpc-0123456789abcdef0",
        "ami": "ubuntu",
        "zone": "a",
    }
    assert faults(pods=[{**EC2_POD, "ec2": wrong}, {**EC2_POD, "base": "b", "engine": {}}]) == [
        "pods[0].ec2.instanceType: must be an instance type as AWS writes it, such as g6e.xlarge",
        "pods[0].ec2.region: must be a region's name as AWS writes it, such as eu-central-1",
        "pods[0].ec2.sshCidr: must be an IPv4 network such as 203.0.113.7/32 (one address) or 10.0.0.0/8, without bits "
        "beyond its prefix",
        "pods[0].ec2.volumeGiB: must be greater than or equal to 8; it is 1",
        "pods[0].ec2.subnetId: must be an id as AWS writes it: subnet-0123456789abcdef0",
        "pods[0].ec2.ami: must be an id as AWS writes it: ami-0123456789abcdef0",
        "pods[0].ec2.zone: unknown key; known here: ami, engineCidr, instanceType, profile, publicIp, region, spot, "
        "sshCidr, subnetId, user, volumeGiB",
        "pods[1]: say which vLLM the instance runs: `engine: {vllm: {version: …}}` installs one, "
        "`engine: {python: /…/bin/python}` names an interpreter that has it",
    ]


def test_an_ec2_pod_needs_a_key_and_no_port_that_leads_nowhere() -> None:
    open_to = {**EC2_POD, "ec2": {**EC2, "engineCidr": "10.0.0.0/8"}}
    with pytest.raises(SettingsError) as caught:
        load(Config(pods=[open_to]))
    assert list(caught.value.faults) == [
        "pods[0].ec2: needs the key that opens it: `pulumi config set --secret sshPrivateKey < ~/.ssh/id_ed25519`",
        "pods[0].ec2.engineCidr: opens a port at which nothing listens; let the engine listen there as well: "
        "`engine: {listen: 0.0.0.0}`",
    ]
    assert faults(pods=[{**EC2_POD, "ec2": {**EC2, "publicIp": False}}]) == [
        "pods[0].ec2: publicIp: false needs a `subnetId` that this machine reaches, and that leads to the internet by "
        "a NAT gateway"
    ]
    listening = {**open_to, "engine": {**EC2_POD["engine"], "listen": "0.0.0.0"}}
    assert faults(pods=[listening]) == [
        "pods[0].engine.listen: 0.0.0.0 lets in whoever reaches the machine; set a key for clients first: "
        "`pulumi config set --secret apiKey …`"
    ]


def test_a_store_and_whether_machines_are_on() -> None:
    plain = load(Config(pods=[POD], sshPrivateKey=PRIVATE_KEY))
    assert (plain.store, plain.running) == (None, True)
    given = load(Config(pods=[POD], sshPrivateKey=PRIVATE_KEY, store="s3://bucket/team", running="false"))
    assert (given.store and given.store.place, given.running) == ("s3://bucket/team", False)
    assert faults(pods=[POD], store="bucket", running="off") == [
        "store: must be s3://BUCKET/PREFIX, and may end with ?region=…&endpoint=…&profile=…",
        "running: must be true or false",
    ]


def test_a_public_engine_takes_two_ports() -> None:
    public = {**ENGINE, "listen": "0.0.0.0"}
    other = {"base": "org/other", "host": HOST}
    assert faults(
        pods=[{**POD, "engine": public}, {**other, "engine": {**ENGINE, "port": 18000}}],
        apiKey="key",
    ) == ["pods[1].engine.port: 18000 on 10.0.0.7 is taken by pods[0]; give each engine of a machine its own port"]
    assert faults(
        pods=[{**POD, "engine": {**ENGINE, "port": 18000}}, {**other, "engine": public}],
        apiKey="key",
    ) == [
        "pods[1].engine.port: 8000, and vLLM's own beside it (18000) on 10.0.0.7 is taken by pods[0]; give each engine "
        "of a machine its own port"
    ]
    settings = load(
        Config(
            pods=[{**POD, "engine": {**public, "port": 60000}}, {**other, "engine": ENGINE}],
            sshPrivateKey=PRIVATE_KEY,
            apiKey="key",
        )
    )
    assert [(pod.proxied, pod.vllm_listen, pod.ports) for pod in settings.pods] == [
        (True, "127.0.0.1", (60000, 50000)),
        (False, "127.0.0.1", (8000,)),
    ]


def test_a_sandbox_needs_no_proxy() -> None:
    (pod,) = load(Config(pods=[{"base": "org/base", "sandbox": {}}])).pods
    assert (pod.proxied, pod.vllm_listen, pod.ports) == (False, "0.0.0.0", (8000,))


def test_a_certificate_is_for_a_public_engine_and_needs_its_key() -> None:
    tls = {"tls": {"certificate": "acme.pem"}}
    pods = [
        {**POD, "engine": {**ENGINE, **tls}},
        {"base": "org/s", "sandbox": {}, "engine": tls},
        {"base": "org/o", "host": {**HOST, "address": "10.0.0.8"}, "engine": {**ENGINE, **tls, "listen": "10.0.0.8"}},
    ]
    assert faults(pods=pods, apiKey="key") == [
        "pods[0].engine.tls: is for an engine that other machines reach; give `listen`, too, or leave it out",
        "pods[1].engine.tls: is for an engine that other machines reach; a sandbox's port is this machine's own",
        "pods[2].engine.tls: needs the key of its certificate: `pulumi config set --secret tlsKey < privkey.pem`",
    ]
    assert faults(pods=[POD], tlsKey="~/privkey.pem") == [
        "tlsKey: no private key in PEM; store the file's text: `pulumi config set --secret tlsKey < privkey.pem`"
    ]
