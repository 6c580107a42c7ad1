"""What is not as an engine's last activation left it: found, told one by one, and mended by the same verbs again."""

from __future__ import annotations

import json
import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.on_pod.podctl import files, names, programs
from components.on_pod.podctl.store import Store
from tests.unit.podctl.engines import ENGINE, UNIT, Engine
from tests.unit.podctl.fake_systemd import FakeSystemd
from tests.unit.podctl.pods import CONFIG, WEIGHTS, PodDirectory, bundle


def drift(pod: PodDirectory) -> dict[str, str]:
    found: dict[str, str] = pod.run("intact", "--engine", ENGINE).result["drift"]
    return found


def status(pod: PodDirectory) -> dict[str, Any]:
    answer = pod.run("status")
    assert (answer.status, answer.lines) == (0, [])
    return answer.result


def overwrite(path: Path, data: bytes) -> None:
    """Other bytes in a file of a blob, with the times it had."""
    before = path.stat()
    path.chmod(0o644)
    path.write_bytes(data)
    path.chmod(0o444)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def remove_blob(pod: PodDirectory, digest: str) -> None:
    for path in (pod.blob(digest), *pod.blob(digest).iterdir()):
        path.chmod(0o755)
    files.remove_tree(str(pod.blob(digest)))


def blob_gone(engine: Engine, _systemd: FakeSystemd) -> None:
    remove_blob(engine.pod, engine.digest)


def byte_rots(engine: Engine, _systemd: FakeSystemd) -> None:
    overwrite(engine.pod.blob(engine.digest) / WEIGHTS, b"weightz")


def file_laid_beside(engine: Engine, _systemd: FakeSystemd) -> None:
    blob = engine.pod.blob(engine.digest)
    blob.chmod(0o755)
    (blob / "tokenizer.json").write_bytes(b"{}")
    blob.chmod(0o555)


def unit_edited(engine: Engine, _systemd: FakeSystemd) -> None:
    path = engine.pod.units / UNIT
    path.write_text(path.read_text() + "# mine\n")


def unit_gone(engine: Engine, _systemd: FakeSystemd) -> None:
    (engine.pod.units / UNIT).unlink()


def secrets_edited(engine: Engine, _systemd: FakeSystemd) -> None:
    (engine.pod.root / "secrets" / f"{ENGINE}.env").write_text('# revision 0\nVLLM_API_KEY="mine"\n')


def stopped(_engine: Engine, systemd: FakeSystemd) -> None:
    systemd._stop(systemd.units[UNIT])


def disabled(_engine: Engine, systemd: FakeSystemd) -> None:
    systemd.units[UNIT].enabled = False


def other_ids(_engine: Engine, systemd: FakeSystemd) -> None:
    del systemd.units[UNIT].behaviour["serve"]["m1"]


def more_ids(_engine: Engine, systemd: FakeSystemd) -> None:
    systemd.units[UNIT].behaviour["serve"]["sneaked-in"] = "/tmp/x"


def other_vllm(_engine: Engine, systemd: FakeSystemd) -> None:
    systemd.vllm = "0.33.1"


# What somebody does → what is told of it, and whether the engine has to be started again for it.
ROWS: dict[Callable[[Engine, FakeSystemd], None], tuple[dict[str, str], bool]] = {
    blob_gone: ({"blob of m1": "{digest} is gone"}, False),
    byte_rots: ({"blob of m1": "{digest} was altered"}, True),
    file_laid_beside: ({"blob of m1": "{digest} was altered: not of it is tokenizer.json"}, True),
    unit_edited: ({"unit": "was edited by hand"}, True),
    unit_gone: ({"unit": "is gone"}, True),
    secrets_edited: ({"secrets": "are gone or were edited by hand"}, True),
    stopped: ({"engine": "does not run: inactive (dead)"}, True),
    disabled: ({"at boot": "it would not start: its unit is not enabled"}, False),
    other_ids: ({"serves": "/v1/models does not list m1"}, True),
    more_ids: ({"serves": "/v1/models lists sneaked-in, which is not declared"}, True),
    other_vllm: ({"vLLM": "0.33.1 is installed, and 0.33.0 was proven"}, True),
}


def test_going_back_proves_nothing_of_a_vllm_that_was_exchanged_meanwhile(
    engine: Engine, pod: PodDirectory, systemd: FakeSystemd
) -> None:
    systemd.vllm = "0.33.0"
    pod.run("activate", stdin=engine.document("m1"))
    systemd.vllm = "0.33.1"
    engine.fails(crash=["OSError: no model"])
    assert drift(pod)["vLLM"] == "0.33.1 is installed, and 0.33.0 was proven"


