"""What stands before an engine that other machines reach: it comes, is proven and goes with its engine."""

from __future__ import annotations

import errno
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from components.on_pod.podctl import files, proof, proxy, secret_files
from components.on_pod.podctl.store import Store
from tests.support.certificates import self_signed
from tests.unit.podctl.engines import ENGINE, UNIT, Engine
from tests.unit.podctl.fake_systemd import FakeSystemd, free_port
from tests.unit.podctl.pods import Answer, PodDirectory, mode

PROXY = "lora-pods-prod-base-1-proxy.service"
KEY = "sesame"
START_ENGINE = [f"enable --no-reload {UNIT}", "daemon-reload", f"reset-failed {UNIT}", f"restart {UNIT}"]
START_PROXY = [f"enable --no-reload {PROXY}", "daemon-reload", f"reset-failed {PROXY}", f"restart {PROXY}"]
REMOVE_PROXY = [f"disable --now {PROXY}", f"reset-failed {PROXY}", "daemon-reload"]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "PROXY_SECONDS", 0.3)


@pytest.fixture
def public(engine: Engine, pod: PodDirectory) -> Public:
    pod.run("secrets", stdin={"engine": ENGINE, "secrets": {"VLLM_API_KEY": KEY}})
    return Public(engine, pod, free_port())


class Public:
    """An engine with a proxy before it; keyword arguments go into the proxy's unit (see fake_systemd)."""

    def __init__(self, engine: Engine, pod: PodDirectory, port: int) -> None:
        self.engine, self.pod, self.port = engine, pod, port

    def document(self, config: str = "one", does: dict[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
        document = self.engine.document(**{"key": KEY, **engine})
        served = {"serve": {"m1": None}, "key": KEY, "port": self.port, **(does or {})}
        return {
            **document,
            "proxy": {
                "unit": {"name": PROXY, "text": f"# fake: {json.dumps(served)}\n"},
                "config": config,
                "certificate": None,
                "port": self.port,
                "url": f"http://127.0.0.1:{self.port}",
            },
        }

    def activate(self, config: str = "one", does: dict[str, Any] | None = None, **engine: Any) -> Answer:
        return self.pod.run("activate", stdin=self.document(config, does, **engine))

    @property
    def config(self) -> str | None:
        path = self.pod.root / "proxies" / f"{ENGINE}.conf"
        return path.read_text() if path.exists() else None


def test_it_comes_after_its_engine_and_is_left_alone(public: Public, systemd: FakeSystemd) -> None:
    assert public.activate().status == 0
    assert systemd.calls == START_ENGINE + START_PROXY
    assert public.config == "one"
    systemd.calls.clear()
    assert public.activate().result["restarted"] is False
    assert systemd.calls == []

    # Another engine starts behind it.
    assert public.activate(says=["another"]).result["restarted"] is True
    assert systemd.calls == START_ENGINE


def test_its_own_change_leaves_the_engine_alone(public: Public, systemd: FakeSystemd) -> None:
    public.activate()
    systemd.calls.clear()
    assert public.activate("two").result["restarted"] is False
    assert systemd.calls == START_PROXY
    assert public.config == "two"
    # Gone by hand, and there again.
    systemd.calls.clear()
    systemd.run("systemctl", "--no-pager", "disable", "--now", PROXY)
    assert public.activate("two").status == 0
    assert systemd.calls[1:] == START_PROXY


def test_an_nginx_that_is_gone(public: Public) -> None:
    public.activate()
    failed = public.activate(
        "two", {"crash": ["Failed at step EXEC spawning /usr/sbin/nginx: No such file or directory"]}
    )
    assert failed.status == 1
    assert "(nginx is gone: `apt-get install --reinstall nginx` on the pod, then run this again)" in failed.lines[0]


def test_one_that_does_not_start_gives_way_to_the_one_before(public: Public, systemd: FakeSystemd) -> None:
    public.activate()
    emerg = "2026/11/30 10:27:02 [emerg] 1#1: bind() to 0.0.0.0:8000 failed"
    failed = public.activate("two", {"crash": [emerg, "Main process exited"]})
    assert (failed.status, failed.lines) == (
        1,
        [
            f"{UNIT} runs on as it is, but its proxy {PROXY} is activating (auto-restart): nothing answers at "
            f"http://127.0.0.1:{public.port}: {emerg}; the one from before stands again"
        ],
    )
    assert public.config == "one"
    assert systemd.units[UNIT].starts == 1


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ({"key": None}, "/v1/models answers 401 with the API key, and should 200"),
        ({"body": "{}", "key": KEY, "other": 200}, "/version answers 200 with the API key, and should 404"),
    ],
)
def test_one_that_lets_in_more_or_less_is_not_kept(
    public: Public, systemd: FakeSystemd, does: dict[str, Any], told: str
) -> None:
    failed = public.activate(does=does)
    assert failed.lines[-1] == (
        f"{UNIT} is not kept: its proxy {PROXY} is active (running): http://127.0.0.1:{public.port}{told}; "
        "nothing served before it, so the unit is removed"
    )
    assert public.config is None
    assert not (public.pod.units / PROXY).exists()
    assert systemd.calls[-len(REMOVE_PROXY) - 3 :][: len(REMOVE_PROXY)] == REMOVE_PROXY


