import hashlib
import io
import os
import random
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.adapter import read_adapter
from components.core.bundle import (
    CHUNK,
    LARGEST_MEMBER,
    Member,
    bundle_members,
    bundle_size,
    digest_bundle,
    stream_bundle,
    ustar_header,
)
from components.core.errors import UserError
from tests.support.adapters import CONFIG, write_adapter


def bundle_of(directory: Path) -> list[Member]:
    return bundle_members(read_adapter(directory))


def members_with(directory: Path, *contents: bytes) -> list[Member]:
    members = []
    for number, content in enumerate(contents):
        path = directory / f"file-{number}"
        path.write_bytes(content)
        members.append(Member(name=path.name, path=path, size=len(content)))
    return members


def open_files_below(directory: Path) -> list[str]:
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
    targets = [os.readlink(link) for link in links if link.is_symlink()]  # noqa: PTH115
    return [target for target in targets if target.startswith(str(directory))]


def test_members_are_the_two_files_in_order(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    config, weights = directory / "adapter_config.json", directory / "adapter_model.safetensors"
    assert bundle_of(directory) == [
        Member("adapter_config.json", config, config.stat().st_size),
        Member("adapter_model.safetensors", weights, weights.stat().st_size),
    ]


def test_place_mode_time_and_litter_do_not_matter(tmp_path: Path) -> None:
    plain = write_adapter(tmp_path / "plain")
    other = write_adapter(tmp_path / "deeper" / "other")
    for name in ("._adapter_config.json", "._adapter_model.safetensors", ".DS_Store", "optimizer.pt", "README.md"):
        (other / name).write_bytes(b"litter")
    (other / "__MACOSX").mkdir()
    (other / "checkpoint-75").mkdir()
    os.mkfifo(other / "pipe")
    (other / "résumé.txt").touch()
    (other / "re\u0301sume\u0301.txt").touch()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (other / name).chmod(0o600)
        os.utime(other / name, (1, 1))
    if os.geteuid() == 0:
        os.chown(other / "adapter_config.json", 1000830000, 1000830000)
    assert digest_bundle(bundle_of(other)) == digest_bundle(bundle_of(plain))


def test_links_of_a_hub_cache_give_the_digest_of_a_real_copy(tmp_path: Path) -> None:
    plain = write_adapter(tmp_path / "plain")
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (blobs / name[::-1]).write_bytes((plain / name).read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/{name[::-1]}")
    assert digest_bundle(bundle_of(snapshot)) == digest_bundle(bundle_of(plain))


def test_one_other_byte_is_another_digest(tmp_path: Path) -> None:
    one, two = write_adapter(tmp_path / "one"), write_adapter(tmp_path / "two")
    weights = bytearray((two / "adapter_model.safetensors").read_bytes())
    weights[-1] ^= 1
    (two / "adapter_model.safetensors").write_bytes(weights)
    three = write_adapter(tmp_path / "three", {**CONFIG, "lora_alpha": 17})
    assert len({digest_bundle(bundle_of(directory)) for directory in (one, two, three)}) == 3


contents = st.sampled_from([0, 1, 511, 512, 513, 1023, 1024, 1025]).flatmap(
    lambda size: st.binary(min_size=size, max_size=size)
) | st.binary(max_size=3000)


@given(
    files=st.lists(contents, max_size=3),
    chunk=st.integers(1, 700) | st.just(1024 * 1024),
)
def test_tarfile_reads_back_what_was_streamed(
    tmp_path_factory: pytest.TempPathFactory, files: list[bytes], chunk: int
) -> None:
    members = members_with(tmp_path_factory.mktemp("files"), *files)
    data = b"".join(stream_bundle(members, chunk=chunk))
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        read_back = [tar.extractfile(member).read() for member in tar.getmembers()]  # type: ignore[union-attr]
    assert read_back == files
    assert len(data) == bundle_size(members)
    assert digest_bundle(members) == f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_pieces_may_be_kept(tmp_path: Path) -> None:
    members = members_with(tmp_path, bytes(range(256)) * 4)
    assert [len(piece) for piece in stream_bundle(members, chunk=400)] == [512, 400, 400, 224, 1024]
    assert b"".join(list(stream_bundle(members, chunk=400))[1:4]) == bytes(range(256)) * 4


def test_a_large_file_is_hashed_as_it_is_sent(tmp_path: Path) -> None:
    members = members_with(tmp_path, b"small", random.Random(1).randbytes(12 * CHUNK + 5))
    assert digest_bundle(members) == f"sha256:{hashlib.sha256(b''.join(stream_bundle(members))).hexdigest()}"


def test_the_rest_of_a_bundle_from_any_byte_on(tmp_path: Path) -> None:
    members = members_with(tmp_path, b"small", random.Random(1).randbytes(3000))
    whole = b"".join(stream_bundle(members))
    for start in range(len(whole) + 1):
        assert b"".join(stream_bundle(members, chunk=700, start=start)) == whole[start:], start


def test_memory_stays_bounded(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(64 * 1024 * 1024)
    tracemalloc.start()
    digest_bundle([Member("large", path, 64 * 1024 * 1024)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 1024 * 1024


# --- files that change ------------------------------------------------------------------------------------


def shorten(path: Path) -> None:
    os.truncate(path, 2500)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def rewrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"b")
    os.utime(path, ns=(0, 0))


@pytest.mark.parametrize("change", [shorten, lengthen, rewrite])
def test_a_change_while_streaming(tmp_path: Path, change: Callable[[Path], None]) -> None:
    members = members_with(tmp_path, b"a" * 3000)
    stream = stream_bundle(members, chunk=1000)
    assert [len(next(stream)), len(next(stream))] == [512, 1000]
    change(members[0].path)
    with pytest.raises(UserError) as caught:
        list(stream)
    assert str(caught.value) == (
        f"{members[0].path}: changed while it was being read; run again when nothing writes to it."
    )


@pytest.mark.parametrize("change", [shorten, lengthen])
def test_a_change_before_streaming(tmp_path: Path, change: Callable[[Path], None]) -> None:
    members = members_with(tmp_path, b"a" * 3000)
    change(members[0].path)
    with pytest.raises(UserError, match=r"changed while it was being read"):
        digest_bundle(members)


def test_an_empty_file_that_grew(tmp_path: Path) -> None:
    members = members_with(tmp_path, b"")
    lengthen(members[0].path)
    with pytest.raises(UserError, match=r"changed while it was being read"):
        digest_bundle(members)


def test_a_file_that_went_away(tmp_path: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path / "a"))
    members = bundle_members(adapter)
    adapter.weights.unlink()
    with pytest.raises(UserError, match=r"adapter_model\.safetensors: cannot be read \(no such file or directory\)\.$"):
        digest_bundle(members)
    with pytest.raises(UserError, match=r"adapter_model\.safetensors: changed while it was being read; "):
        bundle_members(adapter)


def test_a_disk_that_fails_while_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = members_with(tmp_path, b"a" * 10)

    class Failing(io.FileIO):
        def readinto(self, buffer: object, /) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("components.core.adapter_files.FileIO", Failing)
    with pytest.raises(UserError) as caught:
        digest_bundle(members)
    assert str(caught.value) == f"{members[0].path}: cannot be read (input/output error)."


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_files_are_closed_at_the_end_and_on_exit(tmp_path: Path) -> None:
    members = members_with(tmp_path, b"a" * 3000)
    stream = stream_bundle(members, chunk=1000)
    next(stream)
    next(stream)
    assert open_files_below(tmp_path) == [str(members[0].path)]
    stream.close()
    assert open_files_below(tmp_path) == []
    list(stream_bundle(members))
    assert open_files_below(tmp_path) == []


# --- headers ----------------------------------------------------------------------------------------------


def test_the_largest_member() -> None:
    info = tarfile.TarInfo.frombuf(ustar_header("big", LARGEST_MEMBER), "ascii", "strict")
    assert (info.name, info.size) == ("big", 8 * 1024**3 - 1)


def test_a_file_too_large_for_a_member(tmp_path: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path / "a"))
    os.truncate(adapter.weights, LARGEST_MEMBER + 1)
    with pytest.raises(UserError) as caught:
        bundle_members(adapter)
    assert str(caught.value) == (f"{adapter.weights}: 8589934592 bytes, and a file in a bundle may have 8589934591.")


@pytest.mark.parametrize(("name", "size"), [("x" * 101, 1), ("x", LARGEST_MEMBER + 1), ("x", -1)])
def test_what_no_header_can_hold_is_a_programming_error(name: str, size: int) -> None:
    with pytest.raises(ValueError, match=r"^no ustar header for "):
        ustar_header(name, size)


def test_the_size_needs_no_file() -> None:
    nowhere = Path("/nowhere")
    sizes = [bundle_size([Member("a", nowhere, size)]) for size in (0, 1, 511, 512, 513)]
    assert sizes == [1536, 2048, 2048, 2048, 2560]
    assert bundle_size([]) == 1024
