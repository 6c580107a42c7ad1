"""An upload: the pod is asked, and gets what it lacks. With the real podctl behind an SSH server in this process."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from components import bundles
from components.bundles import BundleUploadProvider
from components.core import digest_cache, meter
from components.core.adapter import read_adapter
from components.core.bundle import bundle_members, stream_bundle
from components.core.digest_cache import BundleFacts, DigestCache
from components.core.errors import UserError
from components.core.sizes import shown_size
from components.on_pod.boot import podctl_source
from components.supply import Supply
from tests.components.test_settings import ENGINE, Config
from tests.components.test_ssh import CLIENT, SERVER, public, text
from tests.support.adapters import seeded_adapter


class Pod:
    """A directory that podctl keeps, behind an sshd; `calls` has each verb with the bytes that it was sent."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.podctl = root.with_name("podctl.py")
        self.podctl.write_text(podctl_source(), encoding="utf-8")
        self.calls: list[tuple[str, int]] = []
        self.cut_after: int | None = None

    async def handle(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        verb = shlex.split(process.command or "")[-1]
        cut = verb == "receive-all" and self.cut_after
        sent = await (process.stdin.readexactly(cut) if cut else process.stdin.read())
        self.calls.append((verb, len(sent)))
        words = [sys.executable, str(self.podctl), "--root", str(self.root), verb]
        # In a thread: a client that hangs up ends this coroutine, and a process of the loop's would outlive the loop.
        podctl = await asyncio.to_thread(subprocess.run, words, input=sent, capture_output=True, check=False)
        process.stdout.write(podctl.stdout)
        process.stderr.write(podctl.stderr)
        process.exit(podctl.returncode)

    def blobs(self) -> set[str]:
        return {path.name for path in (self.root / "blobs/sha256").glob("*")}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "Pulumi.yaml").write_text("name: lora-pods\nruntime: python\nstackConfigDir: stacks\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("v1", "v2"):
        seeded_adapter(tmp_path / "adapters" / name, seed=ord(name[1]))
    return tmp_path


@pytest.fixture
def facts(project: Path) -> dict[str, BundleFacts]:
    return {name: DigestCache().describe(project / "adapters" / name) for name in ("v1", "v2")}


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path / "pod")


