import json
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.adapter import Adapter, locate_adapter, open_regular, read_adapter
from components.core.errors import UserError, os_reason, printable
from tests.support.adapters import (
    CONFIG,
    Json,
    lora_shapes,
    tensor_name,
    with_header,
    write_adapter,
)


def refusal(directory: Path) -> str:
    """The sentence with which an adapter is refused, without the directory in front."""
    with pytest.raises(UserError) as caught:
        read_adapter(directory)
    message = str(caught.value)
    assert message.isprintable()
    return message.replace(str(directory), "DIR")


def config_with(**changes: Json) -> Mapping[str, Json]:
    return {**CONFIG, **changes}


def config_without(*keys: str) -> Mapping[str, Json]:
    return {key: value for key, value in CONFIG.items() if key not in keys}


# --- a sound adapter --------------------------------------------------------------------------------------


def test_a_sound_adapter(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    assert read_adapter(directory) == Adapter(
        directory=directory,
        config=directory / "adapter_config.json",
        weights=directory / "adapter_model.safetensors",
        rank=4,
        modules=("q_proj", "v_proj"),
        parameters=4 * 4 * 8,
        base="example/base",
    )


def test_the_directory_stays_as_named_and_the_files_are_real(tmp_path: Path) -> None:
    write_adapter(tmp_path / "v3")
    (tmp_path / "current").symlink_to("v3")
    adapter = read_adapter(tmp_path / "current")
    assert (adapter.directory, adapter.config) == (tmp_path / "current", tmp_path / "v3" / "adapter_config.json")


@pytest.mark.parametrize(
    ("config", "shapes", "rank"),
    [
        (config_with(r=16), lora_shapes(rank=4), 16),
        (config_with(r=4), lora_shapes(rank=32), 32),
        (config_with(r=4, rank_pattern={"q_proj": 64, "v_proj": 2}), lora_shapes(rank=4), 64),
        (config_with(r=4, rank_pattern=None), lora_shapes(rank=4), 4),
        (config_with(r=4, rank_pattern={}), lora_shapes(rank=4), 4),
        (config_with(r=4), {"m.embed_tokens.lora_embedding_A": [8, 900], "m.embed_tokens.lora_embedding_B": [9, 8]}, 8),
        # 64 experts of rank 4 in one matrix: vllm/lora/model_manager.py reshapes it to (64, 4, 8).
        (config_with(r=4), {"m.mlp.experts.lora_A.weight": [256, 8], "m.mlp.experts.lora_B.weight": [8, 256]}, 4),
        (config_with(r=4), {"m.mlp.experts.base_layer.lora_A.weight": [256, 8]}, 4),
        (config_with(r=4), {"m.mlp.experts.0.up_proj.lora_A.weight": [8, 8]}, 8),
        # A convolution's matrix has four dimensions.
        (config_with(r=4), {"m.conv.lora_A.weight": [6, 3, 3, 3]}, 6),
    ],
)  # fmt: skip
def test_the_largest_real_rank(
    tmp_path: Path, config: Mapping[str, Json], shapes: Mapping[str, Sequence[int]], rank: int
) -> None:
    assert read_adapter(write_adapter(tmp_path / "a", config, shapes)).rank == rank


def test_only_lora_matrices_count(tmp_path: Path) -> None:
    shapes = {
        tensor_name("q_proj", "A"): [4, 8],
        tensor_name("q_proj", "A", layer=1): [4, 8],
        "base_model.model.model.embed_tokens.lora_embedding_B": [8, 4],
        "base_model.model.mlp.experts.base_layer.lora_B.weight": [5, 4],
        "base_model.model.lm_head.base_layer.weight": [100, 8],
        "base_model.model.score.weight": [3, 8],
    }
    adapter = read_adapter(write_adapter(tmp_path / "a", CONFIG, shapes))
    assert (adapter.modules, adapter.parameters) == (("embed_tokens", "experts", "q_proj"), 32 + 32 + 32 + 20)


@pytest.mark.parametrize("targets", [["q_proj"], [], "all-linear", r"model.*(q_proj|v_proj)$", None])
def test_target_modules_may_be_names_or_one_text_or_null(tmp_path: Path, targets: Json) -> None:
    adapter = read_adapter(write_adapter(tmp_path / "a", config_with(target_modules=targets)))
    assert adapter.modules == ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("config", "base"),
    [
        (config_with(base_model_name_or_path="/home/someone/model"), "/home/someone/model"),
        (config_with(base_model_name_or_path=""), None),
        (config_with(base_model_name_or_path=None), None),
        (config_with(base_model_name_or_path=7), None),
        (config_with(base_model_name_or_path="\ud800"), None),
        (config_without("base_model_name_or_path"), None),
    ],
)
def test_the_base_is_what_the_trainer_wrote(tmp_path: Path, config: Mapping[str, Json], base: str | None) -> None:
    assert read_adapter(write_adapter(tmp_path / "a", config)).base == base


