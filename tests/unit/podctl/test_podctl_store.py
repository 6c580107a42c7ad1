"""What a pod keeps: references, blobs, and what may be thrown away."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from components.on_pod.podctl import blobs, command_line, files, tars, waiting
from components.on_pod.podctl.store import Store
from tests.unit.podctl.pods import WEIGHTS, PodDirectory, bundle, digest_of

ONLY = "letters, digits, '.', '_' and '-' only"
ONE, TWO, THREE = (digest_of(bundle(name)) for name in (b"1", b"2", b"3"))


@pytest.fixture
def stocked(pod: PodDirectory) -> PodDirectory:
    """A pod with three bundles staged."""
    for weights in (b"1", b"2", b"3"):
        pod.stage(bundle(weights))
    return pod


def refs(pod: PodDirectory) -> dict[str, str]:
    found = {}
    for path in sorted((pod.root / "refs").glob("*/*")):
        found[f"{path.parent.name}/{path.name}"] = json.loads(path.read_text())["digest"]
    return found


def test_place_unpacks_and_refers(stocked: PodDirectory) -> None:
    answer = stocked.place({"b": TWO, "a": ONE})

    assert answer == (
        0,
        {"unpacked": sorted([ONE, TWO]), "dropped": [], "collected": []},
        [f"{digest} is unpacked" for digest in sorted([ONE, TWO])],
    )
    assert refs(stocked) == {"prod/a": ONE, "prod/b": TWO}
    assert stocked.blobs() == {ONE, TWO}
    assert (stocked.root / "refs/prod/a").read_text() == f'{{"base": "org/base", "digest": "{ONE}"}}\n'


def test_many_bundles_fill_no_log(stocked: PodDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = sorted([ONE, TWO, THREE])
    monkeypatch.setattr(blobs, "SAID_ONE_BY_ONE", 1)
    assert stocked.place({"a": ONE, "b": TWO, "c": THREE}).lines == [f"{first} is unpacked"]


def test_many_bundles_are_counted_where_they_take_long(stocked: PodDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "SAID_ONE_BY_ONE", 0)
    monkeypatch.setattr(waiting, "SAY_SECONDS", -1.0)
    assert stocked.place({"a": ONE, "b": TWO, "c": THREE}).lines == [
        f"{done} of 3 bundles are unpacked" for done in (1, 2, 3)
    ]


def test_placing_again_finds_nothing_to_do(stocked: PodDirectory) -> None:
    stocked.place({"a": ONE})
    before = stocked.snapshot()

    answer = stocked.place({"a": ONE})

    assert answer == (0, {"unpacked": [], "dropped": [], "collected": []}, [])
    assert stocked.snapshot() == before


def test_a_model_that_leaves_takes_its_blob_along(stocked: PodDirectory) -> None:
    stocked.place({"a": ONE, "b": TWO})

    answer = stocked.place({"a": ONE})

    assert answer.result == {"unpacked": [], "dropped": ["b"], "collected": [TWO]}
    assert (refs(stocked), stocked.blobs()) == ({"prod/a": ONE}, {ONE})


def test_two_models_on_one_digest(stocked: PodDirectory) -> None:
    assert stocked.place({"a": ONE, "b": ONE}).result["unpacked"] == [ONE]

    answer = stocked.place({"b": ONE})

    assert (answer.result["dropped"], answer.result["collected"]) == (["a"], [])
    assert (refs(stocked), stocked.blobs()) == ({"prod/b": ONE}, {ONE})


def test_two_stacks_on_one_digest(stocked: PodDirectory) -> None:
    stocked.place({"a": ONE}, stack="prod")
    stocked.place({"a": ONE}, stack="test")

    answer = stocked.run("unplace", "--stack", "test", "--base", "org/base")

    assert answer.result == {"dropped": ["a"], "collected": []}
    assert (refs(stocked), stocked.blobs()) == ({"prod/a": ONE}, {ONE})
    assert not (stocked.root / "refs/test").exists()
    assert stocked.run("unplace", "--stack", "prod", "--base", "org/base").result["collected"] == [ONE]
    assert stocked.run("unplace", "--stack", "prod", "--base", "org/base").result == {"dropped": [], "collected": []}


def test_other_bases_of_the_stack_are_left_alone(stocked: PodDirectory) -> None:
    stocked.place({"a": ONE}, base="org/one")

    answer = stocked.place({"b": TWO}, base="org/two")

    assert answer.result["dropped"] == []
    assert refs(stocked) == {"prod/a": ONE, "prod/b": TWO}
    assert stocked.run("unplace", "--stack", "prod", "--base", "org/one").result["dropped"] == ["a"]


def test_a_model_that_moved_to_another_base_is_not_dropped_by_its_old_one(stocked: PodDirectory) -> None:
    stocked.place({"a": ONE, "b": TWO}, base="org/one")
    stocked.place({"a": ONE}, base="org/two")

    answer = stocked.place({"b": TWO}, base="org/one")

    assert answer.result["dropped"] == []
    assert refs(stocked) == {"prod/a": ONE, "prod/b": TWO}


def test_a_digest_that_is_nowhere_changes_nothing(stocked: PodDirectory) -> None:
    stocked.place({"a": ONE})
    before = stocked.snapshot()
    nowhere = "sha256:" + "9" * 64

    answer = stocked.place({"a": TWO, "b": nowhere})

    assert (answer.status, answer.lines) == (
        1,
        [f"{nowhere}, the adapter of model b, is not on this pod: it must be sent first"],
    )
    assert stocked.snapshot() == before
    assert stocked.staged(TWO).exists()


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (b"{", "the document on stdin is not JSON"),
        (b"[]", "the document on stdin must be a JSON object"),
        ({"base": "b", "models": {}}, "the document's stack is missing: it must be text"),
        ({"stack": "a/b", "base": "b", "models": {}}, f'"a/b" is not a usable stack: {ONLY}'),
        ({"stack": "s", "base": 1, "models": {}}, "the document's base must be text"),
        ({"stack": "s", "base": "b", "models": []}, "the document's models must be an object"),
        ({"stack": "s", "base": "b", "models": {"../m": ONE}}, f'"../m" is not a usable model: {ONLY}'),
        (
            {"stack": "s", "base": "b", "models": {"m": None}},
            "null is not a digest: sha256: and 64 lowercase hex digits",
        ),
    ],
)
def test_a_document_that_makes_no_sense_is_refused(
    document: bytes | dict[str, object], sentence: str, pod: PodDirectory
) -> None:
    assert pod.run("place", stdin=document) == (1, {}, [sentence])
    assert not pod.root.exists()


def test_gc_leaves_what_it_does_not_know(stocked: PodDirectory) -> None:
    stocked.place({"a": ONE})
    for path in ("blobs/sha256/notes.txt", "blobs/other/x", "staging/notes.txt", "mine/x", "refs/prod/.hidden"):
        (stocked.root / path).parent.mkdir(parents=True, exist_ok=True)
        (stocked.root / path).write_text("mine")
        os.utime(stocked.root / path, (0, 0))

    assert stocked.run("gc").result == {"collected": []}
    assert (stocked.root / "blobs/sha256/notes.txt").read_text() == "mine"
    assert sorted(path.name for path in (stocked.root / "staging").iterdir()) == sorted(
        [stocked.staged(TWO).name, stocked.staged(THREE).name, "notes.txt"]
    )
    assert (stocked.root / "mine/x").exists()


def test_gc_takes_abandoned_uploads_after_a_week(stocked: PodDirectory) -> None:
    week = 7 * 86400
    part = stocked.staged("sha256:" + "a" * 64, ".tar.part")
    part.write_bytes(b"half")
    now = time.time()
    os.utime(stocked.staged(ONE), (now, now - week - 60))
    os.utime(part, (now, now - week - 60))
    os.utime(stocked.staged(TWO), (now, now - week + 60))

    stocked.run("gc")

    left = {path.name for path in (stocked.root / "staging").iterdir()}
    assert left == {stocked.staged(TWO).name, stocked.staged(THREE).name}


def test_gc_takes_what_a_killed_run_left(stocked: PodDirectory) -> None:
    for suffix in (".new", ".gone"):
        directory = stocked.staged(ONE, suffix)
        directory.mkdir()
        (directory / WEIGHTS).write_text("half")
        directory.chmod(0o555)

    stocked.run("gc")

    assert not stocked.staged(ONE, ".new").exists()
    assert not stocked.staged(ONE, ".gone").exists()


def test_a_damaged_reference_stops_collecting(stocked: PodDirectory) -> None:
    stocked.place({"a": ONE, "b": TWO})
    (stocked.root / "refs/prod/b").write_text("{")
    before = stocked.snapshot()

    answer = stocked.run("gc")

    assert (answer.status, answer.lines) == (
        1,
        [
            f"{stocked.root}/refs/prod/b is damaged, so nothing can be collected: "
            "run `pulumi up` for stack prod again, or remove that file"
        ],
    )
    assert stocked.snapshot() == before


def test_what_missing_answered_stays_until_place(stocked: PodDirectory) -> None:
    """Between the two, another stack's `unplace` may take the last reference to a blob that was not sent again."""
    stocked.place({"a": ONE}, stack="theirs")
    assert stocked.run("missing", stdin={"bundles": {ONE: len(bundle(b"1"))}}).result["missing"] == {}

    stocked.run("unplace", "--stack", "theirs", "--base", "org/base")
    assert stocked.blobs() == {ONE}
    assert stocked.place({"m": ONE}, stack="ours").status == 0
    assert stocked.run("unplace", "--stack", "ours", "--base", "org/base").result["collected"] == [ONE]


