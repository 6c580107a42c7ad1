"""The check of a whole directory: all findings at once, of whatever is there, in bounded time and memory."""

import json
import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.check.adapter_check import Against, check_adapter
from components.core.findings import Finding
from tests.support.adapters import CONFIG, lora_shapes, safetensors_bytes, with_header, write_adapter

MEBIBYTE = 1024 * 1024
NOTHING_KNOWN = Against()


def rules(directory: Path, against: Against = NOTHING_KNOWN) -> list[tuple[str, str]]:
    """Rule and subject of everything found, in order."""
    return [(each.rule, each.subject) for each in checked(directory, against)]


def checked(directory: Path, against: Against = NOTHING_KNOWN) -> list[Finding]:
    found = check_adapter(directory, against)
    assert found == sorted(found)
    assert all(str(each).isprintable() and each.message.endswith(".") for each in found)
    return found


def lines(directory: Path) -> list[str]:
    return [f"{each.severity}: {each}".replace(str(directory), "DIR") for each in checked(directory)]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter")


# --- what lies around -------------------------------------------------------------------------------------


def test_a_sound_adapter(adapter: Path) -> None:
    assert checked(adapter) == []


def test_a_checkpoint_with_the_trainers_state_is_sound(adapter: Path) -> None:
    for name in ("optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state.pth", "pytorch_model.bin"):
        (adapter / name).touch()
    assert checked(adapter) == []


def test_a_checkpoint_without_adapter_weights(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "pytorch_model.bin")
    assert lines(adapter) == [
        "error: DIR: holds no adapter_model.safetensors; adapters are served from no other name. Found: "
        "pytorch_model.bin."
    ]


def test_two_weights_files(adapter: Path) -> None:
    (adapter / "adapter_model.bin").touch()
    assert lines(adapter) == [
        "error: DIR: adapter_model.bin: lies beside adapter_model.safetensors; vLLM loads adapter_model.safetensors "
        "and never looks at adapter_model.bin. Delete the one that is out of date."
    ]
    (adapter / "adapter_model.pt").touch()
    assert rules(adapter) == [("two-weights", "adapter_model.bin"), ("two-weights", "adapter_model.pt")]


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_pickled_weights_alone(adapter: Path, name: str) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / name)
    assert rules(adapter) == [("no-weights", "")]


def test_the_parent_of_adapters(tmp_path: Path) -> None:
    for name in ("default", "reward"):
        write_adapter(tmp_path / "run" / name)
    assert lines(tmp_path / "run") == [
        "error: DIR: holds no adapter_config.json, but these folders in it do: default, reward; name the one to serve."
    ]


def test_what_is_left_aside(adapter: Path) -> None:
    (adapter / "chat_template.jinja").touch()
    (adapter / "new_embeddings.safetensors").touch()
    assert [(each.severity, each.rule) for each in checked(adapter)] == [
        ("warning", "chat-template"),
        ("warning", "new-embeddings"),
    ]


def test_no_directory(tmp_path: Path) -> None:
    assert lines(tmp_path / "none") == ["error: DIR: no such directory."]
    assert rules(tmp_path / "none\0x") == [("directory", "")]


# --- all at once ------------------------------------------------------------------------------------------


