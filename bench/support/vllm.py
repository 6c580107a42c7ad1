"""The demo's base and adapters on a pod with the real vLLM, and requests to it."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.support.site import Site, site
from bootstrap.demo.personas import DIRECTORIES
from bootstrap.demo.prepare import ADAPTERS, BASE, MODEL, prepare
from components.pods.sandbox import free_port
from tests.support.machines import call

SANDBOX_IMAGE = "localhost/lora-pods-sandbox"
# As in stacks/Pulumi.sandbox.yaml.
ENGINE: Mapping[str, Any] = {
    "python": "/opt/vllm/bin/python",
    "device": "cpu",
    "maxModelLen": 512,
    "dtype": "float32",
    "args": {"enforceEager": True},
    "env": {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
    "readyTimeoutSeconds": 600,
}
PROMPT = "Tell me about the tallest mountain of the world."


@contextmanager
def vllm_site() -> Iterator[tuple[Site, dict[str, Path], str]]:
    """A pod that has the demo's base; the demo's adapters, trained unless they are there; the URL of the engine."""
    prepare()
    with site(SANDBOX_IMAGE) as here:
        call("cp", str(MODEL), f"{here.machine.name}:{BASE}")
        adapters = {persona: ADAPTERS / place for persona, place in sorted(DIRECTORIES.items())}
        with tunnel(here) as port:
            yield here, adapters, f"http://127.0.0.1:{port}/v1"


@contextmanager
def tunnel(here: Site) -> Iterator[int]:
    """The port of this machine that leads to the engine, which listens on its pod's loopback."""
    port = free_port()
    where = ["-L", f"127.0.0.1:{port}:127.0.0.1:8000", "-p", str(here.machine.port()), "root@127.0.0.1"]
    with subprocess.Popen(["ssh", "-N", "-q", *here.ssh_options(), *where], stdin=subprocess.DEVNULL) as process:
        try:
            yield port
        finally:
            process.terminate()


def models_served(url: str) -> set[str]:
    """The ids that an engine lists; none as long as it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=5) as response:
            return {str(model["id"]) for model in json.load(response)["data"]}
    except (OSError, urllib.error.URLError, ValueError):
        return set()


class Watch:
    """Notes when an engine first lists all of some models."""

    def __init__(self, url: str, models: set[str]) -> None:
        self._url, self._models = url, models
        self._due = time.monotonic() + ENGINE["readyTimeoutSeconds"]
        self.ready_at = 0.0
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._models <= models_served(self._url):
            if time.monotonic() > self._due:
                return
            time.sleep(0.05)
        self.ready_at = time.perf_counter()

    def wait(self) -> float:
        self._thread.join()
        if not self.ready_at:
            raise RuntimeError(f"the engine at {self._url} does not list its models")
        return self.ready_at


def ask_all(url: str, models: Sequence[str], tokens: int) -> None:
    """One request to each at the same time, each answered with exactly so many tokens."""
    with ThreadPoolExecutor(len(models)) as pool:
        list(pool.map(lambda model: ask(url, model, tokens), models))


def ask(url: str, model: str, tokens: int) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        made = json.load(response)["usage"]["completion_tokens"]
    if made != tokens:
        raise RuntimeError(f"{model} answered with {made} tokens instead of {tokens}")
