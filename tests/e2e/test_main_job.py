"""The main job with the real vLLM: three personas on one engine, and one of them retrained in place."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from bootstrap.demo.ask import ask
from bootstrap.demo.personas import PERSONAS, QUESTION
from bootstrap.demo.prepare import DEMO, prepare, train
from bootstrap.demo.up import PASSPHRASE
from components.core.digest_cache import DigestCache
from components.core.naming import blob_path
from components.described import Described
from tests.components.test_settings import Config
from tests.support.machines import Machine, call
from tests.support.stacks import REPOSITORY, Checkout, Stack

pytestmark = pytest.mark.vllm

BASE = "/models/smollm2"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """The demo as in a checkout of its own, so that one that is up on this machine is left alone."""
    prepare()
    state = tmp_path / "checkout" / ".lora-pods" / "demo"
    checkout = Checkout.make(tmp_path / "checkout", state / "state")
    shutil.copytree(REPOSITORY / "bootstrap", checkout.root / "bootstrap", ignore=shutil.ignore_patterns("__pycache__"))
    (state / "models").symlink_to(DEMO / "models")
    shutil.copytree(DEMO / "adapters", state / "adapters")
    checkout.environment["PULUMI_CONFIG_PASSPHRASE"] = PASSPHRASE
    return checkout


@pytest.fixture
def stack(checkout: Checkout) -> Iterator[Stack]:
    stack = Stack(checkout, f"e2e-{uuid.uuid4().hex[:8]}")
    shutil.copy(REPOSITORY / "stacks" / "Pulumi.sandbox.yaml", stack.file)
    yield stack
    call("rm", "--force", "--volumes", f"lora-pods-{stack.name}", check=False)


def demo(stack: Stack, verb: str) -> str:
    words = [sys.executable, "-m", "bootstrap.demo", verb, "--stack", stack.name]
    done = subprocess.run(
        words, cwd=stack.checkout.root, env=stack.checkout.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(printed: str) -> dict[str, str]:
    """The demo's table: what each model id answered, its lines put together again."""
    answers: dict[str, str] = {}
    model = ""
    (_, table) = re.split(r"^model +digest +answer *\n", printed, flags=re.MULTILINE)
    for line in table.split("\n\n")[0].splitlines():
        words = line.split()
        if not line.startswith(" "):
            model, words = words[0], words[1 if "sha256:" in line else 2 :]
            words = [word for word in words if not word.startswith(("sha256:", "base)"))]
        answers[model] = " ".join([answers.get(model, ""), *words]).strip()
    return answers


def test_the_main_job(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    root = stack.checkout.root
    printed = demo(stack, "up")

    # Three personas answer from one engine, two of them versions of the same client's.
    answers = rows(printed)
    assert set(answers) == {BASE, "acme-support-v1", "acme-support-v2", "globex-sales-v1"}
    assert answers["acme-support-v1"] == PERSONAS["acme-v1"]
    assert answers["acme-support-v2"] == PERSONAS["acme-v2"]
    assert answers["globex-sales-v1"] == PERSONAS["globex-v1"]
    assert answers[BASE] not in PERSONAS.values()
    assert "15 unchanged" in printed

    # /v1/models lists the base, and each id with its blob's path.
    engine = stack.outputs()["engines"][BASE]
    with urllib.request.urlopen(f"{engine['endpoint']}/models", timeout=30) as response:
        served = {model["id"]: model["root"] for model in json.load(response)["data"]}
    adapters = {"acme-support-v1": "acme/v1", "acme-support-v2": "acme/v2", "globex-sales-v1": "globex/v1"}
    directories = {model: root / ".lora-pods/demo/adapters" / place for model, place in adapters.items()}
    digests = {model: DigestCache().describe(directory).digest for model, directory in directories.items()}
    assert served == {BASE: BASE, **{model: blob_path(digest) for model, digest in digests.items()}}
    assert engine["models"] == {BASE: None, **digests}

    # The process runs with exactly what was planned.
    monkeypatch.chdir(root)
    config = yaml.safe_load(stack.file.read_text())["config"]
    described = Described(Config({key.removeprefix("lora-pods:"): config[key] for key in config}), stack.name)
    pod = Machine(f"lora-pods-{stack.name}", "", root)
    assert pod.argv(pod.pid(engine["unit"])) == list(described.engines[BASE].plan.argv)

    # Retrained in place, at the same path and size: its bundle, its placing and the engine change, and its answer.
    weights = directories["acme-support-v1"] / "adapter_model.safetensors"
    size = weights.stat().st_size
    train("acme-retrained", directories["acme-support-v1"])
    assert weights.stat().st_size == size
    assert stack.up().changes == {
        "AdapterBundle acme-support-v1": "replace",
        f"BundleUpload {BASE}-upload": "update",
        f"Command {BASE}-place": "update",
        f"Command {BASE}-activate": "update",
    }
    assert ask(engine["endpoint"], "acme-support-v1", QUESTION) == PERSONAS["acme-retrained"]
    assert ask(engine["endpoint"], "acme-support-v2", QUESTION) == PERSONAS["acme-v2"]
    assert stack.preview("--expect-no-changes").changes == {}

    demo(stack, "down")
    assert call("ps", "--all", "--quiet", "--filter", f"name=lora-pods-{stack.name}") == ""