def test_unknown_keys_are_nobodys_business(tmp_path: Path) -> None:
    config = config_with(corda_config=None, eva_config={"rho": 2.0}, key_of_the_future=[1, {"a": None}])
    assert read_adapter(write_adapter(tmp_path / "a", config)).rank == 4


def test_crlf_and_not_a_number_elsewhere_are_read_as_vllm_reads_them(tmp_path: Path) -> None:
    config = b'{\r\n "r": 4,\r\n "lora_alpha": 16.5,\r\n "target_modules": [],\r\n "x": NaN\r\n}\r\n'
    assert read_adapter(write_adapter(tmp_path / "a", config)).rank == 4


def test_an_empty_tensor_list_in_metadata_and_padding_are_sound(tmp_path: Path) -> None:
    weights = with_header(b'{"m.q.lora_A.weight":{"dtype":"F8_E4M3","shape":[4,2],"data_offsets":[0,8]}}   ', bytes(8))
    assert read_adapter(write_adapter(tmp_path / "a", CONFIG, weights)).parameters == 8


def test_only_the_header_of_the_weights_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_adapter(tmp_path / "a", CONFIG, lora_shapes(rank=4, width=100_000))
    header = 8 + struct.unpack("<Q", (directory / "adapter_model.safetensors").read_bytes()[:8])[0]
    read: list[int] = []

    class CountingFile(FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            read.append(len(data))
            return data

    monkeypatch.setattr("components.core.adapter_files.FileIO", CountingFile)
    read_adapter(directory)
    assert sum(read) == (directory / "adapter_config.json").stat().st_size + header


# --- directories ------------------------------------------------------------------------------------------


def test_no_directory(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == "DIR: no such directory."


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file") == ("DIR: not a directory; name the directory that holds adapter_config.json.")
    assert refusal(tmp_path / "file" / "below") == "DIR: cannot be read (not a directory)."


def test_paths_no_system_takes(tmp_path: Path) -> None:
    assert refusal(tmp_path / ("x" * 300)) == "DIR: cannot be read (file name too long)."
    with pytest.raises(UserError, match=r"^/a\\x00b: a path cannot hold a NUL character\.$"):
        read_adapter(Path("/a\0b"))


def test_a_loop_of_directories(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert refusal(tmp_path / "a") in (
        "DIR: cannot be read (too many levels of symbolic links).",
        "DIR: cannot be read (symlink loop).",
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_may_not_be_read(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    (directory / "adapter_config.json").chmod(0)
    assert refusal(directory) == "DIR/adapter_config.json: cannot be read (permission denied)."


def test_permission_denied_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_adapter(tmp_path / "a")

    def refuse(path: object, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("components.core.adapter_files.os.open", refuse)
    assert refusal(directory) == "DIR/adapter_config.json: cannot be read (permission denied)."


def test_an_empty_directory(tmp_path: Path) -> None:
    assert refusal(tmp_path) == (
        "DIR: holds no adapter_config.json; name the directory that PEFT's save_pretrained wrote."
    )


def test_the_parent_of_adapters_names_its_children(tmp_path: Path) -> None:
    write_adapter(tmp_path / "run" / "default")
    write_adapter(tmp_path / "run" / "re\nward")
    (tmp_path / "run" / "logs").mkdir()
    assert refusal(tmp_path / "run") == (
        "DIR: holds no adapter_config.json, but these folders in it do: default, re\\nward; name the one to serve."
    )


def test_many_children_are_not_all_named(tmp_path: Path) -> None:
    for number in range(10):
        write_adapter(tmp_path / f"checkpoint-{number}")
    assert refusal(tmp_path).endswith("checkpoint-6, checkpoint-7 and 2 more; name the one to serve.")


def test_no_weights(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    (directory / "adapter_model.safetensors").rename(directory / "model.safetensors")
    assert refusal(directory) == (
        "DIR: holds no adapter_model.safetensors; adapters are served from no other name. Found: model.safetensors."
    )
    (directory / "model.safetensors").unlink()
    assert refusal(directory) == (
        "DIR: holds no adapter_model.safetensors; adapters are served from no other name. Found: nothing else."
    )


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_pickled_weights(tmp_path: Path, name: str) -> None:
    directory = write_adapter(tmp_path / "a")
    (directory / "adapter_model.safetensors").rename(directory / name)
    assert refusal(directory) == (
        f"DIR: holds no adapter_model.safetensors; convert {name} to safetensors (PEFT's save_pretrained with "
        f"safe_serialization=True). Found: {name}."
    )


def test_sharded_weights(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model-00001-of-00002.safetensors")
    assert refusal(directory) == (
        "DIR: holds no adapter_model.safetensors; vLLM reads no shards: save the adapter again as one file. "
        "Found: adapter_model-00001-of-00002.safetensors."
    )


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_two_weights_files_are_the_checks_business(tmp_path: Path, name: str) -> None:
    directory = write_adapter(tmp_path / "a")
    (directory / name).touch()
    assert read_adapter(directory).weights == directory / "adapter_model.safetensors"


# --- links and strange files ------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A snapshot of a Hugging Face cache: links into the model's blobs."""
    model = tmp_path / "hub" / "models--acme--support"
    write_adapter(tmp_path / "plain")
    (model / "blobs").mkdir(parents=True)
    snapshot = model / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for name, blob in (("adapter_config.json", "c0ffee"), ("adapter_model.safetensors", "f00d")):
        (tmp_path / "plain" / name).rename(model / "blobs" / blob)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot


def test_links_into_the_hub_caches_blobs(hub: Path) -> None:
    adapter = read_adapter(hub)
    blobs = hub.parents[1] / "blobs"
    assert (adapter.config, adapter.weights) == (blobs / "c0ffee", blobs / "f00d")


def test_links_into_another_model_of_the_hub_cache(hub: Path) -> None:
    other = hub.parents[2] / "models--evil--other" / "blobs"
    other.mkdir(parents=True)
    (hub.parents[1] / "blobs" / "c0ffee").rename(other / "c0ffee")
    (hub / "adapter_config.json").unlink()
    (hub / "adapter_config.json").symlink_to("../../../models--evil--other/blobs/c0ffee")
    assert refusal(hub) == (
        "DIR/adapter_config.json: the link leads out of the adapter's directory; replace it by a copy of the file."
    )


def test_a_link_within_the_adapter(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    (directory / "v1").mkdir()
    (directory / "adapter_model.safetensors").rename(directory / "v1" / "weights")
    (directory / "adapter_model.safetensors").symlink_to("v1/weights")
    assert read_adapter(directory).weights == directory / "v1" / "weights"


def link_out(directory: Path) -> None:
    write_adapter(directory.parent / "elsewhere")
    (directory / "adapter_config.json").symlink_to("../elsewhere/adapter_config.json")


def link_to_device(directory: Path) -> None:
    (directory / "adapter_config.json").symlink_to("/dev/null")


def link_to_nothing(directory: Path) -> None:
    (directory / "adapter_config.json").symlink_to("gone")


def link_to_itself(directory: Path) -> None:
    (directory / "adapter_config.json").symlink_to("adapter_config.json")


def link_to_directory(directory: Path) -> None:
    (directory / "adapter_config.json").symlink_to(".")


def fifo(directory: Path) -> None:
    os.mkfifo(directory / "adapter_config.json")


def folder(directory: Path) -> None:
    (directory / "adapter_config.json").mkdir()


@pytest.mark.parametrize(
    ("put", "sentence"),
    [
        (link_out, "the link leads out of the adapter's directory; replace it by a copy of the file."),
        (link_to_device, "the link does not lead to a plain file; replace it by a copy of the file."),
        (link_to_nothing, "the link leads to nothing; download the adapter again or copy the file here."),
        (link_to_itself, "the link cannot be followed; replace it by a copy of the file."),
        (link_to_directory, "the link does not lead to a plain file; replace it by a copy of the file."),
        (fifo, "not a plain file."),
        (folder, "not a plain file."),
    ],
)
def test_strange_files(tmp_path: Path, put: Callable[[Path], None], sentence: str) -> None:
    directory = write_adapter(tmp_path / "a")
    (directory / "adapter_config.json").unlink()
    put(directory)
    assert refusal(directory) == "DIR/adapter_config.json: " + sentence


def test_a_file_swapped_for_a_link_or_a_fifo_after_it_was_located(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.symlink_to("/etc/passwd")
    with pytest.raises(UserError, match=r"^PLACE: not a plain file\.$"):
        open_regular(path, "PLACE")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"^PLACE: not a plain file\.$"):
        open_regular(path, "PLACE")
    path.unlink()
    with pytest.raises(UserError, match=r"^PLACE: cannot be read \(no such file or directory\)\.$"):
        open_regular(path, "PLACE")


def test_locating_opens_nothing(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("opened or listed something")

    monkeypatch.setattr("os.open", refuse)
    monkeypatch.setattr("os.scandir", refuse)
    monkeypatch.setattr("os.listdir", refuse)
    monkeypatch.setattr("components.core.adapter_files.FileIO", refuse)
    assert locate_adapter(hub).directory == hub


# --- the config -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (b'{"r": 8, "lora_alpha": 16, "r": 4}', 'the key "r" stands in it twice; keep one.'),
        (b'{"x": {"a\\u001b": 1, "a\\u001b": 2}}', 'the key "a\\x1b" stands in it twice; keep one.'),
        (b'{"r": 8,\n "lora_alpha": }', "not JSON (Expecting value, line 2); PEFT's save_pretrained writes the file."),
        (b"", "not JSON (Expecting value, line 1); PEFT's save_pretrained writes the file."),
        (b"[" * 100_000, "not JSON that can be read; PEFT's save_pretrained writes the file."),
        (b'{"r": ' + b"9" * 5000 + b"}", "not JSON that can be read; PEFT's save_pretrained writes the file."),
        (b"[1]", "not a JSON object; PEFT's save_pretrained writes one."),
        (b'{"r": "\xff"}', "not UTF-8 text; PEFT's save_pretrained writes the file."),
        (
            b'\xef\xbb\xbf{"r": 8, "lora_alpha": 16, "target_modules": []}',
            "starts with a byte order mark, which vLLM does not read; save it as UTF-8 without one.",
        ),
        (
            json.dumps(CONFIG).encode("utf-16"),
            "starts with a byte order mark, which vLLM does not read; save it as UTF-8 without one.",
        ),
        (b" " * (1024 * 1024 + 1), "larger than 1 MiB, which no adapter's config is."),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
            "a Git LFS pointer, not the config itself; run git lfs pull.",
        ),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_read(tmp_path: Path, config: bytes, sentence: str) -> None:
    assert refusal(write_adapter(tmp_path / "a", config)) == f"DIR/adapter_config.json: {sentence}"


def test_a_config_of_exactly_1_mib_is_read(tmp_path: Path) -> None:
    text = json.dumps(CONFIG).encode()
    assert read_adapter(write_adapter(tmp_path / "a", text + b" " * (1024 * 1024 - len(text)))).rank == 4


# --- the safetensors header -------------------------------------------------------------------------------


def entry(name: str = "m.q.lora_A.weight", **fields: Json) -> bytes:
    return json.dumps({name: {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32], **fields}}).encode()


TWICE = b'{"m.q.lora_A.weight":1,"m.q.lora_A.weight":2}'
HOLE = json.dumps(
    {
        "m.q.lora_A.weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]},
        "m.q.lora_B.weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": [8, 12]},
    }
).encode()
OVERLAP = HOLE.replace(b"[8, 12]", b"[2, 6]")


@pytest.mark.parametrize(
    ("weights", "what"),
    [
        (b"", "it is 0 bytes long"),
        (b"1234567", "it is 7 bytes long"),
        (struct.pack("<Q", 2**63) + b"{}", "its header claims 9223372036854775808 bytes, and the file has 10"),
        (
            struct.pack("<Q", 33_554_433) + bytes(33_554_433),
            "its header has 33554433 bytes, over the limit of 33554432",
        ),
        (with_header(b"{" * 200_001), "its header has more than 200000 entries"),
        (with_header(b"[" * 400_001), "its header has more than 200000 entries"),
        (struct.pack("<Q", 3) + b"{}", "its header claims 3 bytes, and the file has 10"),
        (with_header(b""), "its header is not JSON"),
        (with_header(b"\xff"), "its header is not JSON"),
        (with_header(b"[" * 100_000), "its header is not JSON"),
        (with_header(b'{"a": NaN}'), "its header is not JSON"),
        (with_header(b"[]"), "its header is not a JSON object"),
        (with_header(TWICE), 'the key "m.q.lora_A.weight" stands in it twice'),
        (with_header(b'{"__metadata__": {"format": 1}}'), "its __metadata__ is not a map of texts"),
        (with_header(b'{"__metadata__": []}'), "its __metadata__ is not a map of texts"),
        (with_header(b'{"a\\u001b\\n": 1}'), "the entry of a\\x1b\\n is not an object"),
        (with_header(entry(dtype="F33"), bytes(32)), "the dtype of m.q.lora_A.weight is unknown"),
        (with_header(entry(dtype=["F32"]), bytes(32)), "the dtype of m.q.lora_A.weight is unknown"),
        (with_header(entry(shape=[4, -2]), bytes(32)), "the shape or place of m.q.lora_A.weight is malformed"),
        (with_header(entry(shape=[4, True]), bytes(32)), "the shape or place of m.q.lora_A.weight is malformed"),
        (with_header(entry(shape=[2**64]), bytes(32)), "the shape or place of m.q.lora_A.weight is malformed"),
        (with_header(entry(shape=None), bytes(32)), "the shape or place of m.q.lora_A.weight is malformed"),
        (with_header(entry(data_offsets=[0]), bytes(32)), "the shape or place of m.q.lora_A.weight is malformed"),
        (with_header(entry(data_offsets=[0, 32.0]), bytes(32)), "the shape or place of m.q.lora_A.weight is malformed"),
        (with_header(entry(shape=[2**33, 2**33]), bytes(32)), "m.q.lora_A.weight is larger than any file"),
        (with_header(entry(shape=[2**62]), bytes(32)), "the size of m.q.lora_A.weight does not fit its shape"),
        (with_header(entry(shape=[4, 3]), bytes(32)), "the size of m.q.lora_A.weight does not fit its shape"),
        (with_header(entry(data_offsets=[32, 0]), bytes(32)), "the size of m.q.lora_A.weight does not fit its shape"),
        (with_header(entry(data_offsets=[8, 40]), bytes(40)), "the data of m.q.lora_A.weight overlap, or leave a hole"),
        (with_header(HOLE, bytes(12)), "the data of m.q.lora_B.weight overlap, or leave a hole"),
        (with_header(OVERLAP, bytes(6)), "the data of m.q.lora_B.weight overlap, or leave a hole"),
        (with_header(entry(), bytes(31)), "its tensors take 32 bytes, and 31 are there"),
        (with_header(entry(), bytes(33)), "its tensors take 32 bytes, and 33 are there"),
    ],
)  # fmt: skip
def test_damaged_weights(tmp_path: Path, weights: bytes, what: str) -> None:
    assert refusal(write_adapter(tmp_path / "a", CONFIG, weights)) == (
        f"DIR/adapter_model.safetensors: damaged, or not a safetensors file: {what}. Copy or save it again."
    )


def test_a_git_lfs_pointer(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    assert refusal(write_adapter(tmp_path / "a", CONFIG, pointer)) == (
        "DIR/adapter_model.safetensors: a Git LFS pointer, not the weights themselves; run git lfs pull."
    )


@pytest.mark.parametrize(
    ("shapes", "modules"),
    [
        ({}, ()),
        ({"m.q.lora_A.bias": [4, 4], "m.lora_A": [1, 1], "weight": [1, 1], "m.q.lora_magnitude_vector": [4, 1]}, ()),
        ({"m.q.lora_A.weight": [], "m.v.lora_A.weight": [9]}, ("q", "v")),
        ({"lora_A.weight": [8, 2], "m..lora_A.weight": [4, 2]}, ()),
        ({"m.q\n.lora_A.weight": [4, 2], "m.\u202e.lora_A.weight": [4, 2]}, ("\\u202e", "q\\n")),
    ],
)
def test_odd_tensors_do_not_hinder_reading(
    tmp_path: Path, shapes: Mapping[str, Sequence[int]], modules: tuple[str, ...]
) -> None:
    assert read_adapter(write_adapter(tmp_path / "a", CONFIG, shapes)).modules == modules


@pytest.mark.parametrize(
    ("config", "rank"),
    [
        ({}, 4),
        (config_with(r=0), 4),
        (config_with(r=True), 4),
        (config_with(r="16"), 4),
        (config_with(rank_pattern={"q": 7, "v": float("nan"), "k": True}), 7),
        (config_with(rank_pattern=[8]), 4),
    ],
)
def test_a_config_that_vllm_refuses_does_not_hinder_reading(
    tmp_path: Path, config: Mapping[str, Json], rank: int
) -> None:
    assert read_adapter(write_adapter(tmp_path / "a", config)).rank == rank


def test_there_is_always_a_rank(tmp_path: Path) -> None:
    assert read_adapter(write_adapter(tmp_path / "a", {}, {})).rank == 1


# --- anything at all --------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
names = st.text() | st.sampled_from(
    ["__metadata__", "m.q.lora_A.weight", "m.q.lora_B.weight", "m.embed_tokens.lora_embedding_A", "lora_A.weight"]
)
sizes = st.integers(-1, 9) | st.integers()
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F4", "F33"]) | json_values,
        "shape": st.lists(sizes, max_size=3) | json_values,
        "data_offsets": st.lists(sizes, min_size=2, max_size=2) | json_values,
    },
)
headers = st.binary(max_size=200) | st.dictionaries(names, entries | json_values, max_size=4).map(
    lambda header: json.dumps(header).encode()
)


def assert_answer_or_user_error(directory: Path) -> None:
    try:
        adapter = read_adapter(directory)
    except UserError as error:
        sentence = str(error)
    else:
        sentence = "A sound one."
        assert adapter.rank >= 1
        assert all(name.isprintable() for name in adapter.modules)
    assert sentence.isprintable()
    assert re.fullmatch(r"\S.*\.", sentence)


@given(header=headers, data=st.binary(max_size=40), length_off_by=st.integers(-2, 2))
def test_any_weights_give_an_answer_or_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, header: bytes, data: bytes, length_off_by: int
) -> None:
    weights = struct.pack("<Q", max(0, len(header) + length_off_by)) + header + data
    assert_answer_or_user_error(write_adapter(tmp_path_factory.mktemp("a"), CONFIG, weights))


config_documents = st.dictionaries(
    st.sampled_from(["r", "lora_alpha", "target_modules", "rank_pattern", "base_model_name_or_path", "peft_type"]),
    json_values | st.integers(1, 64) | st.dictionaries(st.text(), st.integers(1, 64), max_size=3),
).map(lambda changes: json.dumps({**CONFIG, **changes}).encode())


@given(config=st.binary(max_size=200) | config_documents | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_config_gives_an_answer_or_one_sentence(tmp_path_factory: pytest.TempPathFactory, config: bytes) -> None:
    assert_answer_or_user_error(write_adapter(tmp_path_factory.mktemp("a"), config))


# --- terminal-safe text -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 日本", "plain é 日本"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\u202eevil\u2066", "\\u202eevil\\u2066"),
        ("\udcff\x9b", "\\udcff\\x9b"),
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 200 + "…"),
        (7, "7"),
    ],
)
def test_printable(text: object, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_printable_is_always_one_harmless_line(text: str) -> None:
    assert printable(text).isprintable()


def test_os_reason() -> None:
    assert os_reason(PermissionError(13, "Permission denied")) == "permission denied"
    assert os_reason(OSError("odd")) == "oserror"