@pytest.mark.parametrize("harm", ROWS, ids=lambda harm: harm.__name__)
def test_each_row_is_told_and_mended_by_the_same_verbs(
    harm: Callable[[Engine, FakeSystemd], None], engine: Engine, pod: PodDirectory, systemd: FakeSystemd
) -> None:
    systemd.vllm = "0.33.0"
    document = engine.document("m1")
    pod.run("activate", stdin=document)
    assert drift(pod) == {}
    told, restarts = ROWS[harm]

    harm(engine, systemd)

    assert drift(pod) == {what: how.format(digest=engine.digest) for what, how in told.items()}
    assert drift(pod) != {}, "looking mends nothing"
    size = len(bundle())
    missing = pod.run("missing", stdin={"bundles": {engine.digest: size}}).result["missing"]
    assert missing == ({engine.digest: 0} if "blob of m1" in told else {})
    if missing:
        line = {"bundles": [{"digest": engine.digest, "size": size, "offset": 0}]}
        sent = pod.run("receive-all", stdin=json.dumps(line).encode() + b"\n" + bundle())
        assert sent.result == {"received": {engine.digest: size}}
    assert pod.place({"m1": engine.digest}).status == 0
    assert pod.run("activate", stdin=document).result["restarted"] is restarts
    assert drift(pod) == {}
    assert pod.run("activate", stdin=document).result["restarted"] is False, "once is enough"


