"""Every route that the real vLLM has, asked through the proxy, while the real vLLM serves behind it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from bootstrap.demo.prepare import BASE, MODEL, prepare
from components.core.engine_options import EngineOptions
from components.core.engine_plan import EnginePlan, plan_engine
from components.core.naming import blob_path, engine_key, proxy_unit_name, unit_name
from components.on_pod.boot import podctl_source
from components.render import NGINX, OPENAI_ROUTES, render_proxy, render_unit
from tests.e2e.test_probe_vllm import SANDBOX_IMAGE, run_podctl
from tests.support.machines import MOST_EXPOSED, Machine, call
from tests.support.tricks import NOTHING, found_open

pytestmark = pytest.mark.vllm

KEY = engine_key("e2e", BASE)
UNIT, PROXY = unit_name(KEY), proxy_unit_name(KEY)
API_KEY = "e2e-api-key"
# So many that an answer takes some seconds on any machine.
TOKENS = 200
ROUTES = Path(__file__).parent / "vllm_routes.json"

# The app as vLLM builds it for each of its tasks, with all that a variable can switch on. Printed as [[method, path]].
LIST_ROUTES = """
import json, typing
from unittest.mock import MagicMock
from vllm import tasks
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "x"])
everything = tasks.GENERATION_TASKS + tasks.POOLING_TASKS + tasks.FRONTEND_TASKS

def walk(routes, prefix=""):
    for route in routes:
        path = prefix + getattr(route, "path", "")
        for method in sorted(getattr(route, "methods", None) or ["GET"]):
            yield method, path
        yield from walk(getattr(route, "routes", None) or [], path)

found = set()
for task in (None, *tasks.POOLING_TASKS):
    model = MagicMock()
    model.get_pooling_task.return_value = task
    model.is_cross_encoder = True
    found |= set(walk(build_app(args, tuple(everything), model if task else None).routes))