def test_every_fault_of_every_file_is_told_at_once(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", {**CONFIG, "r": 0, "use_dora": True}, b"short")
    (directory / "adapter_model.bin").touch()
    assert rules(directory) == [
        ("two-weights", "adapter_model.bin"),
        ("dora", "use_dora"),
        ("rank", "r"),
        ("damaged", ""),
    ]


def test_a_broken_config_does_not_hide_the_tensors(tmp_path: Path) -> None:
    shapes = {**lora_shapes(), "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": [8]}
    found = checked(write_adapter(tmp_path / "a", b"{", shapes))
    assert [(each.path.rsplit("/", 1)[-1], each.rule) for each in found if each.severity == "error"] == [
        ("adapter_config.json", "not-json"),
        ("adapter_model.safetensors", "dora"),
    ]


def test_findings_name_the_directory_as_the_caller_did(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(adapter, {**CONFIG, "r": 0})
    monkeypatch.chdir(adapter.parent)
    assert {each.path for each in checked(Path("adapter"))} == {
        "adapter/adapter_config.json",
    }
    monkeypatch.chdir(adapter)
    assert {each.path for each in checked(Path())} == {"adapter_config.json"}


def test_the_version_and_the_base_are_taken_into_account(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", {**CONFIG, "rank_pattern": {"q_proj": 8}, "r": 4})
    assert ("pattern-ignored", "rank_pattern") in rules(directory, Against(vllm="0.31.0"))
    assert ("wrong-base", "base_model_name_or_path") in rules(directory, Against(base="other/model"))


# --- hostile files ----------------------------------------------------------------------------------------


def link_out(path: Path) -> None:
    (path.parent.parent / "secret").write_text("{}")
    path.symlink_to("../secret")


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def of_a_gigabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b'{"r": 4, "x": "')
        file.truncate(1024 * MEBIBYTE)


def of_zeros(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1024 * MEBIBYTE)


def nested_deeply(path: Path) -> None:
    deep = b'{"a":' * 100_000
    path.write_bytes(deep if path.suffix == ".json" else with_header(deep))


def twice(path: Path) -> None:
    text = b'{"r": 4, "r": 8, "lora_alpha": 1, "target_modules": []}'
    path.write_bytes(text if path.suffix == ".json" else with_header(text))


def of_a_million_tensors(path: Path) -> None:
    entry = b'"%d":{"dtype":"F32","shape":[],"data_offsets":[0,0]},'
    path.write_bytes(with_header(b"{" + b"".join(entry % number for number in range(1_000_000)) + b'"x":1}'))


def of_small_objects(path: Path) -> None:
    path.write_bytes(with_header(b"[" + b"{}," * 11_000_000 + b"1]"))


def of_a_long_number(path: Path) -> None:
    path.write_bytes(with_header(b'{"a": ' + b"9" * 30_000_000 + b"}"))


def of_small_texts(path: Path) -> None:
    path.write_bytes(with_header(b"[" + b'"ab",' * 2_000_000 + b"1]"))


def claiming_too_much(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize(
    "put",
    [
        link_out,
        link_to_device,
        link_to_itself,
        fifo,
        folder,
        of_a_gigabyte,
        of_zeros,
        nested_deeply,
        twice,
        of_a_million_tensors,
        of_small_objects,
        of_a_long_number,
        of_small_texts,
        claiming_too_much,
    ],
)
def test_a_hostile_file_is_one_finding_soon_and_without_much_memory(
    adapter: Path, put: Callable[[Path], None], name: str
) -> None:
    (adapter / name).unlink()
    put(adapter / name)
    tracemalloc.start()
    began = time.monotonic()
    found = checked(adapter)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [(each.severity, each.path) for each in found] == [("error", str(adapter / name))]
    assert time.monotonic() - began < 20
    assert peak < 600 * MEBIBYTE


def test_metadata_of_many_keys_is_not_read(adapter: Path) -> None:
    entries = b",".join(b'"%d":""' % number for number in range(400_000))
    (adapter / "adapter_model.safetensors").write_bytes(with_header(b'{"__metadata__":{' + entries + b"}}"))
    tracemalloc.start()
    (finding,) = checked(adapter)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "its __metadata__ has more than 100000 entries" in finding.message
    assert peak < 20 * MEBIBYTE


def test_metadata_with_json_in_it_is_sound(adapter: Path) -> None:
    notes = json.dumps({"format": "pt", "tags": json.dumps({f"tag {number}": 1 for number in range(50_000)})})
    weights = safetensors_bytes(lora_shapes())
    length = int.from_bytes(weights[:8], "little")
    header = weights[8 : 8 + length].replace(b'{"format": "pt"}', notes.encode())
    (adapter / "adapter_model.safetensors").write_bytes(with_header(header, weights[8 + length :]))
    assert checked(adapter) == []


@pytest.mark.parametrize(
    "key",
    [
        r"(?i:[\u0100-\uffff\U00010000-\U0010ffff]){number}",
        "(?i:[\u0100-\uffff\U00010000-\U0010ffff]){number}",
        "{number}" + "[\u0100-\uffff]" * 90,
        "{number}" + "(" * 200 + ")" * 200,
        "{number}" + "(?:a{{1,9999}}" * 30 + "){{1,9999}}" * 30,
        "{number}" + "[a-zA-Z0-9_]" * 40,
        "{number}" + "(a|b|ab)*" * 50,
        "{number}" + r"\w\W\d\D" * 60,
    ],
)
@pytest.mark.parametrize("count", [40, 100, 1000])
def test_expressions_that_are_slow_to_compile_are_not_compiled(adapter: Path, key: str, count: int) -> None:
    pattern = {key.format(number=number): 4 for number in range(count)}
    write_adapter(adapter, {**CONFIG, "rank_pattern": pattern, "alpha_pattern": pattern})
    began = time.monotonic()
    checked(adapter)
    assert time.monotonic() - began < 2


def test_names_full_of_escape_codes(tmp_path: Path) -> None:
    evil = "\x1b[2J\n\u202e\ud800"
    config = {**CONFIG, evil: 1, "use_" + evil: True, "rank_pattern": {evil: 0}, "target_modules": [evil]}
    shapes = {f"base_model.model.{evil}.lora_A.weight": [4, 8], evil: [1]}
    checked(write_adapter(tmp_path / "a", json.dumps(config).encode(), shapes))


@pytest.mark.skipif(os.name != "posix", reason="only POSIX takes such names")
def test_a_directory_with_an_evil_name(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "\x1b[31m\nx", b"{")
    assert "\\x1b[31m\\nx" in str(checked(directory)[0])


# --- anything at all --------------------------------------------------------------------------------------


@given(config=st.binary(max_size=60), weights=st.binary(max_size=80), header=st.booleans())
def test_any_bytes_are_findings(
    tmp_path_factory: pytest.TempPathFactory, config: bytes, weights: bytes, header: bool
) -> None:
    checked(write_adapter(tmp_path_factory.mktemp("a"), config, with_header(weights) if header else weights))


shapes = st.dictionaries(
    st.text(max_size=12)
    | st.sampled_from([*lora_shapes(), "base_model.model.model.embed_tokens.lora_embedding_A", "x.lora_A.weight"]),
    st.lists(st.integers(0, 9), max_size=4),
    max_size=6,
)


@given(shapes=shapes, fill=st.integers(0, 255))
def test_any_tensors_are_findings(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, list[int]], fill: int
) -> None:
    shapes.pop("__metadata__", None)
    weights = safetensors_bytes(shapes, fill=fill)
    found = checked(write_adapter(tmp_path_factory.mktemp("a"), CONFIG, weights))
    assert all(each.rule != "damaged" for each in found)


@given(changes=st.dictionaries(st.integers(0, 400), st.integers(0, 255), min_size=1, max_size=3))
def test_a_flipped_byte_of_the_header_never_raises(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[int, int]
) -> None:
    weights = bytearray(safetensors_bytes(lora_shapes()))
    for position, value in changes.items():
        weights[position] = value
    checked(write_adapter(tmp_path_factory.mktemp("a"), CONFIG, bytes(weights)))