def test_an_engine_that_lists_other_ids_is_not_waited_for(
    engine: Engine, systemd: FakeSystemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lists what it loaded: half an hour of waiting would change nothing."""
    engine.activate("m1")
    other_ids(engine, systemd)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it is waited for"))
    document = engine.document("m1")
    assert engine.pod.run("activate", stdin=document).lines[0] == (
        "the engine runs but is not ready, so it is started again: /v1/models does not list m1"
    )


def test_several_are_told_one_by_one(engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    engine.activate("m1", "m2")
    for harm in (blob_gone, unit_edited, disabled, stopped):
        harm(engine, systemd)
    assert drift(pod) == {
        "blob of m1, m2": f"{engine.digest} is gone",
        "unit": "was edited by hand",
        "engine": "does not run: inactive (dead)",
        "at boot": "it would not start: its unit is not enabled",
    }


OURS = names.engine_of("prod", "org/base")


def test_references_that_are_not_to_what_is_served(engine: Engine, pod: PodDirectory) -> None:
    """What a killed `up` placed, that nobody wants any more."""

    def told() -> dict[str, str]:
        found: dict[str, str] = pod.run("intact", "--engine", OURS).result["drift"]
        return found

    other = pod.stage(bundle(b"other"))
    document = engine.document("m1", "m2", engine=OURS)
    pod.place({"m1": engine.digest, "m2": engine.digest})
    assert pod.run("activate", stdin=document).status == 0
    assert told() == {}

    pod.place({"m1": other, "m3": engine.digest})
    assert told() == {
        "reference of m1": f"is to {other}, and {engine.digest} is served",
        "reference of m2": "is gone",
        "reference of m3": f"is to {engine.digest}, which is not served",
    }

    pod.place({})
    assert told() == {"reference of m1": "is gone", "reference of m2": "is gone"}

    pod.place({"m1": engine.digest, "m2": engine.digest})
    pod.place({"of-another": other}, stack="other")
    assert told() == {}
    (pod.root / "refs/prod/m1").write_text("{")
    assert list(told()) == ["references"]


def test_an_engine_that_is_not_there_or_was_never_proven(engine: Engine, pod: PodDirectory) -> None:
    assert drift(pod) == {"activation": "nothing of this engine is on the pod"}
    engine.activate("m1")
    (pod.root / "units" / ENGINE / "1" / "proven").unlink()
    assert drift(pod) == {"activation": "the last one did not end well"}


def test_an_engine_of_an_earlier_release_has_no_version_to_differ_from(
    engine: Engine, pod: PodDirectory, systemd: FakeSystemd
) -> None:
    engine.activate("m1")
    systemd.vllm = "0.33.1"
    assert drift(pod) == {}
    engine.activate("m1")
    assert (pod.root / "units" / ENGINE / "1" / "vllm").read_text() == "0.33.1"


def test_an_altered_blob_that_somebody_removes_comes_back_as_one_that_is_gone(
    engine: Engine, pod: PodDirectory, systemd: FakeSystemd
) -> None:
    engine.activate("m1")
    byte_rots(engine, systemd)
    assert drift(pod) == {"blob of m1": f"{engine.digest} was altered"}
    remove_blob(pod, engine.digest)
    pod.stage(bundle())
    pod.place({"m1": engine.digest})
    assert drift(pod) == {}


def test_an_altered_blob_that_nobody_needs_any_more_leaves_no_mark(
    engine: Engine, pod: PodDirectory, systemd: FakeSystemd
) -> None:
    engine.activate("m1")
    byte_rots(engine, systemd)
    drift(pod)
    assert pod.run("verify").result == {"ok": [], "rotten": [engine.digest], "strays": []}
    pod.run("deactivate", "--engine", ENGINE)
    pod.place({})
    assert list((pod.root / "staging").iterdir()) == []


# --- status -------------------------------------------------------------------------------------------------


def test_the_status_of_a_pod(engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    systemd.vllm = "0.33.0"
    systemd.gpus = ["NVIDIA H200, 1024, 143771", "Odd, one, [N/A], 80"]
    pod.run("secrets", stdin={"engine": ENGINE, "secrets": {"VLLM_API_KEY": "a canary"}})
    engine.activate("m1", key="a canary")
    calls = list(systemd.calls)
    before = pod.snapshot()

    found = status(pod)

    disk = found.pop("disk")
    assert 0 < disk["freeBytes"] < disk["totalBytes"]
    assert found.pop("machineId") == Path("/etc/machine-id").read_text().strip()
    since = found["engines"][0].pop("since")
    assert abs(time.time() - 60 - since) < 5
    assert found == {
        "gpus": [
            {"name": "NVIDIA H200", "usedMiB": 1024, "totalMiB": 143771},
            {"name": "Odd, one", "usedMiB": None, "totalMiB": 80},
        ],
        "engines": [
            {
                "engine": ENGINE, "unit": UNIT, "stack": "prod", "generation": 1, "state": "active (running)",
                "enabled": True, "models": ["m1", "org/base"], "vllm": "0.33.0", "drift": {},
            }
        ],
    }  # fmt: skip
    assert "canary" not in json.dumps(found)
    assert (pod.snapshot(), systemd.calls) == (before, calls), "it is only looked at"


def test_the_status_of_an_empty_pod(pod: PodDirectory) -> None:
    found = status(pod)
    assert (found["engines"], found["gpus"]) == ([], [])
    assert not pod.root.exists()


def test_a_gpu_that_hangs_hides_nothing_else(
    engine: Engine, pod: PodDirectory, systemd: FakeSystemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.activate("m1")

    def hangs(*argv: str, seconds: float = 300.0) -> programs.Ran:
        if argv[0] != "nvidia-smi":
            return systemd.run(*argv)
        assert seconds < 10, "lora status gives a pod 20 seconds"
        return programs.Ran(124, "", "it did not end")

    monkeypatch.setattr(programs, "run", hangs)
    found = status(pod)
    assert found["gpus"] == [{"name": "nvidia-smi does not answer", "usedMiB": None, "totalMiB": None}]
    assert found["engines"][0]["models"] == ["m1", "org/base"]


def test_the_status_waits_for_no_lock(engine: Engine, pod: PodDirectory) -> None:
    engine.activate("m1")
    store = Store(str(pod.root), str(pod.units))
    with store.lock("another"), store.lock_engine(ENGINE, "another"):
        assert status(pod)["engines"][0]["drift"] == {}


def test_the_status_tells_drift_by_sizes_alone(engine: Engine, pod: PodDirectory, systemd: FakeSystemd) -> None:
    header = json.dumps({"__metadata__": {}, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    tensors = struct.pack("<Q", len(header)) + header + b"1234"
    engine.digest = pod.stage(bundle(tensors))
    engine.root = str(pod.blob(engine.digest))
    pod.place({"m1": engine.digest})
    engine.activate("m1")

    def told() -> dict[str, str]:
        return dict(status(pod)["engines"][0]["drift"])

    assert told() == {}
    weights = pod.blob(engine.digest) / WEIGHTS
    overwrite(weights, tensors[:-4] + b"4321")
    assert told() == {}, "that takes reading it, which a refresh does"
    overwrite(weights, tensors[:-1])
    assert told() == {"blob of m1": f"{engine.digest} was altered"}
    overwrite(weights, tensors)
    overwrite(pod.blob(engine.digest) / CONFIG, b"")
    assert told() == {"blob of m1": f"{engine.digest} was altered"}
    remove_blob(pod, engine.digest)
    stopped(engine, systemd)
    assert told() == {
        "blob of m1": f"{engine.digest} is gone",
        "engine": "does not run: inactive (dead)",
    }
    assert status(pod)["engines"][0]["models"] is None


def test_a_blob_that_only_a_reference_names(engine: Engine, pod: PodDirectory) -> None:
    engine.activate("m1")
    other = pod.stage(bundle(b"other"))
    pod.place({"m1": other})
    remove_blob(pod, other)
    assert drift(pod) == {"blob of m1": f"{other} is gone"}


def test_an_activation_that_is_under_way_is_not_one_that_ended_badly(engine: Engine, pod: PodDirectory) -> None:
    engine.activate()
    (pod.root / "units" / ENGINE / "1" / "proven").unlink()
    store = Store(str(pod.root), str(pod.units))
    with store.lock_engine(ENGINE, "activate for stack prod"):
        (told,) = drift(pod).values()
        assert re.fullmatch(r"one is under way \(pid \d+, activate for stack prod.*, since .* UTC\)", told), told
    assert drift(pod) == {"activation": "the last one did not end well"}
