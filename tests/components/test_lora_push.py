"""`lora push -s STACK`: what it asks of the store, sends, says and exits with. With moto's S3 in this process."""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.client
import pytest
from moto import mock_aws

from components import supply
from components.cli import lock, push
from components.cli.main import INTERRUPTED, main
from components.core.digest_cache import BundleFacts, DigestCache
from components.core.errors import UserError
from components.core.lock import short_digest
from components.core.sizes import shown_size
from components.store import BundleStore
from tests.components.test_lora_lock import STACK_FILE as WITHOUT_STORE
from tests.support.adapters import seeded_adapter
from tests.support.large_adapters import large_adapters
from tests.support.machines import wait_for
from tests.support.s3 import ENVIRONMENT, S3, Request, s3_service

BUCKET = "lora-pods-tests"
STORE = f"s3://{BUCKET}/team"
STACK_FILE = f"{WITHOUT_STORE}  lora-pods:store: {STORE}\n"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """An empty bucket, and what is asked of S3 from then on, by operation."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with mock_aws():
        supply.opened.cache_clear()
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        asked: Counter[str] = Counter()
        api_call = botocore.client.BaseClient._make_api_call

        def counting(client: Any, operation: str, parameters: Any) -> Any:
            asked[operation] += 1
            return api_call(client, operation, parameters)

        with monkeypatch.context() as patch:
            patch.setattr(botocore.client.BaseClient, "_make_api_call", counting)
            yield asked
    supply.opened.cache_clear()


@pytest.fixture
def project(tmp_path: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    lay_out(tmp_path, monkeypatch)
    return tmp_path


def lay_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project with a stack of two adapters, which is the working directory then."""
    (root / "Pulumi.yaml").write_text("name: lora-pods\nruntime: python\nstackConfigDir: stacks\n")
    (root / "stacks").mkdir()
    (root / "stacks" / "Pulumi.acme.yaml").write_text(STACK_FILE)
    monkeypatch.chdir(root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    for number in (1, 2):
        seeded_adapter(root / "adapters" / f"v{number}", seed=number)


def run(command: Any, *words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    code: int = command.run(parser.parse_args(["-s", "acme", *words]))
    return code


def lora_push() -> int:
    return run(push)


def facts(project: Path, name: str) -> BundleFacts:
    return DigestCache().describe(project / "adapters" / name)


def objects() -> dict[str, int]:
    """Sizes by key, read around what is counted."""
    found = boto3.resource("s3").Bucket(BUCKET).objects.all()
    return {each.key: each.size for each in found}


def key(digest: str) -> str:
    return f"team/sha256/{digest.removeprefix('sha256:')}.tar"


def edit(project: Path, old: str, new: str) -> None:
    file = project / "stacks" / "Pulumi.acme.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_it_sends_what_the_store_lacks_and_only_once(
    project: Path, calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(lock)
    capsys.readouterr()
    first, second = facts(project, "v1"), facts(project, "v2")
    assert lora_push() == 0
    each, both = shown_size(first.size), shown_size(first.size + second.size)
    assert capsys.readouterr() == (
        f"{STORE}: lacks 2 adapters ({both})\n"
        f"  acme-v1  {short_digest(first.digest)}  sent ({each})\n"
        f"  acme-v2  {short_digest(second.digest)}  sent ({each})\n"
        f"{STORE}: has 2 of 2 adapters (2 sent, {both})\n",
        "",
    )
    # The GET asks for a byte of the first, since only its answer tells an absent object from an absent bucket.
    assert calls == {"HeadObject": 4, "GetObject": 1, "PutObject": 2}
    assert objects() == {key(first.digest): first.size, key(second.digest): second.size}

    calls.clear()
    assert lora_push() == 0
    assert capsys.readouterr() == (
        f"  acme-v1  {short_digest(first.digest)}  already there\n"
        f"  acme-v2  {short_digest(second.digest)}  already there\n"
        f"{STORE}: has 2 of 2 adapters; nothing was sent\n",
        "",
    )
    assert calls == {"HeadObject": 2}


def test_two_models_of_the_same_bytes_are_one_object(
    project: Path, calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(project / "adapters" / "v2")
    shutil.copytree(project / "adapters" / "v1", project / "adapters" / "v2")
    run(lock)
    capsys.readouterr()
    assert lora_push() == 0
    one = facts(project, "v1")
    short, size = short_digest(one.digest), shown_size(one.size)
    assert capsys.readouterr().out == (
        f"{STORE}: lacks 1 adapter ({size})\n"
        f"  acme-v1  {short}  sent ({size})\n"
        f"  acme-v2  {short}  the same as acme-v1\n"
        f"{STORE}: has 2 of 2 adapters (1 sent, {size})\n"
    )
    assert calls == {"HeadObject": 2, "GetObject": 1, "PutObject": 1}


def test_what_is_not_here_is_looked_for_by_the_lock(
    project: Path, calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(lock)
    first, second = facts(project, "v1"), facts(project, "v2")
    assert lora_push() == 0
    shutil.rmtree(project / "adapters")
    capsys.readouterr()
    calls.clear()
    assert lora_push() == 0
    assert capsys.readouterr() == (
        f"  acme-v1  {short_digest(first.digest)}  already there; not on this machine\n"
        f"  acme-v2  {short_digest(second.digest)}  already there; not on this machine\n"
        f"{STORE}: has 2 of 2 adapters; nothing was sent\n",
        "",
    )
    assert calls == {"HeadObject": 2}


def test_what_is_neither_here_nor_there_is_told_together(
    project: Path, calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(lock)
    first, second = facts(project, "v1"), facts(project, "v2")
    shutil.rmtree(project / "adapters" / "v1")
    capsys.readouterr()
    assert lora_push() == 1
    size = shown_size(second.size)
    assert capsys.readouterr() == (
        f"{STORE}: lacks 1 adapter ({size})\n"
        f"  acme-v1  {short_digest(first.digest)}  missing\n"
        f"  acme-v2  {short_digest(second.digest)}  sent ({size})\n"
        f"{STORE}: has 1 of 2 adapters (1 sent, {size})\n",
        f"neither {STORE} nor this machine has acme-v1 at ../adapters/v1; run `lora push -s acme` where it is\n",
    )
    assert objects() == {key(second.digest): second.size}

    shutil.rmtree(project / "adapters" / "v2")
    boto3.client("s3").delete_object(Bucket=BUCKET, Key=key(second.digest))
    (project / "stacks" / "acme.lock.yaml").unlink()
    calls.clear()
    assert lora_push() == 1
    unknown = "(stacks/acme.lock.yaml has no entry that fits)"
    assert capsys.readouterr() == (
        f"{STORE}: has 0 of 2 adapters; nothing was sent\n",
        f"neither {STORE} nor this machine has acme-v1 at ../adapters/v1 {unknown}, acme-v2 at ../adapters/v2 {unknown}"
        "; run `lora lock -s acme` and `lora push -s acme` where they are, and commit the lock\n",
    )
    assert calls == {}


def test_a_lock_that_helps_nobody_is_told_and_keeps_nothing_back(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lora_push() == 0
    needed = "commit it: a machine without the adapters knows them by it alone\n"
    assert capsys.readouterr().err == (
        f"warning: there is no stacks/acme.lock.yaml; write it with `lora lock -s acme` and {needed}"
    )
    run(lock)
    old = facts(project, "v1")
    seeded_adapter(project / "adapters" / "v1", seed=11)
    new = facts(project, "v1")
    capsys.readouterr()
    assert lora_push() == 0
    told = capsys.readouterr()
    assert told.err == (
        f"warning: stacks/acme.lock.yaml says otherwise of an adapter: acme-v1 {short_digest(old.digest)} → "
        f"{short_digest(new.digest)}. The adapters on this machine count; write the lock anew with "
        f"`lora lock -s acme` and {needed}"
    )
    assert key(new.digest) in objects()

    (project / "stacks" / "acme.lock.yaml").write_text("models: {}\n<<<<<<< HEAD\n")
    assert lora_push() == 0
    told = capsys.readouterr()
    assert told.err == (
        "warning: stacks/acme.lock.yaml: holds the markers of a merge conflict (line 2); write it anew where the "
        "adapters are: `lora lock -s acme`; a machine without the adapters knows them by it alone\n"
    )
    assert told.out.endswith(f"{STORE}: has 2 of 2 adapters; nothing was sent\n")


def test_what_vllm_would_refuse_is_not_sent(
    project: Path, calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    seeded_adapter(project / "adapters" / "v2", seed=2, config={"use_dora": True})
    assert lora_push() == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(
        "the stack has 1 fault; nothing was touched:\n  models[0].adapter: acme-v2: adapter_config.json: use_dora: "
    )
    (project / "adapters" / "v2" / "adapter_config.json").write_text("{")
    assert lora_push() == 1
    assert "models[0].adapter: " in capsys.readouterr().err
    assert calls == {}


def test_an_object_that_is_not_what_its_name_says_stops_no_other(
    project: Path, calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(lock)
    first, second = facts(project, "v1"), facts(project, "v2")
    boto3.client("s3").put_object(Bucket=BUCKET, Key=key(first.digest), Body=b"torn")
    capsys.readouterr()
    assert lora_push() == 1
    told = capsys.readouterr()
    size = shown_size(second.size)
    assert told.out == (
        f"{STORE}: lacks 1 adapter ({size})\n"
        f"  acme-v1  {short_digest(first.digest)}  not as it should be\n"
        f"  acme-v2  {short_digest(second.digest)}  sent ({size})\n"
        f"{STORE}: has 1 of 2 adapters (1 sent, {size})\n"
    )
    assert told.err.count("\n") == 1
    assert key(first.digest) in told.err
    assert objects() == {key(first.digest): 4, key(second.digest): second.size}
    assert told.err.startswith(f"{STORE}: s3://{BUCKET}/{key(first.digest)} is 4 bytes and should be {first.size}: ")


@pytest.mark.parametrize("altered", ["the object", "the lock"])
def test_where_the_adapter_is_not_the_lock_may_be_what_is_wrong(
    altered: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is told to remove what may be the only good copy."""
    run(lock)
    first = facts(project, "v1")
    lora_push()
    stored, locked = first.size, first.size
    if altered == "the object":
        boto3.client("s3").put_object(Bucket=BUCKET, Key=key(first.digest), Body=b"torn")
        stored = 4
    else:
        lock_file = project / "stacks" / "acme.lock.yaml"
        lock_file.write_text(lock_file.read_text().replace(f"size: {first.size}", f"size: {first.size + 1}", 1))
        locked += 1
    before = objects()
    shutil.rmtree(project / "adapters")
    capsys.readouterr()
    assert lora_push() == 1
    told = capsys.readouterr()
    assert told.err == (
        f"{STORE}: s3://{BUCKET}/{key(first.digest)} is {stored} bytes, and {locked} by the lock: the lock or the "
        "object was altered; leave both, and run `lora lock` and `lora push` where the adapter is: there it can be "
        "told which\n"
    )
    assert f"  acme-v1  {short_digest(first.digest)}  not as it should be\n" in told.out
    assert objects() == before


def test_bytes_that_are_here_count_for_a_locked_entry_of_the_same(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """acme-v2 is what acme-v1 is, and is not here; its entry has a wrong size."""
    shutil.rmtree(project / "adapters" / "v2")
    shutil.copytree(project / "adapters" / "v1", project / "adapters" / "v2")
    run(lock)
    one = facts(project, "v1")
    shutil.rmtree(project / "adapters" / "v2")
    lock_file = project / "stacks" / "acme.lock.yaml"
    before, size, after = lock_file.read_text().rpartition(f"size: {one.size}")
    lock_file.write_text(f"{before}{size}1{after}")
    capsys.readouterr()
    assert lora_push() == 0
    assert capsys.readouterr().out.endswith(f"has 2 of 2 adapters (1 sent, {shown_size(one.size)})\n")
    assert objects() == {key(one.digest): one.size}


def test_an_adapter_that_changes_meanwhile_is_not_sent_under_the_old_name(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(lock)
    first, second = facts(project, "v1"), facts(project, "v2")
    ensure = BundleStore.ensure

    def retrained(store: BundleStore, digest: str, size: int, chunks: Any) -> bool:
        if digest == first.digest:
            seeded_adapter(project / "adapters" / "v1", seed=11)
        return ensure(store, digest, size, chunks)

    monkeypatch.setattr(BundleStore, "ensure", retrained)
    capsys.readouterr()
    assert lora_push() == 1
    told = capsys.readouterr()
    assert f"  acme-v1  {short_digest(first.digest)}  not sent\n" in told.out
    assert told.err.count("\n") == 1
    assert "changed since this run looked at it" in told.err
    assert objects() == {key(second.digest): second.size}


def test_a_store_that_cannot_be_used_says_so_once_and_before_anything_is_sent(
    project: Path, calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(lock)
    edit(project, BUCKET, "lora-pods-elsewhere")
    capsys.readouterr()
    assert lora_push() == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "lora-pods-elsewhere" in told.err
    assert calls == {"HeadObject": 1, "GetObject": 1}


def test_the_same_refusal_of_many_is_told_once(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> bool:
        raise UserError("the credentials expired; get new ones")

    run(lock)
    monkeypatch.setattr(BundleStore, "ensure", refuse)
    capsys.readouterr()
    assert lora_push() == 1
    told = capsys.readouterr()
    assert told.out.count("  not sent\n") == 2
    assert told.err == "the credentials expired; get new ones\n"


def test_without_a_store_it_says_how_to_set_one(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "stacks" / "Pulumi.acme.yaml").write_text(WITHOUT_STORE)
    assert lora_push() == 1
    assert capsys.readouterr() == (
        "",
        "stacks/Pulumi.acme.yaml: names no store; set it: `pulumi config set store s3://BUCKET/PREFIX --stack acme`\n",
    )


def test_faults_of_the_stack_file_come_first(
    project: Path, calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    edit(project, "s3://", "http://")
    edit(project, "id: plain", "id: plain, adaptor: x")
    assert lora_push() == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "the stack has 2 faults; nothing was touched:"
    assert lines[1].startswith("  models[2].adaptor: unknown key")
    assert lines[2].startswith("  store: must be s3://")
    assert calls == {}


def test_a_slip_in_a_key_is_not_taken_for_a_stack_without_adapters(
    project: Path, calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    edit(project, "lora-pods:models", "lora-pods:modles")
    assert lora_push() == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("the stack has 1 fault; nothing was touched:\n  modles: unknown key; known here: pods, ")
    assert calls == {}


def test_a_stack_without_adapters_needs_nothing(
    project: Path, calls: Counter[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = project / "stacks" / "Pulumi.acme.yaml"
    file.write_text("".join(line for line in STACK_FILE.splitlines(keepends=True) if "adapter:" not in line))
    assert lora_push() == 0
    assert capsys.readouterr() == (f"{STORE}: the stack has no adapters; nothing to send\n", "")
    assert calls == {}


def test_a_wrong_command_is_told(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", "-s", "globex"]) == 2
    assert capsys.readouterr().err == ("lora: stacks/Pulumi.globex.yaml: no such file; the stacks here are: acme\n")


def test_uploads_go_side_by_side_but_not_all_at_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = "".join(
        f"    - {{id: m{number}, base: example/base, adapter: ../adapters/v{number}}}\n" for number in range(1, 13)
    )
    for number in range(1, 13):
        seeded_adapter(project / "adapters" / f"v{number}", seed=number)
    edit(project, "    - {id: plain, base: example/base}\n", models)
    running: list[int] = []
    now, most, full = threading.Lock(), 0, threading.Event()

    def ensure(_: BundleStore, _digest: str, _size: int, _chunks: Any) -> bool:
        nonlocal most
        with now:
            running.append(1)
            most = max(most, len(running))
            if most == push.UPLOADS_AT_ONCE:
                full.set()
        assert full.wait(10)
        with now:
            running.pop()
        return True

    monkeypatch.setattr(BundleStore, "ensure", ensure)
    assert lora_push() == 0
    assert most == push.UPLOADS_AT_ONCE


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """The same behind an endpoint, since moto in this process takes no part of an upload as the store sends it."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with s3_service() as service:
        yield service


def test_ctrl_c_leaves_nothing_half_sent(
    tmp_path: Path, served: S3, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lay_out(tmp_path, monkeypatch)
    (large,) = large_adapters(tmp_path / "large", 1)
    edit(tmp_path, "../adapters/v1", f"../large/{large.name}")
    edit(tmp_path, STORE, served.store)
    whole, main_thread = supply.Supply.whole, threading.main_thread().ident
    assert main_thread

    def interrupted(self: supply.Supply, digest: str) -> Iterator[memoryview]:
        sent = 0
        for chunk in whole(self, digest):
            yield chunk
            before, sent = sent, sent + len(chunk)
            if before < 40 * 2**20 <= sent:
                wait_for(lambda: len(parts()) >= 4)
                signal.pthread_kill(main_thread, signal.SIGINT)
            if sent >= 40 * 2**20:  # as slow as a line is
                time.sleep(0.01)

    def parts() -> list[Request]:
        return [each for each in served.requests if "partNumber=" in each.query]

    monkeypatch.setattr(supply.Supply, "whole", interrupted)
    assert main(["push", "-s", "acme"]) == INTERRUPTED
    assert capsys.readouterr().err.endswith("interrupted; undoing what is half sent\n")
    assert 4 <= len(parts()) < 20
    last = served.requests[-1]
    assert (last.method, "uploadId=" in last.query) == ("DELETE", True)
    assert list(served.objects()) == [key(facts(tmp_path, "v2").digest)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_all_uploads_at_once(project: Path, number: signal.Signals) -> None:
    """So does what ends a job of a CI system.

    In a process of its own, with an upload that would take for ever. Two threads' prints would mix.
    """
    root = Path(__file__).resolve().parents[2]
    program = (
        "import os, sys, time; sys.path.insert(0, sys.argv.pop(1))\n"
        "from components import store\n"
        "from components.cli.main import main\n"
        "class Slow:\n"
        "    def __init__(self, url): pass\n"
        "    def size(self, digest): return None\n"
        "    def ensure(self, digest, size, chunks):\n"
        "        os.write(1, b'begun\\n')\n"
        "        try:\n"
        "            while True:\n"
        "                for chunk in chunks(): time.sleep(0.01)\n"
        "        except BaseException as error:\n"
        "            os.write(1, f'undone {type(error).__name__}\\n'.encode())\n"
        "            raise\n"
        "store.BundleStore = Slow\n"
        "sys.exit(main(['push', '-s', 'acme']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline().startswith(f"{STORE}: lacks 2 adapters (")
    assert [process.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == INTERRUPTED
    assert out == "undone _Stopped\n" * 2
    assert err.splitlines()[-1] == "interrupted; undoing what is half sent"


def test_help_needs_neither_boto3_nor_pulumi(project: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "from components.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print({'boto3', 'botocore', 'pulumi', 'grpc', 'asyncssh', 'jinja2'} & set(sys.modules))"
    )
    for words in (["push", "--help"], ["gc-store", "--help"], ["--help"]):
        done = subprocess.run(
            [sys.executable, "-c", code, str(root), *words], capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == "set()"
