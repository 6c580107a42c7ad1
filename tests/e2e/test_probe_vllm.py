"""The probe on the real vLLM: it tells adapters that apply, however weakly, from those with the base's answers.

podctl is called as Pulumi calls it, on a pod with the demo's base: a stack would not come so far, since its preview
refuses some of these adapters.
"""

from __future__ import annotations

import array
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bootstrap.demo.prepare import ADAPTERS, BASE, MODEL, prepare
from components.core.engine_options import EngineOptions, PlannedAdapter
from components.core.engine_plan import plan_engine
from components.core.naming import blob_path, engine_key, unit_name
from components.on_pod.boot import podctl_source
from components.render import render_unit
from tests.support.machines import MOST_EXPOSED, Machine, call, container_engine
from tests.unit.podctl.pods import bundle, digest_of, head

pytestmark = pytest.mark.vllm

SANDBOX_IMAGE = "localhost/lora-pods-sandbox"
STACK, KEY = "e2e", engine_key("e2e", BASE)
UNIT = unit_name(KEY)


class Ran(NamedTuple):
    status: int
    result: dict[str, Any]
    lines: list[str]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    prepare()
    machine = Machine.start(tmp_path, "nobody", SANDBOX_IMAGE)
    machine.run("mkdir", "-p", "/models")
    call("cp", str(MODEL), f"{machine.name}:{BASE}")
    machine.run("tee", "/root/podctl.py", stdin=podctl_source())
    yield machine
    machine.remove()


def run_podctl(machine: Machine, *words: str, stdin: bytes = b"") -> Ran:
    command = [*container_engine(), "exec", "-i", machine.name, "python3", "/root/podctl.py", *words]
    done = subprocess.run(command, capture_output=True, input=stdin, check=False)
    return Ran(done.returncode, json.loads(done.stdout or b"{}"), done.stderr.decode().splitlines())


def rewritten(weights: bytes, name: Callable[[str], str] = lambda name: name, b_times: float | None = None) -> bytes:
    """The adapter's tensors under other names, its B matrices multiplied."""
    size = int.from_bytes(weights[:8], "little")
    header, data = json.loads(weights[8 : 8 + size]), bytearray(weights[8 + size :])
    metadata = header.pop("__metadata__", {})
    for tensor, entry in header.items():
        begin, end = entry["data_offsets"]
        if b_times is not None and "lora_B" in tensor:
            assert entry["dtype"] == "F32"
            data[begin:end] = array.array("f", [x * b_times for x in array.array("f", data[begin:end])]).tobytes()
    named = json.dumps({"__metadata__": metadata, **{name(tensor): entry for tensor, entry in header.items()}})
    return len(named).to_bytes(8, "little") + named.encode() + bytes(data)


def test_tells_what_applies_from_what_does_not(machine: Machine) -> None:
    trained = (ADAPTERS / "acme" / "v1" / "adapter_model.safetensors").read_bytes()
    config = (ADAPTERS / "acme" / "v1" / "adapter_config.json").read_bytes()
    prefix = "base_model.model.model."
    tars = {
        model: bundle(weights, config)
        for model, weights in {
            "trained": trained,
            "weak": rewritten(trained, b_times=0.001),
            "none": rewritten(trained, b_times=0),
            "wrong": rewritten(trained, lambda name: name.replace(prefix, prefix + "language_model.")),
        }.items()
    }
    digests = {model: digest_of(tar) for model, tar in tars.items()}
    sent = head(*((digest_of(tar), len(tar), 0) for tar in tars.values())) + b"".join(tars.values())
    assert run_podctl(machine, "receive-all", stdin=sent).status == 0
    placed = {"stack": STACK, "base": BASE, "models": digests}
    assert run_podctl(machine, "place", stdin=json.dumps(placed).encode()).status == 0

    def activate(allowed: list[str], *models: str) -> Ran:
        plan = plan_engine(
            BASE,
            "/opt/vllm/bin/python",
            [PlannedAdapter(model, digests[model], 8) for model in models],
            [],
            EngineOptions(
                port=8000,
                max_model_len=512,
                dtype="float32",
                args={"enforceEager": True},
                env={"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
                device="cpu",
            ),
            blob_path,
        )
        probe = {"base": BASE, "mayEqualBase": allowed}
        ready = {"url": "http://127.0.0.1:8000", "models": plan.served, "timeoutSeconds": 300, "probe": probe}
        document = {
            "stack": STACK, "engine": KEY, "identity": "pod", "port": 8000, "ready": ready,
            "unit": {"name": UNIT, "text": render_unit(plan, key=KEY)},
        }  # fmt: skip
        return run_podctl(machine, "activate", stdin=json.dumps(document).encode())

    secrets = {"engine": KEY, "secrets": {}}
    assert run_podctl(machine, "secrets", stdin=json.dumps(secrets).encode()).status == 0

    # vLLM takes them all, and answers.
    everything = ("trained", "weak", "none", "wrong")
    served = activate(["none", "wrong"], *everything)
    assert served.status == 0, served.lines
    assert served.result["probe"] == {"otherwise": 2, "equal": ["none", "wrong"]}
    assert "2 adapters answer otherwise than their base" in served.lines
    assert "none, wrong answer exactly as their base does, as mayEqualBase allows" in served.lines
    assert machine.ask("trained") != machine.ask(BASE) == machine.ask("wrong")
    assert machine.exposure(UNIT) <= MOST_EXPOSED

    # Without leave, the same engine is asked again; it runs on, and what is wrong is named.
    refused = activate(["none"], *everything)
    assert (refused.status, refused.result) == (1, {})
    assert refused.lines[-1].startswith(f"{UNIT} runs on as it is, but wrong answers exactly as its base does: ")
