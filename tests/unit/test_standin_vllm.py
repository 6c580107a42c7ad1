"""The stand-in for vLLM starts, fails, answers and stops as the tests on pods rely on it to."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.adapters import seeded_adapter, write_adapter

STANDIN = Path(__file__).parents[1] / "engine" / "standin_vllm"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheels")
    subprocess.run([sys.executable, STANDIN / "make_wheels.py", STANDIN / "vllm", directory, "0.33.0"], check=True)
    return directory / "vllm-0.33.0-py3-none-any.whl"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}')
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    return directory


class Running:
    """A started stand-in; `url` is where it listens."""

    def __init__(self, wheel: Path, arguments: list[str], environment: dict[str, str]) -> None:
        self.process = start(wheel, ["--host", "127.0.0.1", "--port", "0", *arguments], environment)
        assert self.read_line() == "vLLM API server version 0.33.0 (stand-in)"
        self.url = self.read_line().partition("Uvicorn running on ")[2]

    def read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def call(self, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        data = json.dumps(body).encode() if body is not None else None
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=20) as response:
                text = response.read()
                return response.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())


def start(wheel: Path, arguments: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(wheel), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def running(wheel: Path, adapter: Path) -> Iterator[Running]:
    module = json.dumps({"name": "acme-v1", "path": str(adapter), "base_model_name": "org/base"})
    arguments = ["--model", "org/base", "--served-model-name", "org/base", "plain"]
    arguments += ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", module, "--shutdown-timeout", "20"]
    server = Running(wheel, arguments, {"VLLM_API_KEY": "the-key"})
    yield server
    server.process.kill()
    server.process.communicate()


def test_lists_base_names_then_adapters(running: Running, adapter: Path) -> None:
    status, models = running.call("/v1/models", key="the-key")
    assert status == 200
    assert [(m["id"], m["root"], m["parent"]) for m in models["data"]] == [
        ("org/base", "org/base", None),
        ("plain", "org/base", None),
        ("acme-v1", str(adapter), "org/base"),
    ]


def test_guards_only_v1_with_the_key(running: Running) -> None:
    assert running.call("/health") == (200, None)
    assert running.call("/v1/models") == (401, {"error": "Unauthorized"})
    assert running.call("/v1/models", key="another") == (401, {"error": "Unauthorized"})


def test_answers_tell_the_bytes_that_were_there_at_launch(running: Running, adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(b"retrained")
    body = {"model": "acme-v1", "messages": [{"role": "user", "content": "Hello"}]}
    status, answer = running.call("/v1/chat/completions", body, "the-key")
    weights = hashlib.sha256(b"weights").hexdigest()
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == f"model=acme-v1 weights={weights} prompt=Hello"
    status, answer = running.call("/v1/completions", {"model": "plain", "prompt": "Hello"}, "the-key")
    assert answer["choices"][0]["text"] == "model=plain weights=none prompt=Hello"


def test_logprobs_are_those_of_the_weights_that_apply(wheel: Path, tmp_path: Path) -> None:
    wrong = {"base_model.model.layers.0.q_proj.lora_A.weight": [8, 16]}
    adapters = {
        "good": seeded_adapter(tmp_path / "good", seed=1),
        "same": seeded_adapter(tmp_path / "same", seed=1, config={"note": "other config, same weights"}),
        "other": seeded_adapter(tmp_path / "other", seed=2),
        "told": seeded_adapter(tmp_path / "told", seed=3, config={"standin_equals_base": True}),
        "prefix": write_adapter(tmp_path / "prefix", weights=wrong),
    }
    modules = [f"{name}={path}" for name, path in adapters.items()]
    server = Running(wheel, ["--model", "m", "--enable-lora", "--lora-modules", *modules], {})
    try:
        asked = {"prompt": "Hello", "logprobs": 5, "max_tokens": 3}
        answers = {
            model: server.call("/v1/completions", {"model": model, **asked})[1]["choices"][0]["logprobs"]
            for model in ("m", *adapters)
        }
        elsewhere = server.call("/v1/completions", {"model": "m", **asked, "prompt": "Bye"})[1]["choices"][0][
            "logprobs"
        ]
    finally:
        server.process.kill()
        server.process.communicate()
    assert answers["told"] == answers["prefix"] == answers["m"] != elsewhere
    assert answers["good"] == answers["same"]
    assert len({json.dumps(answers[model]) for model in ("m", "good", "other")}) == 3
    assert (len(answers["m"]["tokens"]), [len(top) for top in answers["m"]["top_logprobs"]]) == (3, [5, 5, 5])


def test_does_not_know_other_models(running: Running) -> None:
    status, answer = running.call("/v1/completions", {"model": "acme-v2", "prompt": "Hello"}, "the-key")
    assert status == 404
    assert answer["error"]["message"] == "The model `acme-v2` does not exist."


def test_tells_names_of_the_environment_and_never_values(running: Running) -> None:
    status, facts = running.call("/standin/argv")
    assert status == 200
    assert facts["argv"][1:5] == ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    assert "VLLM_API_KEY" in facts["environment"]
    assert "the-key" not in json.dumps(facts)


def test_a_stop_lets_the_request_in_flight_end(running: Running) -> None:
    answers: list[tuple[int, Any]] = []
    body = {"model": "plain", "prompt": "Hello", "standin_delay_seconds": 0.5}
    request = threading.Thread(target=lambda: answers.append(running.call("/v1/completions", body, "the-key")))
    request.start()
    assert running.read_line() == "Received request for plain"
    running.process.send_signal(signal.SIGTERM)
    request.join(20)
    assert [status for status, _ in answers] == [200]
    assert running.process.wait(20) == 0


@pytest.mark.parametrize(
    ("config", "arguments", "last_line"),
    [
        ({"r": 32}, ["--max-lora-rank", "16"], "ValueError: LoRA rank 32 is greater than max_lora_rank 16."),
        ({"standin_fail": "no such tensor"}, [], "ValueError: no such tensor"),
        ({}, ["--served-model-name", "a"], "ValueError: The lora adapter 'a' conflicts with a served base model."),
        ({}, ["--max-cpu-loras", "1", "--max-loras", "2"], "ValueError: max_cpu_loras (1) must be >= max_loras (2)."),
    ],
)
def test_an_adapter_that_does_not_load_ends_it(
    wheel: Path, adapter: Path, config: dict[str, object], arguments: list[str], last_line: str
) -> None:
    good = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**good, **config}))
    module = json.dumps({"name": "a", "path": str(adapter)})
    process = start(wheel, ["--model", "m", "--enable-lora", *arguments, "--lora-modules", module], {})
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors.splitlines()[0], errors.splitlines()[-1]) == (
        1,
        "Traceback (most recent call last):",
        last_line,
    )


def test_missing_weights_end_it(wheel: Path, adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    process = start(wheel, ["--model", "m", "--enable-lora", "--lora-modules", f"a={adapter}"], {})
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert errors.splitlines()[-1] == f"ValueError: Loading lora a failed: No adapter found for {adapter}"


def test_an_unknown_flag_exits_2(wheel: Path) -> None:
    process = start(wheel, ["--model", "m", "--bogus"], {})
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert errors.endswith("error: unrecognized arguments: --bogus\n")