@pytest.fixture
def upload(pod: Pod, facts: dict[str, BundleFacts]) -> Callable[..., None]:
    """Runs the provider's create for these models, with more of a stack file, against a server on a port of its own."""
    provider = BundleUploadProvider()

    def run(models: dict[str, str], **config: Any) -> None:
        asyncio.run(serve(lambda port: asyncio.to_thread(create, models, port, config)))

    async def serve(use: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        allowed = asyncssh.import_authorized_keys(public(CLIENT))
        listener = await asyncssh.listen(
            "127.0.0.1",
            0,
            server_host_keys=[SERVER],
            authorized_client_keys=allowed,
            process_factory=pod.handle,
            encoding=None,
        )
        async with listener:
            await use(listener.get_port())

    def create(models: dict[str, str], port: int, config: dict[str, Any]) -> None:
        host = {"address": "127.0.0.1", "port": port, "hostKey": public(SERVER)}
        provider._config = Config(
            pods=[{"base": "org/base", "host": host, "engine": ENGINE}],
            models=[{"id": m, "base": "org/base", "adapter": f"../adapters/{name}"} for m, name in models.items()],
            sshPrivateKey=text(CLIENT),
            **config,
        )
        wanted = {model: facts[name] for model, name in models.items()}
        provider.create(
            {
                "engine": "key",
                "bundles": {model: found.digest for model, found in wanted.items()},
                "sizes": {found.digest: float(found.size) for found in wanted.values()},
                "connection": {**host, "port": float(port), "user": "root", "credential": "config:sshPrivateKey"},
            }
        )

    return run


def hexes(*facts: BundleFacts) -> set[str]:
    return {found.digest.removeprefix("sha256:") for found in facts}


def test_only_what_is_missing_is_sent(pod: Pod, upload: Callable[..., None], facts: dict[str, BundleFacts]) -> None:
    upload({"a": "v1"})
    assert pod.blobs() == hexes(facts["v1"])
    pod.calls.clear()

    upload({"a": "v1", "b": "v2", "same-as-b": "v2"})

    assert pod.blobs() == hexes(facts["v1"], facts["v2"])
    (missing, _), (received, sent) = pod.calls
    assert (missing, received) == ("missing", "receive-all")
    assert facts["v2"].size < sent < facts["v2"].size + 200, "one bundle and a line about it"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What somebody who watches is told, of however short work."""
    lines: list[str] = []
    monkeypatch.setattr(bundles, "provider_says", lambda: lines.append)
    monkeypatch.setattr(meter, "SAY_SECONDS", 0.0)
    return lines


def test_an_upload_shows_what_it_sends(
    pod: Pod, upload: Callable[..., None], facts: dict[str, BundleFacts], said: list[str]
) -> None:
    upload({"a": "v1"})
    size = shown_size(facts["v1"].size)
    hashing, uploading = (next(i for i, line in enumerate(said) if line.startswith(verb)) for verb in ("hash", "upl"))
    assert hashing < uploading, "files as young as these are remembered by nobody"
    assert said[uploading].startswith("uploading a: 512 bytes of ")
    assert said[-2].startswith(f"uploading a: {size} of {size}, ")
    assert re.fullmatch(rf"uploaded {size} in \d+ s", said[-1])
    said.clear()

    upload({"a": "v1", "b": "v2", "same-as-b": "v2"})
    size = shown_size(facts["v2"].size)
    assert said[-2].startswith(f"uploading b: {size} of {size}, ")
    said.clear()

    upload({"a": "v1", "b": "v2"})
    assert said == []


def test_nothing_is_sent_where_nothing_is_missing(pod: Pod, upload: Callable[..., None], project: Path) -> None:
    upload({"a": "v1", "b": "v2"})
    pod.calls.clear()
    (project / "adapters" / "v1" / "adapter_model.safetensors").chmod(0)
    upload({"a": "v1", "b": "v2"})
    assert [verb for verb, _ in pod.calls] == ["missing"]


def test_bytes_that_are_nowhere_are_named_before_anything_is_sent(
    pod: Pod, upload: Callable[..., None], facts: dict[str, BundleFacts], project: Path
) -> None:
    upload({"a": "v1"})
    shutil.rmtree(project / "adapters" / "v1")
    upload({"a": "v1", "again": "v1"})
    pod.calls.clear()
    (project / "adapters" / "v2" / "adapter_model.safetensors").unlink()

    with pytest.raises(UserError) as caught:
        upload({"a": "v1", "b": "v2"})

    assert str(caught.value) == (
        f"the pod lacks what is not on this machine either: b ({facts['v2'].digest}) at "
        "../adapters/v2; put the adapter there, or run `pulumi up` once from a machine that has it"
    )
    assert [verb for verb, _ in pod.calls] == ["missing"]


def test_a_model_whose_bytes_another_one_has_here(
    pod: Pod, upload: Callable[..., None], facts: dict[str, BundleFacts], project: Path
) -> None:
    facts["copy"] = facts["z"] = facts["v1"]
    (project / "adapters" / "v1").rename(project / "adapters" / "copy")
    upload({"a": "v1", "b": "copy", "c": "z"})
    assert pod.blobs() == hexes(facts["v1"])


def test_an_upload_that_was_cut_goes_on_where_it_ended(
    pod: Pod, upload: Callable[..., None], facts: dict[str, BundleFacts]
) -> None:
    pod.cut_after = 6 * facts["v1"].size // 10
    with pytest.raises(UserError, match="they are kept, run this again"):
        upload({"a": "v1"})
    pod.cut_after = None
    pod.calls.clear()

    upload({"a": "v1"})

    assert pod.blobs() == hexes(facts["v1"])
    assert pod.calls[1][1] <= 0.45 * facts["v1"].size


def test_what_arrived_whole_needs_nothing_of_this_machine(
    pod: Pod, upload: Callable[..., None], facts: dict[str, BundleFacts], project: Path
) -> None:
    """The pod lost its power between the last byte and the unpacking of it."""
    staging = pod.root / "staging"
    staging.mkdir(parents=True)
    members = bundle_members(read_adapter(project / "adapters" / "v1"))
    (hexdigest,) = hexes(facts["v1"])
    (staging / f"{hexdigest}.tar.part").write_bytes(b"".join(stream_bundle(members)))
    shutil.rmtree(project / "adapters" / "v1")
    upload({"a": "v1"})
    assert pod.blobs() == {hexdigest}
    assert pod.calls[1][1] < 200, "the line that says so, and no more"


def test_bytes_that_are_no_longer_those_of_the_digest(
    pod: Pod, upload: Callable[..., None], facts: dict[str, BundleFacts], project: Path
) -> None:
    seeded_adapter(project / "adapters" / "v1", seed=99)
    with pytest.raises(UserError, match=r"adapters/v1 changed since this run looked at it \(it was sha256:"):
        upload({"a": "v1"})
    assert pod.blobs() == set()
    assert sum(sent for _, sent in pod.calls) < facts["v1"].size, "it is seen before it is sent"


def test_what_has_not_changed_is_hashed_once(
    pod: Pod, upload: Callable[..., None], project: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, BundleFacts]
) -> None:
    """By the program, which plans with it. What is sent is hashed by the pod."""
    later = DigestCache(clock=lambda: time.time_ns() + 10**10)  # when files so young are remembered
    for name in facts:
        later.describe(project / "adapters" / name)
    monkeypatch.setattr(digest_cache, "digest_bundle", lambda *_: pytest.fail("it is hashed again"))
    monkeypatch.setattr(Supply, "whole", lambda *_: pytest.fail("it is hashed again"))
    upload({"a": "v1", "b": "v2"})
    assert pod.blobs() == hexes(facts["v1"], facts["v2"])
