"""Tars handed to podctl: what is no bundle is refused with a sentence that names the member, and changes nothing."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.core.bundle import ustar_header
from components.on_pod.podctl import tars
from components.on_pod.podctl.tars import Member
from tests.unit.podctl.pods import (
    CONFIG,
    END,
    WEIGHTS,
    Answer,
    PodDirectory,
    bundle,
    digest_of,
    entry,
    header,
    mode,
    with_tarfile,
)

GOOD = {CONFIG: b"{}", WEIGHTS: b"weights"}
BOTH = entry(CONFIG, b"{}") + entry(WEIGHTS, b"weights")
ONLY_PLAIN = ": only plain files are taken"
NO_MEMBER = f"is not a file of a bundle ({CONFIG} and {WEIGHTS})"

HOSTILE: dict[str, tuple[bytes, str]] = {
    "climbing": (BOTH + entry("../evil") + END, 'the tar\'s member "../evil" climbs out of its directory'),
    "climbing inside": (
        BOTH + entry("a/../../evil") + END,
        'the tar\'s member "a/../../evil" climbs out of its directory',
    ),
    "absolute": (BOTH + entry("/etc/evil") + END, 'the tar\'s member "/etc/evil" has an absolute name'),
    "doubly absolute": (BOTH + entry(f"//{CONFIG}") + END, f'the tar\'s member "//{CONFIG}" has an absolute name'),
    "dot slash": (
        entry(f"./{CONFIG}", b"{}") + entry(WEIGHTS) + END,
        f'the tar\'s member "./{CONFIG}" {NO_MEMBER}',
    ),
    "in a directory": (BOTH + entry(f"a/{CONFIG}") + END, f'the tar\'s member "a/{CONFIG}" {NO_MEMBER}'),
    "backslashes": (BOTH + entry("..\\evil") + END, f'the tar\'s member "..\\evil" {NO_MEMBER}'),
    "extra member": (BOTH + entry("README.md", b"hi") + END, f'the tar\'s member "README.md" {NO_MEMBER}'),
    "other case": (BOTH + entry(CONFIG.upper()) + END, f'the tar\'s member "{CONFIG.upper()}" {NO_MEMBER}'),
    "no name": (BOTH + entry("") + END, f'the tar\'s member "" {NO_MEMBER}'),
    "control characters": (
        BOTH + entry("a\x1b[2Jb\nc\x07") + END,
        f'the tar\'s member "a\\x1b[2Jb\\nc\\x07" {NO_MEMBER}',
    ),
    "bidi override": (BOTH + entry("a\u202etxt") + END, f'the tar\'s member "a\\u202etxt" {NO_MEMBER}'),
    "not UTF-8": (BOTH + entry(b"\xff\xfe") + END, f'the tar\'s member "\\xff\\xfe" {NO_MEMBER}'),
    "NUL in the name": (
        BOTH + entry(WEIGHTS.encode() + b"\0/../evil") + END,
        f'the tar\'s member "{WEIGHTS}" has bytes hidden behind its name',
    ),
    "hard link": (
        BOTH + entry("hard", type=b"1", linkname=b"/etc/passwd") + END,
        'the tar\'s member "hard" is a hard link' + ONLY_PLAIN,
    ),
    "hard link by name": (
        entry(CONFIG, b"{}") + entry(WEIGHTS, type=b"1", linkname=CONFIG.encode()) + END,
        f'the tar\'s member "{WEIGHTS}" is a hard link' + ONLY_PLAIN,
    ),
    "symbolic link": (
        entry(CONFIG, b"{}") + entry(WEIGHTS, type=b"2", linkname=b"/etc/shadow") + END,
        f'the tar\'s member "{WEIGHTS}" is a symbolic link' + ONLY_PLAIN,
    ),
    "link, then through it": (
        entry("a", type=b"2", linkname=b"/etc") + entry("a/evil") + BOTH + END,
        'the tar\'s member "a" is a symbolic link' + ONLY_PLAIN,
    ),
    "plain file with a link's target": (
        entry(CONFIG, b"{}") + entry(WEIGHTS, linkname=b"/etc/shadow") + END,
        f"the tar's member \"{WEIGHTS}\" is a plain file that names a link's target",
    ),
    "character device": (
        BOTH + entry("null", type=b"3", devmajor=b"0000001\0", devminor=b"0000003\0") + END,
        'the tar\'s member "null" is a character device' + ONLY_PLAIN,
    ),
    "block device": (BOTH + entry("sda", type=b"4") + END, 'the tar\'s member "sda" is a block device' + ONLY_PLAIN),
    "directory": (BOTH + entry("a/", type=b"5") + END, 'the tar\'s member "a/" is a directory' + ONLY_PLAIN),
    "fifo": (BOTH + entry("pipe", type=b"6") + END, 'the tar\'s member "pipe" is a fifo' + ONLY_PLAIN),
    "contiguous file": (
        entry(CONFIG, b"{}") + entry(WEIGHTS, b"weights", type=b"7") + END,
        f'the tar\'s member "{WEIGHTS}" is a contiguous file' + ONLY_PLAIN,
    ),
    "sparse": (
        entry(CONFIG, b"{}") + entry(WEIGHTS, type=b"S", magic=b"ustar  \0") + END,
        f'the tar\'s member "{WEIGHTS}" is a sparse file' + ONLY_PLAIN,
    ),
    "sparse fields in a plain file": (
        entry(CONFIG, b"{}") + entry(WEIGHTS, magic=b"ustar  \0", prefix=b"\0" * 41 + b"00000000000\0") + END,
        f'the tar\'s member "{WEIGHTS}" has a name prefix or another extension',
    ),
    "name prefix": (
        entry(CONFIG, b"{}") + entry(WEIGHTS, prefix=b"/etc") + END,
        f'the tar\'s member "{WEIGHTS}" has a name prefix or another extension',
    ),
    "pax": (
        entry("PaxHeaders/x", b"19 path=/etc/evil1\n", type=b"x") + BOTH + END,
        'the tar\'s member "PaxHeaders/x" is a pax header' + ONLY_PLAIN,
    ),
    "pax global": (
        entry("pax_global_header", b"13 path=evil\n", type=b"g") + BOTH + END,
        'the tar\'s member "pax_global_header" is a pax global header' + ONLY_PLAIN,
    ),
    "GNU long name": (
        entry("././@LongLink", b"../evil\0", type=b"L") + BOTH + END,
        'the tar\'s member "././@LongLink" is a GNU long name' + ONLY_PLAIN,
    ),
    "GNU long link": (
        entry("././@LongLink", b"/etc\0", type=b"K") + BOTH + END,
        'the tar\'s member "././@LongLink" is a GNU long link' + ONLY_PLAIN,
    ),
    "unknown type": (
        BOTH + entry("what", type=b"\x1b") + END,
        "the tar's member \"what\" is of the unknown type b'\\x1b'" + ONLY_PLAIN,
    ),
    "duplicate": (BOTH + entry(CONFIG, b"[]") + END, f'the tar holds "{CONFIG}" twice'),
    "missing config": (entry(WEIGHTS, b"weights") + END, f'the tar has no "{CONFIG}"'),
    "missing weights": (entry(CONFIG, b"{}") + END, f'the tar has no "{WEIGHTS}"'),
    "empty archive": (END, f'the tar has no "{CONFIG}"'),
    "empty file": (b"", "the tar ends at byte 0 without its closing blocks: it is cut short"),
    "no tar": (b"<html>" * 200, "the tar's header at byte 0 has a wrong checksum: it is damaged"),
    "gzip": (b"\x1f\x8b\x08" + bytes(1533), "the tar's header at byte 0 has a wrong checksum: it is damaged"),
    "bad checksum": (
        entry(CONFIG, b"{}") + entry(WEIGHTS, b"weights", checksum=b"000000\0 ") + END,
        "the tar's header at byte 1024 has a wrong checksum: it is damaged",
    ),
    "checksum in words": (
        entry(CONFIG, b"{}", checksum=b"0x12ab\0 ") + END,
        "the tar's header at byte 0 has a wrong checksum: it is damaged",
    ),
    "no magic": (entry(CONFIG, b"{}", magic=b"\0" * 8) + END, f'the tar\'s member "{CONFIG}" has no ustar header'),
    "larger than the archive": (
        entry(CONFIG, b"{}") + header(WEIGHTS, b"%011o\0" % 8192) + b"weights" + bytes(505) + END,
        f'the tar\'s member "{WEIGHTS}" claims 8192 bytes where 1536 are left',
    ),
    "a block larger than the archive": (
        entry(CONFIG, b"{}") + header(WEIGHTS, b"%011o\0" % 1025) + END,
        f'the tar\'s member "{WEIGHTS}" claims 1025 bytes where 1024 are left',
    ),
    "enormous": (
        entry(CONFIG, b"{}") + header(WEIGHTS, b"77777777777\0") + END,
        f'the tar\'s member "{WEIGHTS}" claims 8589934591 bytes where 1024 are left',
    ),
    "swallows the closing blocks": (
        entry(CONFIG, b"{}") + header(WEIGHTS, b"%011o\0" % 1024) + END,
        "the tar ends at byte 2560 without its closing blocks: it is cut short",
    ),
    "swallows the next header": (
        header(CONFIG, b"%011o\0" % 514) + b"{}" + bytes(510) + entry(WEIGHTS, b"weights") + END,
        f'the tar has bytes hidden behind the end of "{CONFIG}"',
    ),
    "base-256 size": (
        entry(CONFIG, b"{}") + header(WEIGHTS, b"\x80" + bytes(10) + b"\x07") + b"weights" + bytes(505) + END,
        f'the tar\'s member "{WEIGHTS}" gives its size in another way than octal digits',
    ),
    "negative base-256 size": (
        entry(CONFIG, b"{}") + header(WEIGHTS, b"\xff" * 12) + END,
        f'the tar\'s member "{WEIGHTS}" gives its size in another way than octal digits',
    ),
    "negative size": (
        entry(CONFIG, b"{}") + header(WEIGHTS, b"-0000000001\0") + END,
        f'the tar\'s member "{WEIGHTS}" gives its size in another way than octal digits',
    ),
    "size of two numbers": (
        entry(CONFIG, b"{}") + header(WEIGHTS, b"7 000000001\0") + END,
        f'the tar\'s member "{WEIGHTS}" gives its size in another way than octal digits',
    ),
    "no size": (
        entry(CONFIG, b"{}") + header(WEIGHTS, b"\0" * 12) + END,
        f'the tar\'s member "{WEIGHTS}" gives its size in another way than octal digits',
    ),
    "hidden in the padding": (
        header(CONFIG, b"00000000002\0") + b"{}" + bytes(509) + b"!" + entry(WEIGHTS, b"weights") + END,
        f'the tar has bytes hidden behind the end of "{CONFIG}"',
    ),
    "garbage after the end": (BOTH + END + bytes(511) + b"!", "the tar goes on after its end, at byte 2048"),
    "a second archive after the end": (BOTH + END + BOTH + END, "the tar goes on after its end, at byte 2048"),
    "one closing block": (BOTH + bytes(512), "the tar ends at byte 2560 without its closing blocks: it is cut short"),
    "one closing block, then more": (
        BOTH + bytes(512) + entry("evil") + END,
        "the tar goes on after its end, at byte 2048",
    ),
    "half a block at the end": (
        BOTH + END + bytes(100),
        "the tar ends at byte 3172 without its closing blocks: it is cut short",
    ),
}


@pytest.fixture
def used(pod: PodDirectory) -> PodDirectory:
    """A pod with a bundle in use."""
    digest = pod.stage(bundle(b"in use"))
    assert pod.place({"served": digest}).status == 0
    return pod


def unpack(pod: PodDirectory, digest: str) -> Answer:
    """Has a staged tar unpacked for a model of another stack than the one in use."""
    return pod.place({"evil": digest}, stack="other")


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_tar_is_refused_and_changes_nothing(case: str, used: PodDirectory) -> None:
    tar, why = HOSTILE[case]
    before = used.snapshot()
    digest = used.stage(tar)

    answer = unpack(used, digest)

    assert (answer.status, answer.lines) == (1, [f"{digest} is refused and removed: {why}"])
    assert used.snapshot() == before
    assert list((used.root / "staging").iterdir()) == []


def truncations() -> Iterator[int]:
    size = len(bundle())
    yield from range(0, size, 512)
    yield from (1, 100, 511, 513, 600, 1023, 1537, 2047, 2049, size - 513, size - 511, size - 1)


@pytest.mark.parametrize("length", sorted(set(truncations())))
def test_a_truncated_tar_is_refused(length: int, used: PodDirectory) -> None:
    before = used.snapshot()
    digest = used.stage(bundle()[:length])

    answer = unpack(used, digest)

    assert answer.status == 1
    assert len(answer.lines) == 1
    assert used.snapshot() == before


def test_a_wrong_digest_is_refused_before_anything_is_read(used: PodDirectory) -> None:
    wrong = "sha256:" + "0" * 64
    path = used.staged(wrong)
    path.write_bytes(bundle())
    before = used.snapshot()

    answer = unpack(used, wrong)

    assert answer.lines == [f"{wrong} is refused and removed: its digest is {digest_of(bundle())}"]
    assert (answer.status, path.exists()) == (1, False)
    assert used.snapshot() == before


def test_pythons_reader_must_see_the_same_files(used: PodDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second opinion: were our reader to miss something, tarfile's would not."""
    tar = bundle()
    members = [Member(CONFIG, 512, 2), Member(WEIGHTS, 1536, 3)]
    monkeypatch.setattr(tars, "read_tar", lambda fd, size: members)
    before = used.snapshot()
    digest = used.stage(tar)

    answer = unpack(used, digest)

    why = f'the tar reads differently with Python\'s tarfile: ["{CONFIG}", "{WEIGHTS}"]'
    assert (answer.status, answer.lines) == (1, [f"{digest} is refused and removed: {why}"])
    assert used.snapshot() == before


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="this Python has no data filter")
def test_tars_data_filter_is_asked_too(used: PodDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
        raise tarfile.AbsolutePathError(member)

    monkeypatch.setattr(tarfile, "data_filter", refuse)
    before = used.snapshot()
    digest = used.stage(bundle())

    answer = unpack(used, digest)

    why = f"Python's tarfile refuses the tar: member '{CONFIG}' has an absolute path"
    assert (answer.status, answer.lines) == (1, [f"{digest} is refused and removed: {why}"])
    assert used.snapshot() == before


def test_a_good_tar_becomes_a_read_only_blob(pod: PodDirectory) -> None:
    tar = bundle(b"w" * 3_000_000, b'{"r": 8}')
    digest = digest_of(tar)
    pod.run("missing", stdin={"bundles": {digest: len(tar)}})
    pod.stage(tar)

    answer = unpack(pod, digest)

    assert answer == (0, {"unpacked": [digest], "dropped": [], "collected": []}, [f"{digest} is unpacked"])
    blob = pod.blob(digest)
    assert sorted(path.name for path in blob.iterdir()) == [CONFIG, WEIGHTS]
    assert (blob / CONFIG).read_bytes() == b'{"r": 8}'
    assert (blob / WEIGHTS).read_bytes() == b"w" * 3_000_000
    assert (mode(blob), mode(blob / CONFIG), mode(blob / WEIGHTS)) == ("0o555", "0o444", "0o444")
    assert (mode(pod.root), mode(pod.root / "staging"), mode(blob.parent)) == ("0o755", "0o700", "0o755")
    assert list((pod.root / "staging").iterdir()) == []
    assert unpack(pod, digest).result["unpacked"] == []


def test_copying_works_where_the_kernel_cannot_copy_between_files(
    pod: PodDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    digest = pod.stage(bundle(b"w" * 3_000_001))

    assert unpack(pod, digest).status == 0
    assert (pod.blob(digest) / WEIGHTS).read_bytes() == b"w" * 3_000_001


OTHERWISE = (
    "it is written otherwise than lora-pods writes a bundle; if it came from a store, remove the object there, then "
    "run `lora push`"
)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_plain_tars_of_other_writers_are_refused(form: int, pod: PodDirectory) -> None:
    """Their blobs would hash as others."""
    digest = pod.stage(with_tarfile(GOOD, form, mode=0o6777, uid=1000, gid=1000, uname="alice", mtime=1_700_000_000))

    assert unpack(pod, digest) == (1, {}, [f"{digest} is refused and removed: {OTHERWISE}"])
    assert pod.blobs() == set()


@pytest.mark.parametrize(
    "tar",
    [
        entry(WEIGHTS, b"weights") + entry(CONFIG, b"{}") + END,
        BOTH + END + bytes(5120),
        entry(CONFIG, b"{}") + entry(WEIGHTS, b"weights", type=b"\0") + END,
        entry(CONFIG, b"{}", mode=b"0000600\0") + entry(WEIGHTS, b"weights") + END,
    ],
    ids=["another order", "more at the end", "the old plain type", "another mode"],
)
def test_the_same_files_in_another_tar_are_refused(tar: bytes, pod: PodDirectory) -> None:
    digest = pod.stage(tar)

    assert unpack(pod, digest) == (1, {}, [f"{digest} is refused and removed: {OTHERWISE}"])
    assert pod.blobs() == set()


def test_a_blob_that_lost_a_file_is_made_again(pod: PodDirectory) -> None:
    digest = pod.stage(bundle())
    unpack(pod, digest)
    pod.blob(digest).chmod(0o755)
    (pod.blob(digest) / WEIGHTS).unlink()
    assert pod.run("missing", stdin={"bundles": {digest: len(bundle())}}).result["missing"] == {digest: 0}

    pod.stage(bundle())
    assert unpack(pod, digest).result["unpacked"] == [digest]

    assert (pod.blob(digest) / WEIGHTS).read_bytes() == b"weights"


def test_a_killed_unpacking_leaves_no_blob_and_the_next_one_goes_through(
    pod: PodDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = pod.stage(bundle())

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            unpack(pod, digest)
    assert pod.blobs() == set()
    assert not (pod.root / "refs").exists()

    assert unpack(pod, digest).status == 0
    assert list((pod.root / "staging").iterdir()) == []


@pytest.mark.parametrize(
    ("stack", "model"),
    [("", "m"), ("..", "m"), *(("prod", model) for model in ("", "../m", ".m", "a b", "a/b", "a\n"))],
)
def test_what_is_no_stack_or_model_is_refused(stack: str, model: str, pod: PodDirectory) -> None:
    digest = pod.stage(bundle())
    before = pod.snapshot()

    answer = pod.place({model: digest}, stack=stack)

    assert answer.status == 1
    assert answer.lines[0].endswith("letters, digits, '.', '_' and '-' only")
    assert pod.snapshot() == before


@pytest.mark.parametrize(
    "digest", ["sha256:abc", "sha256:" + "A" * 64, "md5:" + "0" * 64, "../x", "sha256:" + "0" * 65]
)
def test_what_is_no_digest_is_refused(digest: str, pod: PodDirectory) -> None:
    for answer in (pod.place({"m": digest}), pod.run("missing", stdin={"bundles": {digest: 1}})):
        said = f'"{digest}" is not a digest: sha256: and 64 lowercase hex digits'
        assert (answer.status, answer.lines) == (1, [said])


@pytest.mark.parametrize("size", [0, 1, 511, 512, 8**11 - 1])
@pytest.mark.parametrize("name", tars.MEMBERS)
def test_the_header_is_the_one_the_program_writes(name: str, size: int) -> None:
    assert tars.ustar_header(name, size) == ustar_header(name, size)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(bundle()) - 1), st.integers(0, 255)), min_size=1, max_size=6
    ),
    fix_checksums=st.booleans(),
    cut=st.one_of(st.none(), st.integers(0, len(bundle()))),
    extra=st.binary(max_size=600),
)  # fmt: skip
def test_a_mutated_bundle_is_taken_whole_or_not_at_all(
    edits: list[tuple[int, int]], fix_checksums: bool, cut: int | None, extra: bytes, used: PodDirectory
) -> None:
    """Whatever bytes a tar holds: a blob has the two files, of the tar's own bytes, or nothing changed."""
    raw = bytearray(bundle())
    for position, value in edits:
        raw[position] = value
    if fix_checksums:
        for start in (0, 1024):
            raw[start + 148 : start + 156] = b" " * 8
            raw[start + 148 : start + 156] = b"%06o\0 " % sum(raw[start : start + 512])
    tar = bytes(raw[:cut]) + extra
    before = used.snapshot()
    digest = used.stage(tar)

    answer = unpack(used, digest)

    if answer.status == 1:
        assert len(answer.lines) == 1
        assert answer.lines[0].isprintable()
        assert used.snapshot() == before
    else:
        assert sorted(path.name for path in used.blob(digest).iterdir()) == [CONFIG, WEIGHTS]
        for name in (CONFIG, WEIGHTS):
            path = used.blob(digest) / name
            assert (mode(path), path.is_symlink()) == ("0o444", False)
            assert path.read_bytes() in tar
        undone = used.run("unplace", "--stack", "other", "--base", "org/base")
        assert undone.result == {"dropped": ["evil"], "collected": [digest]}
        assert used.snapshot() == before
    assert not used.staged(digest).exists()


def test_nothing_else_than_the_two_files_is_ever_opened_for_writing(used: PodDirectory, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "evil").write_bytes(b"untouched")
    for name in ("../outside/evil", "../../outside/evil", "../../../outside/evil", str(outside / "evil")):
        digest = used.stage(BOTH + entry(name, b"evil") + END)
        assert unpack(used, digest).status == 1
    assert (outside / "evil").read_bytes() == b"untouched"
