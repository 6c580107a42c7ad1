"""An engine that other machines reach: what stands before it, who gets through, and how it comes and goes."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import BASE, Client, Key, host_pod
from tests.engine.test_destroy import traces
from tests.support.machines import MOST_EXPOSED, ROOT, Machine, wait_for
from tests.support.tricks import NOTHING, found_open

pytestmark = pytest.mark.pod

API_KEY = "CANARY-api-key"
VERIFY_NOTHING = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
VERIFY_NOTHING.check_hostname = False
VERIFY_NOTHING.verify_mode = ssl.CERT_NONE


def ask(machine: Machine, target: str, key: str | None = API_KEY, method: str = "GET", body: bytes = b"") -> Any:
    """One request as it is written, from another machine than the pod. -> (status, body)"""
    lines = [f"{method} {target} HTTP/1.1", "Host: pod", "Connection: close", f"Content-Length: {len(body)}"]
    lines += ["Content-Type: application/json", *([f"Authorization: Bearer {key}"] if key else [])]
    with socket.create_connection(("127.0.0.1", machine.port(8000)), timeout=20) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        return answer_of(connection)


def answer_of(connection: socket.socket) -> tuple[int, str]:
    answer = b""
    try:
        while piece := connection.recv(65536):
            answer += piece
    except ConnectionResetError:
        pass  # it had not read all that it refused
    head, _, text = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), text.decode()


def certificate(directory: Path, name: str, key: Path | None = None) -> tuple[Path, Path]:
    """A self-signed one, for a key of its own unless one is given."""
    crt, made = directory / f"{name}.crt", key or directory / f"{name}.key"
    words = ["openssl", "req", "-x509", "-subj", f"/CN={name}", "-days", "90", "-out", str(crt)]
    words += ["-key", str(made)] if key else ["-newkey", "rsa:2048", "-nodes", "-keyout", str(made)]
    subprocess.run(words, check=True, capture_output=True)
    return crt, made


def shown_certificate(machine: Machine) -> str:
    with (
        socket.create_connection(("127.0.0.1", machine.port(8000)), timeout=20) as plain,
        VERIFY_NOTHING.wrap_socket(plain) as connection,
    ):
        shown = connection.getpeercert(True)
        assert shown is not None
        return ssl.DER_cert_to_PEM_cert(shown)


def listeners(machine: Machine) -> set[str]:
    addresses = {line.split()[3] for line in machine.run("ss", "-Hltn").splitlines()}
    return {address for address in addresses if not address.endswith(":22")}


def unfinished(machine: Machine, key: str | None, sent: int) -> tuple[int, str]:
    """What is answered to a question of 16 MiB of which only so much came."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: pod\r\nConnection: close\r\nContent-Length: {16 * 1024**2}\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    with socket.create_connection(("127.0.0.1", machine.port(8000)), timeout=3) as connection:
        connection.sendall(f"{head}\r\n".encode() + b" " * sent)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += connection.recv(65536)
        return int(answer.split()[1]), answer.decode()


def flooded(machine: Machine) -> int:
    """How many of 600 requests, sent at once, are too many."""
    with socket.create_connection(("127.0.0.1", machine.port(8000)), timeout=20) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: pod\r\n\r\n" * 599)
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.count(b"HTTP/1.1 ") == 600
    return answer.count(b"HTTP/1.1 429 ")


