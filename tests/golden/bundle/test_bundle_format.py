"""The bundle's bytes are frozen: a change of one byte would give every adapter of every user a new identity."""

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from components.core.adapter import read_adapter
from components.core.bundle import bundle_members, digest_bundle, stream_bundle, ustar_header

CONFIG = b'{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}\n'
HEADER = (
    b'{"a.q_proj.lora_A.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
    b'"a.q_proj.lora_B.weight":{"dtype":"F32","shape":[3,2],"data_offsets":[24,48]}}'
)
WEIGHTS = b"\x9c\x00\x00\x00\x00\x00\x00\x00" + HEADER + bytes(range(48))

DIGEST = "sha256:0a40a904b8d094ce4cc40c5edbc197736ac5b74371799819f77276d4726eb702"
HEADER_BLOCK = (
    b"adapter_config.json" + bytes(81)  # name
    + b"0000644\0" + b"0000000\0" + b"0000000\0"  # mode, uid, gid
    + b"00000000070\0" + b"00000000000\0"  # size, mtime
    + b"013042\0 " + b"0"  # checksum, type
    + bytes(100)  # link name
    + b"ustar\0" + b"00"  # magic, version
    + bytes(64)  # user, group
    + b"0000000\0" + b"0000000\0"  # device
    + bytes(167)  # prefix, padding
)  # fmt: skip

GNU_TAR = shutil.which("gtar") or shutil.which("tar") or "tar"


def _is_gnu_tar() -> bool:
    try:
        return b"GNU tar" in subprocess.run([GNU_TAR, "--version"], capture_output=True, check=False).stdout
    except OSError:
        return False


needs_gnu_tar = pytest.mark.skipif(not _is_gnu_tar(), reason="GNU tar is not here")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_bytes(CONFIG)
    (directory / "adapter_model.safetensors").write_bytes(WEIGHTS)
    return directory


def tar_of(directory: Path) -> bytes:
    return b"".join(stream_bundle(bundle_members(read_adapter(directory))))


def test_the_digest_of_a_known_adapter_never_changes(adapter: Path) -> None:
    assert digest_bundle(bundle_members(read_adapter(adapter))) == DIGEST


def test_the_digest_is_that_of_the_streamed_bytes(adapter: Path) -> None:
    assert f"sha256:{hashlib.sha256(tar_of(adapter)).hexdigest()}" == DIGEST


def test_the_tar_is_headers_contents_and_two_zero_blocks(adapter: Path) -> None:
    assert tar_of(adapter) == (
        HEADER_BLOCK
        + CONFIG
        + bytes(512 - len(CONFIG))
        + ustar_header("adapter_model.safetensors", len(WEIGHTS))
        + WEIGHTS
        + bytes(512 - len(WEIGHTS))
        + bytes(1024)
    )


def test_tarfile_lists_and_extracts_it(adapter: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(tar_of(adapter)), mode="r:") as tar:
        listed = [
            (m.name, m.mode, m.uid, m.gid, m.uname, m.gname, m.mtime, m.size, m.type, m.linkname)
            for m in tar.getmembers()
        ]
        contents = [tar.extractfile(member).read() for member in tar.getmembers()]  # type: ignore[union-attr]
    assert listed == [
        ("adapter_config.json", 0o644, 0, 0, "", "", 0, len(CONFIG), tarfile.REGTYPE, ""),
        ("adapter_model.safetensors", 0o644, 0, 0, "", "", 0, len(WEIGHTS), tarfile.REGTYPE, ""),
    ]
    assert contents == [CONFIG, WEIGHTS]


@needs_gnu_tar
def test_gnu_tar_makes_the_same_bytes(adapter: Path) -> None:
    made = subprocess.run(
        [
            GNU_TAR, "--format=ustar", "--numeric-owner", "--owner=0", "--group=0", "--mode=0644", "--mtime=@0",
            "--blocking-factor=1", "-cf", "-", "adapter_config.json", "adapter_model.safetensors",
        ],
        cwd=adapter, capture_output=True, check=True,
    )  # fmt: skip
    assert made.stdout == tar_of(adapter)


@needs_gnu_tar
def test_gnu_tar_lists_and_extracts_it(adapter: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    environment = {**os.environ, "TZ": "UTC", "LC_ALL": "C"}
    listed = subprocess.run(
        [GNU_TAR, "-tvf", "-"], input=tar_of(adapter), capture_output=True, check=True, env=environment
    )
    subprocess.run([GNU_TAR, "-xf", "-"], input=tar_of(adapter), cwd=target, check=True)
    assert (listed.stdout, listed.stderr) == (
        b"-rw-r--r-- 0/0              56 1970-01-01 00:00 adapter_config.json\n"
        b"-rw-r--r-- 0/0             212 1970-01-01 00:00 adapter_model.safetensors\n",
        b"",
    )
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        "adapter_config.json": CONFIG,
        "adapter_model.safetensors": WEIGHTS,
    }