def test_one_that_asks_for_no_key_is_not_kept(public: Public) -> None:
    document = public.document()
    does = json.loads(document["proxy"]["unit"]["text"].removeprefix("# fake: "))
    del does["key"]
    document["proxy"]["unit"]["text"] = f"# fake: {json.dumps(does)}\n"
    failed = public.pod.run("activate", stdin=document)
    assert (
        f"http://127.0.0.1:{public.port}/v1/models answers 200 without the API key, and should 401" in failed.lines[-1]
    )


def test_there_is_none_without_an_api_key(engine: Engine, pod: PodDirectory) -> None:
    document = {**engine.document(), "proxy": Public(engine, pod, free_port()).document()["proxy"]}
    assert pod.run("activate", stdin=document).lines == [
        f"{UNIT} is not kept: a proxy lets in whoever comes, since there is no API key: set lora-pods:apiKey; nothing "
        "served before it, so the unit is removed"
    ]


def test_going_back_takes_its_proxy_along(public: Public, systemd: FakeSystemd) -> None:
    public.activate()
    failed = public.activate("two", crash=["no"])
    assert [line for line in failed.lines if line.endswith("the unit from before serves again (m1, org/base)")]
    assert public.config == "one"
    assert systemd.units[PROXY].active == "active"


@pytest.mark.parametrize("full", [UNIT, PROXY, f"{ENGINE}.conf"])
def test_a_disk_that_fills_up_leaves_it_standing(
    full: str, public: Public, systemd: FakeSystemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine and its proxy both change, and one of their files cannot be written."""
    public.activate()
    real = files.write_file
    refused: list[str] = []

    def write_file(path: str, data: bytes, mode: int = 0o644) -> None:
        if path.endswith("/" + full) and not refused:
            refused.append(path)
            raise OSError(errno.ENOSPC, "No space left on device", path)
        real(path, data, mode)

    monkeypatch.setattr(files, "write_file", write_file)
    failed = public.activate("two", says=["another"])
    assert failed.lines[-1].startswith(f"the disk of {public.pod.root} is full: ")
    assert public.config == "one"
    assert [systemd.units[name].active for name in (UNIT, PROXY)] == ["active", "active"]
    assert public.pod.run("intact", "--engine", ENGINE).result["drift"] == {}


def test_it_makes_room_for_an_engine_at_its_own_port(public: Public, systemd: FakeSystemd, pod: PodDirectory) -> None:
    public.activate()
    systemd.calls.clear()
    public.engine.port = public.port
    assert pod.run("activate", stdin=public.engine.document(key=KEY)).status == 0
    assert systemd.calls == REMOVE_PROXY + START_ENGINE
    assert not (pod.root / "proxies").exists()
    # And the other way round.
    systemd.calls.clear()
    public.engine.port = free_port()
    assert public.activate().status == 0
    assert systemd.calls == START_ENGINE + START_PROXY


def test_another_program_at_its_port_is_named(public: Public, systemd: FakeSystemd) -> None:
    with socket.create_server(("127.0.0.1", public.port)):
        refused = public.activate()
    assert refused.lines == [
        f"another program already answers at http://127.0.0.1:{public.port}: stop it, or choose another engine.port"
    ]
    assert systemd.calls == []


def test_an_engine_of_another_stack_keeps_its_ports(public: Public, pod: PodDirectory) -> None:
    public.activate()
    other = {**public.engine.document(engine="other-base-1", key=KEY), "stack": "other", "port": public.port}
    assert pod.run("activate", stdin=other).lines == [
        f"port {public.port} belongs to the engine {ENGINE} of stack prod: choose another engine.port"
    ]


def test_drift_is_seen(public: Public, pod: PodDirectory, systemd: FakeSystemd) -> None:
    def drift() -> Any:
        return pod.run("intact", "--engine", ENGINE).result["drift"]

    public.activate()
    assert drift() == {}
    systemd.run("systemctl", "--no-pager", "disable", "--now", PROXY)
    assert drift() == {"proxy": "is gone, was edited by hand or does not run"}
    public.activate()
    assert drift() == {}
    (pod.root / "proxies" / f"{ENGINE}.conf").write_text("edited")
    assert drift() == {"proxy": "is gone, was edited by hand or does not run"}


def test_it_goes_with_its_engine(public: Public, pod: PodDirectory, systemd: FakeSystemd) -> None:
    public.activate()
    assert pod.run("deactivate", "--engine", ENGINE).result["removed"] is True
    assert systemd.units[PROXY].active == "inactive"
    assert list(pod.units.iterdir()) == []
    assert not (pod.root / "proxies").exists()


def test_a_private_key_is_roots_and_goes_when_nothing_names_it(public: Public, pod: PodDirectory) -> None:
    def give(name: str) -> None:
        key = f"-----BEGIN PRIVATE KEY-----\n{name}\n-----END PRIVATE KEY-----\n"
        document = {"engine": ENGINE, "secrets": {"VLLM_API_KEY": KEY}, "tls": {"name": name, "key": key}}
        assert pod.run("secrets", stdin=document) == (0, {"revision": revision}, [])

    def named(name: str) -> dict[str, Any]:
        document = public.document(says=[name])
        document["proxy"]["unit"]["text"] += f"ExecStartPre=+install secrets/{ENGINE}.tls-{name}.key\n"
        return document

    revision = pod.run("secrets", stdin={"engine": ENGINE, "secrets": {"VLLM_API_KEY": KEY}}).result["revision"]
    names = [digit * 16 for digit in "abcde"]
    for name in names:
        give(name)
        assert pod.run("activate", stdin=named(name)).status == 0
    path = pod.root / "secrets" / f"{ENGINE}.tls-{names[-1]}.key"
    assert (mode(path), mode(path.parent)) == ("0o600", "0o700")
    # Those of the generations that one can go back to.
    assert secret_files.tls_keys(Store(str(pod.root), str(pod.units)), ENGINE) == names[-3:]
    pod.run("deactivate", "--engine", ENGINE)
    left = pod.run("remove").result["left"]
    assert left == ["model m1 of stack prod", f"engine {ENGINE}"]
    pod.run("unsecret", "--engine", ENGINE)
    assert not (pod.root / "secrets").exists()


@pytest.mark.parametrize("name", ["", "../../x", "a" * 15, "A" * 16])
def test_a_private_key_has_no_other_name(pod: PodDirectory, name: str) -> None:
    document = {"engine": ENGINE, "secrets": {}, "tls": {"name": name, "key": "-----BEGIN PRIVATE KEY-----"}}
    assert pod.run("secrets", stdin=document).lines == [
        "the document's tls must be a private key in PEM and the name of its public one"
    ]


@pytest.fixture
def https(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A server's URL, and its certificate."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write((self.headers["Authorization"] or "").encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    certificate, key = self_signed("pod")
    (tmp_path / "both.pem").write_text(certificate + key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "both.pem")
    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_port}", certificate
    server.shutdown()
    server.server_close()


def test_the_key_is_told_to_who_shows_the_certificate_alone(https: tuple[str, str]) -> None:
    url, certificate = https
    other, _ = self_signed("pod")
    assert proof.request(url, "/", KEY, None, 5, False, certificate + other) == (200, b"Bearer sesame")
    assert proof.request(url, "/", KEY, None, 5, False, other) == (0, b"")
    assert proof.request(url.replace("https", "http"), "/", KEY, None, 5, False)[0] != 200