def test_a_public_engine(client: Client, machine: Machine, key: Key, tmp_path: Path) -> None:
    before = traces(machine)
    client.pods = [host_pod(machine, listen="0.0.0.0")]
    client.configure(apiKey=API_KEY)
    run = client.stack.up()
    assert (
        "0.0.0.0:8000 has no TLS: the API key, questions and answers can be read on the way. Give engine.tls a "
        "certificate, unless only a network of your own reaches it."
    ) in " ".join(run.output.split())
    unit = client.unit
    proxy = unit.replace(".service", "-proxy.service")
    assert client.stack.outputs()["engines"][BASE]["endpoint"] == "http://127.0.0.1:8000/v1"

    # nginx came with `prepare`, and its own service neither runs nor will.
    assert listeners(machine) == {"0.0.0.0:8000", "127.0.0.1:18000"}
    assert machine.show("nginx.service", "ActiveState", "UnitFileState") == {
        "ActiveState": "inactive",
        "UnitFileState": "disabled",
    }
    assert machine.exposure(proxy) <= MOST_EXPOSED

    status, models = ask(machine, "/v1/models")
    assert (status, len(json.loads(models)["data"])) == (200, 3)
    question = json.dumps({"model": "acme-v1", "prompt": "hello"}).encode()
    status, answer = ask(machine, "/v1/completions", method="POST", body=question)
    assert (status, "model=acme-v1" in answer) == (200, True)

    for target in ("/health", "/standin/argv"):
        assert ask(machine, target) == (404, NOTHING), target
    # What vLLM reads as another path, or another request, than nginx does.
    assert list(found_open(machine.port(8000), API_KEY, "version")) == []
    for given in (None, "", "wrong", API_KEY + "x"):
        assert ask(machine, "/v1/models", key=given)[0] == 401
        assert ask(machine, "/v1/completions", key=given, method="POST", body=question)[0] == 401
    status, answer = ask(machine, "/v1/completions", method="POST", body=b" " * (32 * 1024**2 + 1))
    assert (status, json.loads(answer)["error"]["message"]) == (413, "The request is larger than 32 MiB.")

    # Who has no key is refused before a body is taken, which would lie on the pod's disk; who has it may be slow.
    for given in (None, "wrong"):
        assert unfinished(machine, given, 1)[0] == 401, given
        assert unfinished(machine, given, 8 * 1024**2)[0] == 401, given
    with pytest.raises(TimeoutError):
        unfinished(machine, API_KEY, 1)

    assert flooded(machine) > 0
    wait_for(lambda: bool(ask(machine, "/v1/models")[0] == 200))

    # The engine away: who asks is told so.
    machine.run("systemctl", "stop", unit)
    status, answer = ask(machine, "/v1/models")
    assert (status, json.loads(answer)["error"]["type"]) == (503, "ServiceUnavailableError")
    machine.run("systemctl", "start", unit)
    wait_for(lambda: bool(ask(machine, "/v1/models")[0] == 200))

    # A certificate comes: the engine is left alone, and the key to it is nowhere that others read.
    pid, proxied = machine.pid(unit), machine.pid(proxy)
    one, one_key = certificate(client.stack.checkout.root / "stacks", "one")
    client.pods = [host_pod(machine, listen="0.0.0.0", tls={"certificate": one.name})]
    client.configure(tlsKey=one_key.read_text())
    secure = client.stack.up()
    assert secure.changes == {
        f"Command {BASE}-secrets": "update",
        f"Command {BASE}-activate": "update",
    }
    assert "has no TLS" not in secure.output
    assert client.stack.outputs()["engines"][BASE]["endpoint"] == "https://127.0.0.1:8000/v1"
    assert shown_certificate(machine) == one.read_text()
    assert machine.pid(unit) == pid
    assert machine.pid(proxy) != proxied
    assert client.stack.up().changes == {}
    middle = one_key.read_text().splitlines()[5]
    assert middle in machine.run("sh", "-c", f"cat {ROOT}/secrets/*.key")
    readable = f"find {ROOT} /etc /run /tmp -type f -perm /044 -print0 | xargs -0 cat 2>/dev/null"
    readable += " | tr -cd '[:print:]\\n' || true"
    for said in (
        machine.run("journalctl", "--no-pager"),
        machine.run("sh", "-c", readable),
        json.dumps(client.stack.export()),
        secure.output,
    ):
        assert middle not in said

    # Another engine restarts behind the same proxy, with the same connections to it.
    proxied = machine.pid(proxy)
    client.add("acme-v3", seed=3)
    client.up()
    assert machine.pid(unit) != pid
    assert machine.pid(proxy) == proxied

    # The machine goes down and comes back: so does all of it, by itself.
    machine.kill()
    machine.boot()
    listed = ("curl", "-sk", "-H", f"Authorization: Bearer {API_KEY}", "https://127.0.0.1:8000/v1/models")
    wait_for(lambda: "acme-v3" in machine.run(*listed, check=False))
    ids = {model["id"] for model in json.loads(machine.run(*listed))["data"]}
    assert ids == {BASE, "acme-v1", "acme-v2", "acme-v3"}
    assert shown_certificate(machine) == one.read_text()
    assert listeners(machine) == {"0.0.0.0:8000", "127.0.0.1:18000"}
    assert client.stack.up("--refresh").changes == {}

    # Back to loopback: vLLM has its port again, and of the proxy nothing is left.
    client.pods = [host_pod(machine)]
    client.up()
    assert listeners(machine) == {"127.0.0.1:8000"}
    assert machine.run(
        "sh", "-c", f"ls {ROOT}; systemctl list-unit-files --no-legend 'lora-pods-*-proxy*' || true"
    ).split() == [
        *("bin", "blobs", "refs", "secrets", "staging", "units"),
    ]
    client.stack.destroy()
    assert traces(machine) == before