print("ROUTES", json.dumps(sorted(found)))
"""
EVERYTHING_ON = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    prepare()
    machine = Machine.start(tmp_path_factory.mktemp("machine"), "nobody", SANDBOX_IMAGE)
    machine.run("mkdir", "-p", "/models")
    call("cp", str(MODEL), f"{machine.name}:{BASE}")
    machine.run("tee", "/root/podctl.py", stdin=podctl_source())
    yield machine
    machine.remove()


def planned(max_model_len: int) -> EnginePlan:
    return plan_engine(
        BASE,
        "/opt/vllm/bin/python",
        [],
        [],
        EngineOptions(
            port=18000,
            max_model_len=max_model_len,
            dtype="float32",
            args={"enforceEager": True, "shutdownTimeout": 300},  # on a busy machine an answer takes minutes
            env={"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
            device="cpu",
        ),
        blob_path,
    )


def activation(plan: EnginePlan) -> dict[str, Any]:
    proxy = render_proxy(BASE, key=KEY, listen="0.0.0.0", port=8000, inner_port=18000)
    return {
        "stack": "e2e",
        "engine": KEY,
        "identity": "pod",
        "port": 18000,
        "unit": {"name": UNIT, "text": render_unit(plan, key=KEY)},
        "ready": {"url": "http://127.0.0.1:18000", "models": plan.served, "timeoutSeconds": 600},
        "proxy": {
            "unit": {"name": PROXY, "text": proxy.unit},
            "config": proxy.config,
            "port": 8000,
            "url": "http://127.0.0.1:8000",
        },
    }


@pytest.fixture(scope="module")
def plan(machine: Machine) -> EnginePlan:
    """A public engine that podctl has activated."""
    plan = planned(max_model_len=512)
    variables = "".join(f"Environment={name}={value}\n" for name, value in EVERYTHING_ON.items())
    machine.run("mkdir", "-p", f"/etc/systemd/system/{UNIT}.d")
    machine.run("tee", f"/etc/systemd/system/{UNIT}.d/open.conf", stdin=f"[Service]\n{variables}")
    program = podctl_source()
    needs = {"gpu": False, "proxy": True, "diskGiB": 1, "shmMiB": 160, "python": "/opt/vllm/bin/python", "base": BASE}
    sha256 = hashlib.sha256(program.encode()).hexdigest()
    for verb, document in (
        ("prepare", {"identity": "pod", "needs": needs, "podctl": program, "sha256": sha256}),
        ("secrets", {"engine": KEY, "secrets": {"VLLM_API_KEY": API_KEY}}),
        ("activate", activation(plan)),
    ):
        ran = run_podctl(machine, verb, stdin=json.dumps(document).encode())
        assert ran.status == 0, ran.lines
    assert machine.run("ls", NGINX).strip() == NGINX
    return plan


def ask(machine: Machine, method: str, path: str, key: str | None, body: Any = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", machine.port(8000), timeout=60)
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    connection.request(method, path, json.dumps(body or {}) if method == "POST" else None, headers)
    response = connection.getresponse()
    return response.status, response.read()


def test_the_routes_are_the_ones_that_are_asked(machine: Machine) -> None:
    told = machine.run(
        *("env", *(f"{name}={value}" for name, value in EVERYTHING_ON.items()), "VLLM_LOGGING_LEVEL=ERROR"),
        *("/opt/vllm/bin/python", "-c", LIST_ROUTES),
    )
    found = json.loads(told.rsplit("ROUTES ", 1)[1])
    assert found == json.loads(ROUTES.read_text())


def test_every_route_through_the_proxy(machine: Machine, plan: EnginePlan) -> None:
    routes = [(method, path) for method, path in json.loads(ROUTES.read_text())]
    assert len(routes) > 70
    assert set(OPENAI_ROUTES) <= set(routes)
    passed = set()
    for method, path in routes:
        target = path.replace("{", "").replace("}", "") or "/"
        status, _ = ask(machine, method, target, None)
        assert status in (401, 404, 405), (method, target, status)
        status, answer = ask(machine, method, target, API_KEY)
        if (status == 404 and (answer.decode() == NOTHING or method == "HEAD")) or status == 405:
            continue
        passed.add((method, path))
    assert passed == set(OPENAI_ROUTES)
    # vLLM itself answers whoever asks there, with whatever its models say.
    assert machine.get("/version", port=18000)
    question = json.dumps({"model": BASE, "prompt": "hello", "max_tokens": 4})
    words = ["curl", "-sS", "--fail", "-H", "Content-Type: application/json", "-d", question]
    assert "choices" in json.loads(machine.run(*words, "http://127.0.0.1:18000/invocations"))
    # What vLLM takes for something below /metrics, nginx takes for the list of models: vLLM is asked for that.
    for closed in ("metrics", "version"):
        assert list(found_open(machine.port(8000), API_KEY, closed)) == []
    # The one that runs has no route that the list above lacks.
    running = machine.get("/openapi.json", port=18000)["paths"]
    assert {(method.upper(), path) for path, methods in running.items() for method in methods} <= set(routes)


def test_it_serves_and_streams(machine: Machine, plan: EnginePlan) -> None:
    connection = HTTPConnection("127.0.0.1", machine.port(8000), timeout=120)
    question = {"model": BASE, "prompt": "Once upon a time", "max_tokens": 64, "stream": True, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
    began = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(question), headers)
    response = connection.getresponse()
    first = response.readline()
    after_first = time.monotonic()
    rest = response.read()
    ended = time.monotonic()
    assert (response.status, first[:6]) == (200, b"data: ")
    assert rest.count(b"data: ") >= 30
    assert rest.endswith(b"data: [DONE]\n\n")
    # Kept back until the end, all of it would come at once.
    assert ended - after_first > 0.3 * (ended - began)
    assert machine.exposure(UNIT) <= MOST_EXPOSED
    assert machine.exposure(PROXY) <= MOST_EXPOSED


def completion(machine: Machine, tokens: int) -> HTTPResponse:
    """An answer that streams, of exactly so many tokens."""
    connection = HTTPConnection("127.0.0.1", machine.port(8000), timeout=300)
    question = {"model": BASE, "prompt": "Once upon a time", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    question |= {"stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
    connection.request("POST", "/v1/completions", json.dumps(question), headers)
    return connection.getresponse()


def test_an_activation_lets_what_is_in_flight_finish(machine: Machine, plan: EnginePlan) -> None:
    """A worker of vLLM that is told to stop as well, or no time to finish, breaks the answer off."""
    pid = machine.pid(UNIT)
    response = completion(machine, TOKENS)
    assert (response.status, response.readline()[:6]) == (200, b"data: ")

    with ThreadPoolExecutor(1) as pool:
        document = json.dumps(activation(planned(max_model_len=500))).encode()
        activated = pool.submit(run_podctl, machine, "activate", stdin=document)
        rest = response.read()
        ran = activated.result()

    assert rest.endswith(b"data: [DONE]\n\n")
    *_, usage, _done = (line for line in rest.splitlines() if line.startswith(b"data: "))
    assert json.loads(usage[6:])["usage"]["completion_tokens"] == TOKENS
    told = machine.run("journalctl", "--no-pager", f"_SYSTEMD_UNIT={UNIT}")
    assert "[shutdown] EngineCore: draining in-flight requests count=1 timeout=300s" in told, "it had ended before"
    assert (ran.status, ran.result["restarted"]) == (0, True), ran.lines
    assert machine.pid(UNIT) != pid
    assert completion(machine, 2).read().endswith(b"data: [DONE]\n\n")
