"""`lora gc-store`: what it finds unneeded, what it keeps, and when it refuses. With moto's S3 in this process."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import boto3
import botocore.client
import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

from components import supply
from components.cli import lock
from components.cli.main import main
from components.cli.shown import shown_age
from components.core.sizes import shown_size
from components.store import BundleStore, Stored
from tests.components.test_lora_push import BUCKET, STORE, calls, edit, facts, key, objects, project, run
from tests.support.adapters import seeded_adapter

__all__ = ["calls", "project"]  # fixtures

LINE = f"{STORE}: {{}}; {{}} of them referred to (1 lock, 1 stack file, 1 deployed stack)"
BUNDLE = "pulumi-python:dynamic/lora-pods:AdapterBundle"


class Pulumi:
    """A program of that name, first on PATH, that answers from files and notes what it was asked."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        program = directory / "pulumi"
        program.write_text(
            f"#!{sys.executable}\n"
            "import pathlib, sys\n"
            f"here = pathlib.Path({str(directory)!r})\n"
            "with (here / 'asked').open('a') as asked: print(*sys.argv[1:], file=asked)\n"
            "answer = here / (sys.argv[4] + '.json' if sys.argv[2] == 'export' else 'stacks')\n"
            "if not answer.exists(): sys.exit('error: PULUMI_ACCESS_TOKEN must be set for login\\nmore')\n"
            "print(answer.read_text())\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.has()

    def has(self, **stacks: object) -> None:
        """These stacks, each with what `pulumi stack export` prints."""
        names = [{"name": name, "current": False} for name in stacks]
        (self.directory / "stacks").write_text(json.dumps(names))
        for name, state in stacks.items():
            (self.directory / name).parent.mkdir(exist_ok=True)
            (self.directory / f"{name}.json").write_text(state if isinstance(state, str) else json.dumps(state))

    def asked(self) -> list[str]:
        return (self.directory / "asked").read_text().splitlines()


def state(*digests: str) -> dict[str, Any]:
    resources = [
        {
            "urn": f"urn:pulumi:acme::lora-pods::lora-pods:index:Deployment${BUNDLE}::m{number}",
            "custom": True,
            "id": digest,
            "type": BUNDLE,
            "inputs": {"digest": digest, "size": 1},
        }
        for number, digest in enumerate(digests)
    ]
    return {"version": 3, "deployment": {"manifest": {}, "resources": resources}}


@pytest.fixture
def pulumi(tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> Pulumi:
    """One deployed stack that holds nothing."""
    pulumi = Pulumi(tmp_path / "bin")
    pulumi.has(acme=state())
    monkeypatch.setenv("PATH", f"{pulumi.directory}:{os.environ['PATH']}")
    run(lock)
    return pulumi


def digest(letter: str) -> str:
    return f"sha256:{letter * 64}"


def put(name: str, size: int = 1536, days: float = 40) -> None:
    """An object of this age; `name` is a digest or a key."""
    name = key(name) if name.startswith("sha256:") else name
    boto3.client("s3").put_object(Bucket=BUCKET, Key=name, Body=bytes(size))
    stored = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[BUCKET].keys[name]
    stored.last_modified -= timedelta(days=days)


def begin_upload(name: str) -> str:
    """One that nobody finishes; moto's are all from 2010."""
    upload: str = boto3.client("s3").create_multipart_upload(Bucket=BUCKET, Key=name)["UploadId"]
    return upload


def since_2010() -> str:
    return shown_age(datetime.now(timezone.utc) - datetime(2010, 11, 10, 20, 48, 33, tzinfo=timezone.utc))


def gc(*words: str, where: Sequence[str] = ("-s", "acme")) -> int:
    return main(["gc-store", *where, *words])


def told(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    out, err = capsys.readouterr()
    return out, err


@pytest.fixture(autouse=True)
def _quiet_start(pulumi: Pulumi, calls: Counter[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    calls.clear()


def test_it_lists_what_nothing_refers_to(
    project: Path, pulumi: Pulumi, calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    # In the lock; here, and retrained since it was locked; deployed; of nobody; of nobody, but young.
    locked = facts(project, "v1").digest
    seeded_adapter(project / "adapters" / "v1", seed=11)
    here = facts(project, "v1").digest
    for name, size, days in (
        (locked, 1, 40),
        (here, 1, 40),
        (digest("d"), 1, 40),
        (digest("a"), 1536, 40.5),
        (digest("b"), 10 << 20, 60),
        (digest("c"), 2, 29.9),
        ("team/sha256/README", 3, 400),
        ("team/other/" + "e" * 64 + ".tar", 3, 400),
        ("elsewhere/sha256/" + "e" * 64 + ".tar", 3, 400),
    ):
        put(name, size, days)
    pulumi.has(acme=state(digest("d")))
    before = objects()
    calls.clear()
    assert gc() == 0
    total = shown_size(1 + 1 + 1 + 1536 + (10 << 20) + 2)
    assert told(capsys) == (
        LINE.format(f"6 bundles ({total})", 3) + ", 1 other younger than 30d\n"
        f"  {digest('b')}  10.0 MiB  60d\n"
        f"  {digest('a')}  1.5 KiB  40d\n"
        f"--delete removes 2 bundles ({shown_size(1536 + (10 << 20))})\n",
        "",
    )
    assert calls == {"ListObjectsV2": 1, "ListMultipartUploads": 1}
    assert objects() == before
    assert pulumi.asked() == [
        "stack ls --json --non-interactive",
        "stack export --stack acme --non-interactive",
    ]


def test_delete_removes_that_and_nothing_else(
    project: Path, calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    locked = facts(project, "v1").digest
    foreign = ["team/sha256/README", "team/" + "e" * 64 + ".tar", "elsewhere/sha256/" + "e" * 64 + ".tar"]
    for name in (locked, digest("a"), digest("b"), *foreign):
        put(name)
    ours, theirs = begin_upload(key(digest("f"))), begin_upload("team/sha256/README")
    calls.clear()
    assert gc("--delete") == 0
    assert told(capsys) == (
        LINE.format("3 bundles (4.5 KiB)", 1) + "\n"
        f"  {digest('a')}  1.5 KiB  40d\n"
        f"  {digest('b')}  1.5 KiB  40d\n"
        f"  unfinished upload of {digest('f')}  {since_2010()}\n"
        "removed 2 bundles (3.0 KiB) and 1 unfinished upload\n",
        "",
    )
    assert calls == {"ListObjectsV2": 1, "ListMultipartUploads": 1, "DeleteObjects": 1, "AbortMultipartUpload": 1}
    assert set(objects()) == {key(locked), *foreign}
    left = boto3.client("s3").list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert [each["UploadId"] for each in left] == [theirs] != [ours]

    assert gc("--delete") == 0
    assert told(capsys) == (LINE.format("1 bundle (1.5 KiB)", 1) + "\nnothing to remove\n", "")


@pytest.mark.parametrize(
    ("age", "listed"), [("0d", "abc"), ("12h", "bc"), ("13h", "bc"), ("14h", "c"), ("2d", "c"), ("41d", "")]
)
def test_the_age_is_days_or_hours(age: str, listed: str, capsys: pytest.CaptureFixture[str]) -> None:
    for letter, days in (("a", 0), ("b", 13.5 / 24), ("c", 40.9)):
        put(digest(letter), days=days)
    assert gc("--older-than", age) == 0
    out, _ = told(capsys)
    assert {letter for letter in "abc" if digest(letter) in out} == set(listed)


@pytest.mark.parametrize("age", ["30", "d", "-1d", "1w", "999999d", "1.5d"])
def test_what_is_no_age_is_a_wrong_command(age: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gc(f"--older-than={age}")
    assert f"'{age}' is no age: give days or hours, such as 30d or 12h" in told(capsys)[1]


def test_another_stacks_lock_and_adapters_keep_theirs(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever store that stack uses, and whether or not its stack file is there or its pods are in order."""
    first, second = facts(project, "v1").digest, facts(project, "v2").digest
    stacks = project / "stacks"
    (stacks / "acme.lock.yaml").rename(stacks / "globex.lock.yaml")
    shutil.rmtree(project / "adapters" / "v2")
    seeded_adapter(project / "adapters" / "v3", seed=3)
    (stacks / "Pulumi.initech.yaml").write_text(
        "config:\n  lora-pods:pods:\n    - {base: b, host: TODO}\n  lora-pods:models:\n"
        "    - {id: m, base: b, adapter: ../adapters/v3}\n"
    )
    third = facts(project, "v3").digest
    for name in (first, second, third, digest("a")):
        put(name)
    assert gc() == 0
    assert told(capsys)[0].splitlines()[1:] == [
        f"  {digest('a')}  1.5 KiB  40d",
        "--delete removes 1 bundle (1.5 KiB)",
    ]


def test_whatever_a_state_names_is_kept(pulumi: Pulumi, capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter being made or replaced, or an old command's: of any stack."""
    pending = {"resource": {"type": BUNDLE, "inputs": {"digest": digest("b")}}, "type": "creating"}
    replaced = {**state(digest("c"))["deployment"]["resources"][0], "delete": True}
    deployment = {
        "resources": [replaced, {"type": "command:remote:Command", "inputs": {"stdin": f'{{"m": "{digest("d")}"}}'}}],
        "pending_operations": [pending],
    }
    pulumi.has(acme=state(), globex={"version": 3, "deployment": deployment})
    for letter in "abcd":
        put(digest(letter))
    assert gc() == 0
    out, err = told(capsys)
    assert err == ""
    assert out.startswith(
        f"{STORE}: 4 bundles (6.0 KiB); 3 of them referred to (1 lock, 1 stack file, 2 deployed stacks)\n"
        f"  {digest('a')}"
    )


STATES = {
    "no pulumi": "there is no pulumi on PATH to ask for what deployed stacks hold",
    "no login": "`pulumi stack ls` failed (PULUMI_ACCESS_TOKEN must be set for login)",
    "no stacks": "pulumi knows no stack of this project where it is logged in",
    "nonsense": "pulumi's list of stacks cannot be made sense of",
    "no state": "`pulumi stack export` failed (PULUMI_ACCESS_TOKEN must be set for login)",
    "odd state": "the state of stack globex cannot be made sense of",
}


@pytest.mark.parametrize("case", STATES)
def test_without_the_state_it_lists_with_a_warning_and_does_not_delete(
    case: str,
    pulumi: Pulumi,
    calls: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pulumi.has(acme=state(), globex={} if case == "odd state" else state())
    if case == "no pulumi":
        monkeypatch.setenv("PATH", str(pulumi.directory / "nowhere"))
    elif case == "no login":
        (pulumi.directory / "stacks").unlink()
    elif case == "no stacks":
        pulumi.has()
    elif case == "nonsense":
        (pulumi.directory / "stacks").write_text("Updating…")
    elif case == "no state":
        (pulumi.directory / "globex.json").unlink()
    put(digest("a"))
    calls.clear()

    assert gc("--delete") == 1
    assert told(capsys) == (
        "",
        f"nothing was removed, since {STATES[case]}; mend that (`pulumi login`?), or pass "
        "--without-state if no deployed stack needs more than the locks and stack files name\n",
    )
    assert calls == {}

    assert gc() == 0
    out, err = told(capsys)
    assert digest("a") in out
    assert "(1 lock, 1 stack file, 0 deployed stacks)" in out
    assert err == f"warning: {STATES[case]}\n"
    assert out.endswith("--delete removes 1 bundle (1.5 KiB), once nothing is warned of any more\n")

    assert gc("--delete", "--without-state") == 0
    assert told(capsys)[0].endswith("removed 1 bundle (1.5 KiB)\n")
    assert objects() == {}


UNREADABLE = {
    "stacks/acme.lock.yaml": (
        "models: {}\n<<<<<<< HEAD\n",
        "stacks/acme.lock.yaml: holds the markers of a merge conflict (line 2); write it anew where the adapters are: "
        "`lora lock -s acme`",
    ),
    "stacks/Pulumi.Pulumi.lock.yaml": (
        "models: {}\n<<<<<<< HEAD\n",
        "stacks/Pulumi.Pulumi.lock.yaml: not YAML: ",
    ),
    "stacks/Pulumi.globex.yaml": ("config: [", "stacks/Pulumi.globex.yaml: not YAML: "),
    "stacks/Pulumi.a.yaml": (
        "config:\n  lora-pods:modles: []\n",
        "stacks/Pulumi.a.yaml: modles: unknown key; known here: pods, models, ",
    ),
    "stacks/Pulumi.b.yaml": (
        "config:\n  Lora-pods:models: []\n",
        "stacks/Pulumi.b.yaml: Lora-pods:models: is read by nobody; our keys begin with lora-pods: ",
    ),
    "stacks/Pulumi.c.yaml": ("Config:\n  lora-pods:models: []\n", "stacks/Pulumi.c.yaml: Config: unknown key; "),
    "stacks/Pulumi.d.yaml": ("lora-pods\n", "stacks/Pulumi.d.yaml: must be a mapping with the key config"),
    "stacks/Pulumi.e.yaml": ("", "stacks/Pulumi.e.yaml: config: is missing or empty"),
    "stacks/Pulumi.f.yaml": ("encryptionsalt: v1:x\n", "stacks/Pulumi.f.yaml: config: is missing or empty"),
    "stacks/Pulumi.g.yaml": (
        "config:\n  lora-pods:models: []\n  lora-pods:models: []\n",
        "stacks/Pulumi.g.yaml: not YAML: lora-pods:models stands there twice (line 3)",
    ),
    "stacks/Pulumi.h.yaml": (
        "config:\n  lora-pods:store: http://team\n",
        "stacks/Pulumi.h.yaml: store: must be s3://BUCKET/PREFIX, ",
    ),
    "stacks/Pulumi.i.deploy.yaml": ("setings: {}\n", "stacks/Pulumi.i.deploy.yaml: setings: unknown key; "),
    "stacks/Pulumi.initech.yaml": (
        "config:\n  lora-pods:models: [{id: m, adapter: ../adapters/v9}]\n",
        "stacks/Pulumi.initech.yaml: models[0].base: is missing",
    ),
    "adapters/v1/adapter_config.json": ("{", "stacks/Pulumi.acme.yaml: models[1].adapter: "),
}


@pytest.mark.parametrize("file", UNREADABLE)
def test_what_cannot_be_read_may_name_anything(
    file: str, project: Path, calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text, reason = UNREADABLE[file]
    (project / file).write_text(text)
    put(digest("a"))
    calls.clear()
    for words in (["--delete"], ["--delete", "--without-state"]):
        assert gc(*words, where=["--store", STORE]) == 1
        out, err = told(capsys)
        assert out == ""
        assert err.startswith(f"nothing was removed, since what cannot be read may name any bundle: {reason}")
        assert err.count("\n") == 1
    assert calls == {}
    assert gc(where=["--store", STORE]) == 0
    out, err = told(capsys)
    assert digest("a") in out
    assert err.startswith(f"warning: {reason}")
    assert key(digest("a")) in objects()


@pytest.mark.parametrize("name", ["globex.lock.yaml", "Pulumi.globex.yaml", "Pulumi.globex.lock.yaml"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_link_to_nowhere_may_name_anything(
    kept: bool,
    name: str,
    project: Path,
    tmp_path_factory: pytest.TempPathFactory,
    calls: Counter[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = tmp_path_factory.mktemp("stacks") if kept else project / "stacks"
    (directory / name).symlink_to("nowhere")
    assert gc("--delete", *(["--keep", str(directory)] if kept else [])) == 1
    out, err = told(capsys)
    assert out == ""
    assert err == (
        "nothing was removed, since what cannot be read may name any bundle: "
        f"{directory.name}/{name}: a link to a file that is not there\n"
    )
    assert calls == {}


def test_files_that_are_named_like_stack_files(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lock of the stack Pulumi.x, the stack file of x.lock, what Pulumi Deployments has of x, and a skeleton."""
    stacks = project / "stacks"
    lock_text = (stacks / "acme.lock.yaml").read_text()
    locked = lock_text.replace(facts(project, "v1").digest, digest("b"))
    (stacks / "Pulumi.x.lock.yaml").write_text(locked)
    seeded_adapter(project / "adapters" / "v3", seed=3)
    third = facts(project, "v3").digest
    (stacks / "Pulumi.y.lock.yaml").write_text(
        "config:\n  lora-pods:models: [{id: m, base: b, adapter: ../adapters/v3}]\n"
    )
    (stacks / "Pulumi.x.deploy.yaml").write_text("settings:\n  sourceContext: {git: {branch: main}}\n")
    assert main(["new-stack", "initech"]) == 0
    capsys.readouterr()
    for name in (digest("a"), digest("b"), third):
        put(name)
    assert gc("--delete") == 0
    out, err = told(capsys)
    assert err == ""
    assert out.splitlines()[0].endswith("; 2 of them referred to (2 locks, 3 stack files, 1 deployed stack)")
    assert set(objects()) == {key(digest("b")), key(third)}


def test_what_came_back_into_use_meanwhile_is_kept(
    project: Path, pulumi: Pulumi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An old bundle is there already for `lora push`, and does not become younger by it."""
    for letter in "abc":
        put(digest(letter))
    stored = BundleStore.stored

    def and_meanwhile(store: BundleStore) -> Iterator[Stored]:
        yield from stored(store)
        file = project / "stacks" / "acme.lock.yaml"
        file.write_text(file.read_text().replace(facts(project, "v1").digest, digest("a")))
        pulumi.has(acme=state(digest("b")))

    monkeypatch.setattr(BundleStore, "stored", and_meanwhile)
    assert gc("--delete") == 0
    out, _ = told(capsys)
    assert out.splitlines()[4:] == [
        f"kept, since it is referred to by now: {digest('a')}",
        f"kept, since it is referred to by now: {digest('b')}",
        "removed 1 bundle (1.5 KiB)",
    ]
    assert set(objects()) == {key(digest("a")), key(digest("b"))}


def test_what_became_unreadable_meanwhile_may_name_anything(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(digest("a"))
    stored = BundleStore.stored

    def and_meanwhile(store: BundleStore) -> Iterator[Stored]:
        yield from stored(store)
        (project / "stacks" / "Pulumi.globex.yaml").write_text("")

    monkeypatch.setattr(BundleStore, "stored", and_meanwhile)
    assert gc("--delete") == 1
    assert told(capsys)[1].startswith("nothing was removed, since what cannot be read may name any bundle: ")
    assert key(digest("a")) in objects()


def test_a_stack_with_a_store_that_pulumi_does_not_know(
    project: Path, pulumi: Pulumi, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be deployed by another backend. What is here to be read is no stack, nor is one without a store lost."""
    stacks = project / "stacks"
    root = Path(__file__).resolve().parents[2] / "stacks"
    for name in ("Pulumi.example.yaml", "Pulumi.sandbox.yaml"):
        shutil.copy(root / name, stacks)
    put(digest("a"))
    text = (stacks / "Pulumi.acme.yaml").read_text()
    (stacks / "Pulumi.globex.yaml").write_text(text)
    (stacks / "Pulumi.initech.yaml").write_text(text)
    reason = (
        "pulumi does not know, where it is logged in, all stacks whose files here name a store: not globex, initech"
    )
    assert gc("--delete") == 1
    assert told(capsys) == (
        "",
        f"nothing was removed, since {reason}; mend that (`pulumi login`?), or pass --without-state if no deployed "
        "stack needs more than the locks and stack files name\n",
    )
    pulumi.has(**{"acme": state(), "team/globex": state()})
    assert gc() == 0
    assert told(capsys)[1] == f"warning: {reason.replace('globex, ', '')}\n"
    (stacks / "Pulumi.initech.yaml").unlink()
    assert gc("--delete") == 0
    out, err = told(capsys)
    assert (out.splitlines()[-1], err) == ("removed 1 bundle (1.5 KiB)", "")

    put(digest("a"))
    pulumi.has(other=state(digest("b")))
    put(digest("b"))
    assert gc("--delete", "--without-state") == 0
    assert set(objects()) == {key(digest("b"))}, "what states do say still counts"


def test_keep_names_locks_and_checkouts(
    project: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(project / "stacks", other / "stacks")
    shutil.copy(project / "Pulumi.yaml", other)
    lock_text = (project / "stacks" / "acme.lock.yaml").read_text()
    first, second = facts(project, "v1").digest, facts(project, "v2").digest
    theirs = lock_text.replace(first, digest("a")).replace(second, digest("b"))
    (other / "stacks" / "acme.lock.yaml").write_text(theirs)
    seeded_adapter(other / "adapters" / "v1", seed=21)
    unlocked = facts(other, "v1").digest
    old = other / "old.lock.yaml"
    old.write_text(lock_text.replace(first, digest("c")))
    for name in (*map(digest, "abcd"), unlocked):
        put(name)

    def listed(*words: str) -> set[str]:
        assert gc(*words) == 0
        return {line.split()[0] for line in told(capsys)[0].splitlines() if line.startswith("  sha256:")}

    everything = {*map(digest, "abcd"), unlocked}
    assert listed() == everything
    assert listed("--keep", str(old)) == everything - {digest("c")}
    assert listed("--keep", str(other)) == {digest("c"), digest("d")}
    assert listed("--keep", str(other / "stacks"), "--keep", str(old)) == {digest("d")}
    assert listed("--keep", str(other), str(old)) == {digest("d")}


@pytest.mark.parametrize("path", ["nowhere", "adapters", "Pulumi.yaml", "stacks/nobody.lock.yaml"])
def test_a_slip_in_keep_protects_nothing_and_is_told(
    path: str, calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gc("--delete", "--keep", path) == 2
    assert told(capsys) == (
        "",
        f"lora: --keep {path}: neither a lock (NAME.lock.yaml) nor a directory that holds locks or stack files\n",
    )
    assert calls == {}


def test_which_store(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put("team/sha256/" + "a" * 64 + ".tar")
    put("sha256/" + "b" * 64 + ".tar")
    assert gc(where=["--store", f"s3://{BUCKET}"]) == 0
    out, _ = told(capsys)
    assert digest("b") in out
    assert digest("a") not in out
    for words in ([], ["-s", "acme", "--store", STORE], ["--store", "s3:/team"]):
        with pytest.raises(SystemExit, match="2"):
            gc(where=words)
    assert gc(where=["-s", "globex"]) == 2
    capsys.readouterr()
    edit(project, "s3://", "http://")
    assert gc() == 1
    assert told(capsys)[1].startswith("stacks/Pulumi.acme.yaml: store: must be s3://")
    edit(project, f"  lora-pods:store: http://{BUCKET}/team\n", "")
    assert gc() == 1
    assert told(capsys)[1] == (
        "stacks/Pulumi.acme.yaml: names no store; set it: `pulumi config set store s3://BUCKET/PREFIX --stack acme`\n"
    )


def test_what_is_not_removed_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for letter in "ab":
        put(digest(letter))
    begin_upload(key(digest("f")))
    api_call = botocore.client.BaseClient._make_api_call
    denied = {"Code": "AccessDenied", "Message": "Access Denied"}

    def refusing(client: Any, operation: str, parameters: Any) -> Any:
        if operation == "DeleteObjects":
            parameters["Delete"]["Objects"] = [{"Key": key(digest("b"))}]
            api_call(client, operation, parameters)
            return {"Errors": [{"Key": key(digest("a")), **denied}]}
        if operation == "AbortMultipartUpload":
            raise botocore.exceptions.ClientError({"Error": denied}, operation)
        return api_call(client, operation, parameters)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", refusing)
    assert gc("--delete") == 1
    out, err = told(capsys)
    assert out.endswith("removed 1 bundle (1.5 KiB)\n")
    resource = f"arn:aws:s3:::{BUCKET}/team/sha256/*"
    assert err.splitlines() == [
        f"{STORE}: no permission: the credentials' policy must allow s3:{action} on {resource}"
        for action in ("DeleteObject", "AbortMultipartUpload")
    ]
    assert set(objects()) == {key(digest("a"))}


def test_a_store_that_cannot_be_listed(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    supply.opened.cache_clear()
    assert gc("--delete", where=["--store", "s3://lora-pods-elsewhere"]) == 1
    assert told(capsys) == (
        "",
        "s3://lora-pods-elsewhere: there is no such bucket; create it, or correct lora-pods:store\n",
    )