def test_a_promise_nobody_redeems_ends_after_a_week(stocked: PodDirectory) -> None:
    stocked.place({"a": ONE})
    stocked.run("missing", stdin={"bundles": {ONE: len(bundle(b"1"))}})
    os.utime(stocked.staged(ONE, ".claim"), (0, 0))

    assert stocked.run("unplace", "--stack", "prod", "--base", "org/base").result["collected"] == [ONE]


def test_kept_generations_and_installed_units_protect_blobs(stocked: PodDirectory) -> None:
    stocked.place({"a": ONE, "b": TWO, "c": THREE})
    generation = stocked.root / "units/engine/1"
    generation.mkdir(parents=True)
    (generation / "doc.json").write_text(json.dumps({"ready": {"models": {"a": str(stocked.blob(ONE))}}}))
    (stocked.units / "lora-pods-engine.service").write_text(f"ExecStart=vllm {stocked.blob(TWO)}")
    (stocked.units / "somebody-elses.service").write_text(f"ExecStart=vllm {stocked.blob(THREE)}")

    assert stocked.run("unplace", "--stack", "prod", "--base", "org/base").result["collected"] == [THREE]
    assert stocked.blobs() == {ONE, TWO}


def test_verify_finds_rotten_blobs(stocked: PodDirectory) -> None:
    stocked.place({"a": ONE, "b": TWO, "c": THREE})
    for digest in (TWO, THREE):
        stocked.blob(digest).chmod(0o755)
        (stocked.blob(digest) / WEIGHTS).chmod(0o644)
    (stocked.blob(TWO) / WEIGHTS).write_bytes(b"x")
    (stocked.blob(THREE) / WEIGHTS).unlink()
    (stocked.root / "blobs/sha256/notes.txt").write_text("mine")

    (stocked.blob(ONE) / "README.md").write_text("mine")
    (stocked.units / "lora-pods-e.service").write_text(f"ExecStart=vllm {stocked.blob(TWO)}\n")
    before = stocked.snapshot()

    answer = stocked.run("verify")

    stray = f"{stocked.blob(ONE)}/README.md"
    assert answer[:2] == (0, {"ok": [ONE], "rotten": sorted([TWO, THREE]), "strays": [stray]})
    altered = digest_of(bundle(b"x"))
    assert sorted(answer.lines) == sorted(
        [
            f"{TWO} is rotten: its bytes have the digest {altered}; needed by "
            "model b of stack prod, lora-pods-e.service",
            f"{THREE} is rotten: a file of it is missing; needed by model c of stack prod",
            f"to mend them: rm -r what is rotten in {stocked.root}/blobs/sha256, then pulumi up --refresh",
            f"{stray} is not ours and is left alone",
        ]
    )
    assert stocked.snapshot() == before


