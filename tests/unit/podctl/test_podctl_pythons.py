"""The verbs that move bytes, run as a program by every Python at hand: pods have what their distribution has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.podctl.fake_s3 import S3
from tests.unit.podctl.pods import PodDirectory, bundle, digest_of, head


def at_hand(version: str) -> str | None:
    """A Python of this version that runs: a version manager's shim may stand on PATH for one that does not."""
    python = shutil.which(f"python{version}")
    works = python is not None and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0
    return python if works else None


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "this"])
def test_a_bundle_goes_all_the_way(
    version: str, pod: PodDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = sys.executable if version == "this" else at_hand(version)
    if python is None:
        pytest.skip(f"no Python {version} here")

    (tmp_path / "systemctl").write_text("#!/bin/sh\n")  # for `unsecret`; this machine's own must not hear of it
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def run(*arguments: str, stdin: bytes = b"", said: str = "") -> object:
        argv = [python, str(pod.program), "--root", str(pod.root), "--units-dir", str(pod.units), *arguments]
        ran = subprocess.run(argv, input=stdin, capture_output=True)
        assert (ran.returncode, ran.stderr.decode()) == (0, said)
        return json.loads(ran.stdout)

    tar = bundle(b"w" * 2_000_000)
    digest = digest_of(tar)
    received = run("receive-all", stdin=head((digest, len(tar), 0)) + tar, said=f"{digest} is here (1.9 MiB)\n")
    assert received == {"received": {digest: len(tar)}}
    older = bundle(b"w" * 1_000_000)
    document = json.dumps({"stack": "prod", "base": "b", "models": {"m": digest, "n": pod.stage(older)}}).encode()
    placed = run("place", stdin=document, said=f"{digest_of(older)} is unpacked\n")
    assert placed == {"unpacked": [digest_of(older)], "dropped": [], "collected": []}
    assert run("verify") == {"ok": sorted([digest, digest_of(older)]), "rotten": [], "strays": []}
    other = bundle(b"o" * 2_000_000)
    fetched = digest_of(other)
    s3 = S3({fetched: other})
    pod.staged(fetched, ".tar.part").write_bytes(other[:1000])
    document = json.dumps({"bundles": [s3.bundle(fetched)]}).encode()
    try:
        answer = run("fetch", stdin=document, said=f"{fetched} is here (1.9 MiB)\n")
    finally:
        s3.close()
    assert answer == {"fetched": {fetched: len(other) - 1000}}
    assert [asked.range for asked in s3.asked] == ["bytes=1000-"]
    assert pod.unpacked(fetched) == other
    secrets = run("secrets", stdin=b'{"engine": "e", "secrets": {"A": "b"}}')
    assert run("secrets", stdin=b'{"engine": "e", "secrets": {"A": "b"}}') == secrets
    assert run("unsecret", "--engine", "e") == {"removed": True}
