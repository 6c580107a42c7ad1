"""Killed, or without power, at every step of every verb: nobody ever reads half of anything, and the next run ends as
if nothing had happened."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from components.on_pod.podctl import preparing, programs, waiting
from components.on_pod.podctl.programs import Ran
from tests.unit.podctl import faults
from tests.unit.podctl.engines import ENGINE, Engine
from tests.unit.podctl.fake_s3 import S3
from tests.unit.podctl.fake_systemd import FakeSystemd
from tests.unit.podctl.pods import WEIGHTS, Answer, PodDirectory, bundle, digest_of

TARS = {digest_of(tar): tar for tar in map(bundle, (b"1" * 1500, b"2" * 1500, b"3" * 1500))}
ONE, TWO, THREE = TARS
PROGRAM = "print('podctl')\n# the end\n"
BASE = "org/base"
ARRIVING = ("receive-all", "fetch")


class World:
    """A pod with an engine, made anew as often as it is destroyed; `verb` and `document` are what is run on it."""

    def __init__(self, pod: PodDirectory, port: int, s3: S3) -> None:
        self.pod, self.port, self.s3 = pod, port, s3
        self.systemd = FakeSystemd(pod.units)
        self.engine: Engine
        self.argv: tuple[str, ...] = ()
        self.stdin: Any = b""

    def begin(self, scenario: Callable[[World], None]) -> None:
        self.systemd.close()
        faults.clear(self.pod.root.parent)
        self.pod.units.mkdir()
        self.systemd = FakeSystemd(self.pod.units)
        scenario(self)

    def then(self, *argv: str, stdin: Any = b"") -> None:
        self.argv, self.stdin = argv, stdin

    def killed(self, at: int | None) -> faults.Ended:
        return faults.run(self.pod, *self.argv, stdin=self.stdin, kill_at=at, others=self.run)

    def run(self, *argv: str, **_: object) -> Ran:
        version = Ran(0, "systemd 252\n", "")
        return version if argv[-1] == "--version" else self.systemd.run(*argv)

    def again(self) -> Answer:
        """What the next `pulumi up` does: bundles are sent from where they were cut."""
        if self.argv[0] == "receive-all":
            sizes = {digest: len(TARS[digest]) for digest in (ONE, TWO)}
            missing = self.pod.run("missing", stdin={"bundles": sizes}).result["missing"]
            return self.pod.run("receive-all", stdin=stream(missing))
        return self.pod.run(*self.argv, stdin=self.stdin)

    def end(self) -> dict[str, bytes]:
        """What there is at last: of bundles that arrived, once they are placed."""
        if self.argv[0] in ARRIVING:
            placed = self.pod.place({"a": ONE, "b": TWO})
            assert placed.status == 0, placed
            assert list((self.pod.root / "staging").iterdir()) == []
        return faults.settled(self.pod)

    def boot(self, switched: list[str]) -> None:
        """Everything that ran is gone, and what is enabled starts. `switched` is what systemctl was told meanwhile."""
        self.systemd.close()
        enabled = {name: unit.enabled for name, unit in self.systemd.units.items()}
        enabled.update((line.split()[-1], " enable " in line) for line in switched)
        for name in enabled:
            if enabled[name] and (self.pod.units / name).exists():
                self.systemd.run("systemctl", "--no-pager", "enable", "--now", name)


def stream(offsets: dict[str, int]) -> bytes:
    head = [{"digest": d, "size": len(TARS[d]), "offset": offset} for d, offset in offsets.items()]
    return json.dumps({"bundles": head}).encode() + b"\n" + b"".join(TARS[d][offset:] for d, offset in offsets.items())


def sends(world: World) -> None:
    world.then("receive-all", stdin=stream({ONE: 0, TWO: 0}))


def fetches(world: World) -> None:
    world.then("fetch", stdin={"bundles": [world.s3.bundle(ONE), world.s3.bundle(TWO)]})


def asks(world: World) -> None:
    stage(world, ONE, TWO)
    world.pod.place({"a": ONE})
    world.then("missing", stdin={"bundles": {ONE: len(TARS[ONE]), THREE: 9}})


def stage(world: World, *digests: str) -> None:
    for digest in digests:
        world.pod.stage(TARS[digest])


def places_the_first(world: World) -> None:
    stage(world, ONE, TWO)
    world.then("place", stdin={"stack": "prod", "base": BASE, "models": {"a": ONE, "b": TWO}})


def replaces_one(world: World) -> None:
    stage(world, ONE, TWO, THREE)
    world.pod.place({"a": ONE, "b": TWO})
    stage(world, THREE)
    world.then("place", stdin={"stack": "prod", "base": BASE, "models": {"b": THREE}})


def mends_a_blob(world: World) -> None:
    stage(world, ONE)
    world.pod.place({"a": ONE})
    world.pod.blob(ONE).chmod(0o755)
    (world.pod.blob(ONE) / WEIGHTS).unlink()
    (world.pod.root / "refs/prod/a").unlink()  # so that what is not whole is nobody's
    stage(world, ONE)
    world.then("place", stdin={"stack": "prod", "base": BASE, "models": {"a": ONE}})


def mends_an_altered_blob(world: World) -> None:
    """Its engine loaded what is there now, and has to be started again whenever it was killed."""
    engine = with_engine(world, "a")
    path = world.pod.blob(engine.digest) / WEIGHTS
    path.chmod(0o644)
    path.write_bytes(b"weightz")
    assert world.pod.run("intact", "--engine", ENGINE).result["drift"] != {}
    world.pod.stage(bundle())
    world.then("place", stdin={"stack": "prod", "base": BASE, "models": {"m1": engine.digest}})


def unplaces(world: World) -> None:
    stage(world, ONE, TWO)
    world.pod.place({"a": ONE, "b": TWO})
    world.pod.place({"c": TWO}, stack="other")
    world.then("unplace", "--stack", "prod", "--base", BASE)


def keeps_secrets(world: World) -> None:
    world.then("secrets", stdin={"engine": ENGINE, "secrets": {"VLLM_API_KEY": "k"}})


def keeps_a_private_key(world: World) -> None:
    tls = {"name": "a" * 16, "key": "-----BEGIN PRIVATE KEY-----\n"}
    world.then("secrets", stdin={"engine": ENGINE, "secrets": {}, "tls": tls})


def with_engine(world: World, *generations: str) -> Engine:
    """An engine that has been through these sets of models, the last of which it serves."""
    secrets = {"engine": ENGINE, "secrets": {"VLLM_API_KEY": "k"}}
    revision = world.pod.run("secrets", stdin=secrets).result["revision"]
    world.engine = Engine(world.pod, world.port)
    for model in generations:
        answer = world.pod.run("activate", stdin=world.engine.document("m1", model, revision=revision, key="k"))
        assert answer.status == 0, answer
    world.pod.run("secrets", stdin={"engine": ENGINE, "secrets": {"VLLM_API_KEY": "k2"}})
    return world.engine


def activates_the_first(world: World) -> None:
    engine = with_engine(world)
    world.then("activate", stdin=engine.document("m1", key="k2"))


def activates_another(world: World) -> None:
    engine = with_engine(world, "a", "b", "c")
    world.then("activate", stdin=engine.document("m1", "d", key="k2"))


def goes_back(world: World) -> None:
    engine = with_engine(world, "a", "b")
    world.then("activate", stdin=engine.document("m1", "c", die=["it dies"]))


def never_serves(world: World) -> None:
    engine = with_engine(world)
    world.then("activate", stdin=engine.document("m1", die=["it dies"]))


def takes_anothers_place(world: World) -> None:
    engine = with_engine(world, "a")
    world.then("activate", stdin=engine.document("m1", engine="prod-base-2"))


def deactivates(world: World) -> None:
    with_engine(world, "a", "b")
    world.pod.run("unplace", "--stack", "prod", "--base", BASE)
    world.then("deactivate", "--engine", ENGINE)


def forgets_secrets(world: World) -> None:
    with_engine(world, "a")
    world.then("unsecret", "--engine", ENGINE)


def leaves(world: World) -> None:
    with_engine(world, "a")
    world.then("leave", "--engine", ENGINE)


def removes(world: World) -> None:
    stage(world, ONE, TWO)
    world.pod.place({"a": ONE})
    world.pod.run("prepare", stdin=PREPARE)
    (world.pod.root / "refs/prod/a").unlink()
    world.then("remove")


def prepares(world: World) -> None:
    world.then("prepare", stdin=PREPARE)


NEEDS = {"diskGiB": 0.0, "shmMiB": 0, "gpu": False, "python": None, "vllm": None, "base": None}
PREPARE = {"podctl": PROGRAM, "sha256": hashlib.sha256(PROGRAM.encode()).hexdigest(), "needs": NEEDS}
NOT_WHOLE = (mends_a_blob, mends_an_altered_blob)
SCENARIOS = [
    sends, fetches, asks, places_the_first, replaces_one, mends_a_blob, mends_an_altered_blob, unplaces,
    keeps_secrets, keeps_a_private_key, activates_the_first, activates_another, goes_back, never_serves,
    takes_anothers_place, deactivates, forgets_secrets, leaves, removes, prepares,
]  # fmt: skip


@pytest.fixture
def world(pod: PodDirectory, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(waiting, "PAUSES", ())
    monkeypatch.setattr(preparing, "pid_1_fault", lambda: "")
    monkeypatch.setattr(preparing, "unseen", lambda *_: ())
    s3 = S3(TARS)
    world = World(pod, port, s3)
    monkeypatch.setattr(programs, "run", world.run)
    yield world
    world.systemd.close()
    s3.close()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_any_step(scenario: Callable[[World], None], world: World) -> None:
    world.begin(scenario)
    whole = world.killed(None)
    assert whole.answer is not None
    assert faults.wrong(world.pod) == []
    ended = world.end()

    for at, step in enumerate(whole.steps):
        world.begin(scenario)
        if world.argv[0] not in ARRIVING:
            assert world.killed(at).answer is None, step
        elif world.killed(at).answer is not None:
            continue  # two threads take turns as they like, and some of their steps are many or few
        allowed = faults.wrong(world.pod)
        assert scenario in NOT_WHOLE or allowed == [], f"killed before step {at}, {step}"
        again = world.again()
        assert again.status == whole.answer.status, (step, again)
        assert faults.wrong(world.pod) == [], step
        assert world.end() == ended, f"killed before step {at}, {step}"


def test_what_arrived_does_not_come_again_wherever_it_was_killed(world: World) -> None:
    sizes = {digest: len(TARS[digest]) for digest in (ONE, TWO)}
    pieces = [min(faults.PIECE, size - at) for size in sizes.values() for at in range(0, size, faults.PIECE)]
    world.begin(sends)
    for at in range(len(world.killed(None).steps)):
        world.begin(sends)
        steps = world.killed(at).steps
        read = sum(step.what == "read" for step in steps[:-1])
        missing = world.pod.run("missing", stdin={"bundles": sizes}).result["missing"]
        here = sum(sizes.values()) - sum(sizes[digest] - offset for digest, offset in missing.items())
        # Of two threads one may be killed between the read of a piece and its write.
        assert here >= sum(pieces[: max(0, read - 1)]), f"killed before step {at}, {steps[-1]}"


@pytest.mark.parametrize("before", [("good",), ("older", "good")])
def test_a_rollback_that_was_killed_and_is_run_again_goes_one_step_back(before: tuple[str, ...], world: World) -> None:
    def rolls_back(world: World) -> None:
        with_engine(world, *before, "bad")
        world.then("rollback", "--engine", ENGINE)

    world.begin(rolls_back)
    whole = world.killed(None)
    assert whole.answer is not None
    assert sorted(whole.answer.result["models"]) == ["good", "m1", "org/base"]
    ended = faults.settled(world.pod)
    for at, step in enumerate(whole.steps):
        world.begin(rolls_back)
        world.killed(at)
        assert faults.wrong(world.pod) == [], step
        if faults.settled(world.pod, hidden=False) == ended:
            break  # it is done, and whoever asks again asks for one more
        again = world.again()
        assert (again.status, again.result) == (0, whole.answer.result), (step, again)
        assert faults.settled(world.pod) == ended, step


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_without_power_at_any_step(scenario: Callable[[World], None], world: World) -> None:
    """What was not fsynced in time may be gone; what a verb answered for is not."""
    world.begin(scenario)
    disk = faults.Disk(world.pod.root.parent)
    whole = world.killed(None)
    assert whole.answer is not None
    answered = faults.settled(world.pod)
    ended = world.end()

    seen = set()
    switched: list[str] = []
    for step in whole.steps:
        disk.do(step)
        if " enable " in step.what or " disable " in step.what:
            switched.append(step.what)
        for tree in disk.after_a_cut():
            state = (step.what == "answer", frozenset(tree.items()))
            if state in seen:
                continue
            seen.add(state)
            world.begin(scenario)
            faults.write_tree(world.pod.root.parent, tree)
            assert scenario in NOT_WHOLE or faults.wrong(world.pod, modes=False) == [], f"after {step}"
            if step.what == "answer":
                assert faults.settled(world.pod, hidden=False) == answered, "its answer was too early"
            world.boot(switched)
            again = world.again()
            assert again.status == whole.answer.status, (step, again)
            assert faults.wrong(world.pod) == [], step
            assert world.end() == ended, step