def test_a_blob_that_cannot_be_read_is_rotten(stocked: PodDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    stocked.place({"a": ONE})

    def broken(blob: str) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(tars, "hash_blob", broken)

    assert stocked.run("verify").lines[0] == (
        f"{ONE} is rotten: it cannot be read (Input/output error); needed by model a of stack prod"
    )


def test_a_blob_that_a_refresh_found_altered_has_not_lost_a_file(stocked: PodDirectory) -> None:
    stocked.place({"a": ONE})
    stocked.staged(ONE, ".altered").touch()
    (stocked.blob(ONE) / WEIGHTS).chmod(0o644)
    (stocked.blob(ONE) / WEIGHTS).write_bytes(b"x")
    assert stocked.run("verify").lines[0] == (
        f"{ONE} is rotten: its bytes have the digest {digest_of(bundle(b'x'))}; needed by model a of stack prod"
    )


def test_a_blob_that_is_collected_while_verify_runs_is_none(
    stocked: PodDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    stocked.place({"a": ONE})
    gone = digest_of(b"gone").removeprefix("sha256:")
    monkeypatch.setattr(Store, "blobs", lambda _: [ONE.removeprefix("sha256:"), gone])
    assert stocked.run("verify") == (0, {"ok": [ONE], "rotten": [], "strays": []}, [])


def test_gc_leaves_what_a_process_was_started_with(stocked: PodDirectory) -> None:
    """Whatever its unit says by now: somebody may have edited or removed that."""
    stocked.place({"a": ONE, "b": TWO})
    engine = subprocess.Popen(
        [sys.executable, "-c", "input()", json.dumps({"path": str(stocked.blob(ONE))})], stdin=subprocess.PIPE
    )
    try:
        assert stocked.run("unplace", "--stack", "prod", "--base", "org/base").result["collected"] == [TWO]
        assert stocked.blobs() == {ONE}
    finally:
        engine.communicate(b"\n")
    assert stocked.run("gc").result == {"collected": [ONE]}


def test_verify_knows_files_that_fill_their_blocks(pod: PodDirectory) -> None:
    digest = pod.stage(bundle(b"w" * 1024, b"c" * 512))
    pod.place({"a": digest})

    assert pod.run("verify").result == {"ok": [digest], "rotten": [], "strays": []}


def test_remove_waits_for_the_last_user(stocked: PodDirectory) -> None:
    stocked.place({"a": ONE})
    stocked.run("secrets", stdin={"engine": "e", "secrets": {}})
    before = stocked.snapshot()

    answer = stocked.run("remove")

    left = ["model a of stack prod", "engine e"]
    assert answer == (
        0,
        {"removed": False, "left": left},
        [f"others still use this pod, so nothing is removed: {', '.join(left)}"],
    )
    assert stocked.snapshot() == before

    stocked.run("unplace", "--stack", "prod", "--base", "org/base")
    stocked.run("unsecret", "--engine", "e")
    assert stocked.run("remove") == (0, {"removed": True, "left": []}, [])
    assert not stocked.root.exists()
    assert stocked.run("remove") == (0, {"removed": True, "left": []}, [])


def test_remove_tells_of_an_engine_once(stocked: PodDirectory) -> None:
    for value in "12":
        stocked.run("secrets", stdin={"engine": "prod-llama-3.1-8b-1", "secrets": {"A": value}})
    (stocked.root / "secrets/prod-llama-3.1-8b-1.env").write_text("")
    (stocked.root / "units/prod-llama-3.1-8b-1/1").mkdir(parents=True)

    assert stocked.run("remove").result == {"removed": False, "left": ["engine prod-llama-3.1-8b-1"]}


def test_remove_leaves_an_upload_alone_while_it_arrives(stocked: PodDirectory) -> None:
    """It may be another stack's. One that ended may be this stack's own, and must not keep it from being destroyed."""
    lock = stocked.staged(ONE, ".lock")
    with files.hold(str(lock), "receive"):
        assert stocked.run("remove").result == {"removed": False, "left": [f"upload of {ONE}"]}
        assert stocked.staged(ONE).exists()
    lock.write_text("pid 1, of a run that was killed")
    stocked.staged(ONE, ".claim").touch()
    stocked.staged(TWO, ".tar.part").touch()

    assert stocked.run("remove").result == {"removed": True, "left": []}
    assert not stocked.root.exists()


def test_two_removes_at_once_both_find_it_done(stocked: PodDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two bases of a machine: one waits for the other, which takes the lock's own directory away."""
    real = files.try_lock
    waited: list[tuple[int | None, str]] = []

    def taken_meanwhile(path: str) -> tuple[int | None, str]:
        if len(waited) < 2:
            # First somebody holds it, then it goes, before the waiter comes back and even between two of its steps.
            shutil.rmtree(stocked.root)
            waited.append(real(path))
            return waited[-1]
        return real(path)

    monkeypatch.setattr(files, "try_lock", taken_meanwhile)

    assert stocked.run("remove") == (0, {"removed": True, "left": []}, [])
    assert waited == [(None, ""), (None, "")]
    assert not stocked.root.exists()


def test_remove_leaves_files_that_are_not_ours(stocked: PodDirectory) -> None:
    (stocked.root / "notes.txt").write_text("mine")
    (stocked.root / ".lock-engine").write_text("pid 1, of a run that was killed")
    (stocked.root.parent / "big disk").mkdir()
    (stocked.root.parent / "big disk" / "theirs").write_text("theirs")
    (stocked.root / "venvs").symlink_to(stocked.root.parent / "big disk")

    answer = stocked.run("remove")

    assert (stocked.root.parent / "big disk" / "theirs").read_text() == "theirs"

    assert answer == (
        0,
        {"removed": True, "left": ["notes.txt"]},
        [f"{stocked.root} holds files that are not ours, so it stays: notes.txt"],
    )
    assert [path.name for path in stocked.root.iterdir()] == ["notes.txt"]


def test_remove_takes_the_homes_of_engines_that_never_served(stocked: PodDirectory) -> None:
    homes = stocked.root.parent
    (homes / "private").mkdir()
    for engine in ("dead", "served"):
        (homes / "private" / f"lora-pods-{engine}").mkdir()
        (homes / f"lora-pods-{engine}").symlink_to(f"private/lora-pods-{engine}")
    (stocked.units / "lora-pods-served.service").write_text("")
    (homes / "lora-pods-backup").mkdir()

    stocked.run("remove")

    assert sorted(path.name for path in homes.iterdir()) == ["lora-pods-backup", "lora-pods-served", "private", "units"]
    assert [path.name for path in (homes / "private").iterdir()] == ["lora-pods-served"]


@pytest.mark.parametrize(
    "argv", [["gc"], ["verify"], ["unplace", "--stack", "s", "--base", "b"], ["unsecret", "--engine", "e"], ["remove"]]
)
def test_undoing_on_an_empty_machine_makes_nothing(argv: list[str], pod: PodDirectory) -> None:
    assert pod.run(*argv).status == 0
    assert not pod.root.exists()


@pytest.mark.parametrize("argv", [[], ["dance"], ["receive-all", ONE], ["unplace", "--stack", "s"], ["intact"]])
def test_bad_usage_is_exit_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command_line.parse(argv)
    assert stopped.value.code == 2


def test_an_unforeseen_error_is_one_line_without_its_text(pod: PodDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(store: object, options: object) -> dict[str, object]:
        raise KeyError("canary")

    monkeypatch.setitem(command_line.OPTION_VERBS, "gc", broken)

    answer = pod.run("gc")

    assert answer.status == 1
    assert len(answer.lines) == 1
    assert answer.lines[0].startswith("podctl gc failed in a way nobody foresaw: KeyError in broken, line ")


def test_a_long_result_is_cut_short(stocked: PodDirectory) -> None:
    """Pulumi's command plugin can hang on a line over 64 KiB."""
    many = [f"m{index:04}" for index in range(300)]
    stocked.place(dict.fromkeys(many, ONE))

    answer = stocked.place({})

    assert answer.result == {"unpacked": [], "dropped": [*many[:100], "and 200 more"], "collected": [ONE]}
