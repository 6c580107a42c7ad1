"""What a PEFT (LoRA) adapter directory holds, read without reading a tensor.

Which files and names count is vLLM's rule, not ours; read in vLLM 0.32.0:

* ``vllm/lora/peft_helper.py`` ``PEFTHelper.from_local_dir``: opens ``adapter_config.json``, as text without a
  byte order mark; ``r``, ``lora_alpha`` and ``target_modules`` must be present, other keys are optional.
* ``vllm/lora/lora_model.py`` ``LoRAModel.from_local_checkpoint``: opens ``adapter_model.safetensors``, and only
  where that is missing ``adapter_model.bin``, then ``.pt``; top level only, no shards.
* ``vllm/lora/utils.py`` ``parse_fine_tuned_lora_name``: which tensor names are LoRA matrices.

Nothing else in the directory is opened by vLLM, nor here.
"""

import json
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import NoReturn

from components.core.errors import UserError, os_reason, printable

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
OTHER_WEIGHTS_NAMES = ("adapter_model.bin", "adapter_model.pt")

CONFIG_LIMIT = 1024 * 1024
# safetensors 0.8.0, safetensors/src/tensor.rs: MAX_HEADER_SIZE
HEADER_LIMIT = 100_000_000
LARGEST_DIMENSION = 2**64 - 1

# safetensors 0.8.0, safetensors/src/tensor.rs: Dtype and its width in bits
DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}

NAMES_SHOWN = 8
ENTRIES_LOOKED_AT = 2000


@dataclass(frozen=True)
class AdapterFiles:
    """Where an adapter's two files are: ``directory`` as it was named, the rest with every link resolved."""

    directory: Path
    real_directory: Path
    config: Path
    weights: Path


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter whose config and safetensors header are sound."""

    directory: Path
    """As the caller named it."""
    config: Path
    """The real ``adapter_config.json``, links resolved."""
    weights: Path
    """The real ``adapter_model.safetensors``, links resolved."""
    rank: int
    """The largest rank anywhere: ``r``, ``rank_pattern``, and the rows of every LoRA A matrix."""
    modules: tuple[str, ...]
    """Sorted last parts of the names of the modules that have LoRA matrices, for example ``q_proj``."""
    parameters: int
    """Number of elements in all LoRA matrices."""
    base: str | None
    """``base_model_name_or_path`` as the trainer wrote it: foreign text, possibly somebody's private path."""


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header."""

    shape: tuple[int, ...]
    elements: int


def shown_path(path: Path) -> str:
    """A path in a message: terminal-safe, and long enough to be found again."""
    return printable(path, limit=1000)


def locate_adapter(directory: Path) -> AdapterFiles:
    """Finds the adapter's two files by looking at names and types only: no file is opened.

    A link is followed to a regular file in the adapter's own directory or, in a Hugging Face cache
    (``models--…/snapshots/<revision>``), in the same ``models--…`` directory.

    Raises:
        UserError: the directory or a file is missing or is something else, a link leads elsewhere, or a second
            weights file makes it unclear what is meant to be served.
    """
    if "\0" in str(directory):
        raise UserError(f"{shown_path(directory)}: a path cannot hold a NUL character.")
    try:
        real = Path(os.path.realpath(directory, strict=True))
        status = real.stat()
    except FileNotFoundError:
        raise UserError(f"{shown_path(directory)}: no such directory.") from None
    except OSError as error:
        raise UserError(f"{shown_path(directory)}: cannot be read ({os_reason(error)}).") from None
    if not stat.S_ISDIR(status.st_mode):
        raise UserError(f"{shown_path(directory)}: not a directory; name the directory that holds {CONFIG_NAME}.")
    config = _real_file(directory, real, CONFIG_NAME)
    if config is None:
        _refuse_without_config(directory, real)
    weights = _real_file(directory, real, WEIGHTS_NAME)
    if weights is None:
        _refuse_without_weights(directory, real)
    for name in OTHER_WEIGHTS_NAMES:
        if os.path.lexists(real / name):
            raise UserError(
                f"{shown_path(directory)}: holds {WEIGHTS_NAME} and {name}; vLLM would load the first and never "
                f"look at the second. Delete the one that is out of date."
            )
    return AdapterFiles(directory=directory, real_directory=real, config=config, weights=weights)


def read_adapter(directory: Path) -> Adapter:
    """Reads the config and the header of the weights; never a tensor.

    Raises:
        UserError: whatever keeps this from being an adapter that vLLM can load, in one sentence.
    """
    return read_located(locate_adapter(directory))


def read_located(files: AdapterFiles) -> Adapter:
    """``read_adapter`` of files that were located before: exactly those, whatever the directory holds by now."""
    config_place = shown_path(files.directory / CONFIG_NAME)
    config = _read_config(files.config, config_place)
    weights_place = shown_path(files.directory / WEIGHTS_NAME)
    with open_regular(files.weights, weights_place) as stream:
        tensors = _read_header(stream, weights_place)
    matrices = {name: tensor for name, tensor in tensors.items() if _lora_module(name) is not None}
    if not matrices:
        raise UserError(
            f"{weights_place}: holds no LoRA tensors (no name ends in .lora_A.weight or .lora_B.weight); "
            f"save the adapter again with PEFT's save_pretrained."
        )
    return Adapter(
        directory=files.directory,
        config=files.config,
        weights=files.weights,
        rank=max(_config_rank(config, config_place), _largest_row_count(matrices, weights_place)),
        modules=tuple(sorted(set(_module_names(matrices, weights_place)))),
        parameters=sum(tensor.elements for tensor in matrices.values()),
        base=_base_name(config, config_place),
    )


def open_regular(path: Path, place: str) -> FileIO:
    """Opens a real path for unbuffered reading and makes sure that it is a plain file.

    Never waits (a FIFO put there meanwhile) and never follows a link.

    Raises:
        UserError: it cannot be opened, or is not a plain file; ``place`` is what the message calls it.
    """
    flags = os.O_RDONLY
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    try:
        # What is no plain file is not even opened: opening a device may do something.
        if not stat.S_ISREG(path.lstat().st_mode):
            raise UserError(f"{place}: not a plain file.")
        descriptor = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UserError(f"{place}: not a plain file.")
        return FileIO(descriptor, "rb")
    except OSError as error:
        raise UserError(f"{place}: cannot be read ({os_reason(error)}).") from None


# --- finding the files ------------------------------------------------------------------------------------


def _real_file(directory: Path, real: Path, name: str) -> Path | None:
    """The regular file behind ``name`` in the adapter's real directory; None if there is none."""
    path = real / name
    place = shown_path(directory / name)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{place}: cannot be read ({os_reason(error)}).") from None
    if stat.S_ISREG(mode):
        return path
    if not stat.S_ISLNK(mode):
        raise UserError(f"{place}: not a plain file.")
    try:
        target = Path(os.path.realpath(path, strict=True))
        mode = target.lstat().st_mode
    except FileNotFoundError:
        raise UserError(
            f"{place}: the link leads to nothing; download the adapter again or copy the file here."
        ) from None
    # A loop is an OSError on some Pythons and a RuntimeError on others.
    except (OSError, RuntimeError):
        raise UserError(f"{place}: the link cannot be followed; replace it by a copy of the file.") from None
    if not stat.S_ISREG(mode):
        raise UserError(f"{place}: the link does not lead to a plain file; replace it by a copy of the file.")
    if not target.is_relative_to(real) and not _same_hub_model(real, target):
        raise UserError(
            f"{place}: the link leads out of the adapter's directory, to {shown_path(target)}; "
            f"replace it by a copy of the file."
        )
    return target


def _same_hub_model(real: Path, target: Path) -> bool:
    """Whether both lie in one model of a Hugging Face cache: models--…/snapshots/… and models--…/blobs/…"""
    for parent in real.parents:
        if parent.name.startswith("models--"):
            return real.is_relative_to(parent / "snapshots") and target.is_relative_to(parent)
    return False


def _entry_names(real: Path) -> list[str]:
    try:
        with os.scandir(real) as entries:
            return sorted(entry.name for entry in islice(entries, ENTRIES_LOOKED_AT))
    except OSError:
        return []


def _listed(names: list[str]) -> str:
    text = ", ".join(printable(name, limit=80) for name in names[:NAMES_SHOWN])
    return text if len(names) <= NAMES_SHOWN else f"{text} and {len(names) - NAMES_SHOWN} more"


def _refuse_without_config(directory: Path, real: Path) -> NoReturn:
    children = [name for name in _entry_names(real) if os.path.lexists(real / name / CONFIG_NAME)]
    if children:
        raise UserError(
            f"{shown_path(directory)}: holds no {CONFIG_NAME}, but these folders in it do: {_listed(children)}; "
            f"name the one to serve."
        )
    raise UserError(
        f"{shown_path(directory)}: holds no {CONFIG_NAME}; name the directory that PEFT's save_pretrained wrote."
    )


def _refuse_without_weights(directory: Path, real: Path) -> NoReturn:
    names = _entry_names(real)
    pickled = [name for name in OTHER_WEIGHTS_NAMES if name in names]
    shards = [name for name in names if name.startswith("adapter_model-") or name.endswith(".index.json")]
    if pickled:
        advice = f"convert {pickled[0]} to safetensors (PEFT's save_pretrained with safe_serialization=True)"
    elif shards:
        advice = "vLLM reads no shards: save the adapter again as one file"
    else:
        advice = "vLLM reads weights from no other name"
    found = _listed([name for name in names if name != CONFIG_NAME]) or "nothing else"
    raise UserError(f"{shown_path(directory)}: holds no {WEIGHTS_NAME}; {advice}. Found: {found}.")


# --- adapter_config.json ----------------------------------------------------------------------------------


class _DuplicateKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(f'the key "{printable(key)}" stands in it twice')


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return result


def _object(value: object) -> dict[str, object] | None:
    """``value`` if it is a JSON object; its keys are strings because JSON has no others."""
    return value if isinstance(value, dict) else None


def _number(value: object) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _count(value: object) -> int | None:
    """``value`` if it is a whole number from 0 (``true`` is none)."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _read_config(path: Path, place: str) -> dict[str, object]:
    with open_regular(path, place) as stream:
        try:
            raw = _read_up_to(stream, CONFIG_LIMIT + 1)
        except OSError as error:
            raise UserError(f"{place}: cannot be read ({os_reason(error)}).") from None
    if len(raw) > CONFIG_LIMIT:
        raise UserError(f"{place}: larger than 1 MiB, which no adapter's config is.")
    if raw.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise UserError(
            f"{place}: starts with a byte order mark, which vLLM does not read; save it as UTF-8 without one."
        )
    try:
        document: object = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError:
        raise UserError(f"{place}: not UTF-8 text.") from None
    except _DuplicateKeyError as error:
        raise UserError(f"{place}: {error}; keep one.") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not JSON ({error.msg}, line {error.lineno}).") from None
    # Nested too deeply, or a number of thousands of digits.
    except (ValueError, RecursionError):
        raise UserError(f"{place}: not JSON that can be read.") from None
    config = _object(document)
    if config is None:
        raise UserError(f"{place}: not a JSON object; PEFT's save_pretrained writes one.")
    _check_required_keys(config, place)
    return config


def _check_required_keys(config: Mapping[str, object], place: str) -> None:
    missing = [key for key in ("r", "lora_alpha", "target_modules") if key not in config]
    if missing:
        kind = config.get("peft_type")
        hint = f" (peft_type is {printable(kind, limit=40)})" if isinstance(kind, str) and kind != "LORA" else ""
        raise UserError(f"{place}: {' and '.join(missing)} missing; this is not a LoRA adapter's config{hint}.")
    if not _count(config["r"]):
        raise UserError(f"{place}: r must be a whole number of at least 1, not {_json_text(config['r'])}.")
    alpha = _number(config["lora_alpha"])
    if alpha is None or not math.isfinite(alpha):
        raise UserError(f"{place}: lora_alpha must be a number, not {_json_text(config['lora_alpha'])}.")
    targets = config["target_modules"]
    named = isinstance(targets, list) and all(isinstance(name, str) for name in targets)
    # PEFT writes null where the model's default targets were meant; vLLM goes by the tensors' names.
    if not (targets is None or isinstance(targets, str) or named):
        raise UserError(f"{place}: target_modules must be a list of names or one string, not {_json_text(targets)}.")


def _config_rank(config: Mapping[str, object], place: str) -> int:
    ranks = [_count(config["r"]) or 0]
    pattern = config.get("rank_pattern")
    if pattern is not None:
        entries = _object(pattern)
        if entries is None:
            raise UserError(f"{place}: rank_pattern must map module names to ranks, not be {_json_text(pattern)}.")
        for name, value in entries.items():
            rank = _count(value)
            if not rank:
                raise UserError(
                    f"{place}: the rank of {printable(name)} in rank_pattern must be a whole number of at least 1, "
                    f"not {_json_text(value)}."
                )
            ranks.append(rank)
    return max(ranks)


def _base_name(config: Mapping[str, object], place: str) -> str | None:
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        return None
    if not _is_unicode(base):
        raise UserError(f"{place}: base_model_name_or_path is not valid Unicode.")
    return base


def _json_text(value: object) -> str:
    return printable(json.dumps(value, ensure_ascii=False), limit=60)


def _is_unicode(text: str) -> bool:
    """Whether the text holds no lone surrogate, which JSON can write and UTF-8 cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


# --- the safetensors header -------------------------------------------------------------------------------


def _read_up_to(stream: FileIO, count: int) -> bytes:
    pieces: list[bytes] = []
    while count > 0 and (piece := stream.read(min(count, CONFIG_LIMIT))):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def _read_header(stream: FileIO, place: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, checked as safetensors 0.8.0 checks them (src/tensor.rs).

    Layout: 8 bytes little-endian header length, that many bytes of JSON, then the data, which the tensors cover
    without holes.
    """
    try:
        size = os.fstat(stream.fileno()).st_size
        prefix = _read_up_to(stream, 8)
        if len(prefix) < 8:
            _refuse_header(place, f"it is {len(prefix)} bytes long")
        if prefix == b"version ":
            raise UserError(f"{place}: a Git LFS pointer, not the weights themselves; run git lfs pull.")
        (length,) = struct.unpack("<Q", prefix)
        if length > HEADER_LIMIT:
            _refuse_header(place, f"its header claims {length} bytes, over the limit of {HEADER_LIMIT}")
        if length > size - 8:
            _refuse_header(place, f"its header claims {length} bytes, and the file has {size}")
        raw = _read_up_to(stream, length)
    except OSError as error:
        raise UserError(f"{place}: cannot be read ({os_reason(error)}).") from None
    try:
        document: object = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except _DuplicateKeyError as error:
        _refuse_header(place, str(error))
    except (ValueError, RecursionError):
        _refuse_header(place, "its header is not JSON")
    header = _object(document)
    if header is None:
        _refuse_header(place, "its header is not a JSON object")
    _check_metadata(header.pop("__metadata__", None), place)
    return _checked_tensors(header, size - 8 - length, place)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _refuse_header(place: str, what: str) -> NoReturn:
    raise UserError(f"{place}: damaged, or not a safetensors file: {what}. Copy or save it again.")


def _check_metadata(metadata: object, place: str) -> None:
    if metadata is None:
        return
    entries = _object(metadata)
    if entries is None or not all(isinstance(value, str) for value in entries.values()):
        _refuse_header(place, "its __metadata__ is not a map of texts")


def _checked_tensors(header: Mapping[str, object], data_size: int, place: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        shown = printable(name)
        fields = _object(entry)
        if fields is None:
            _refuse_header(place, f"the entry of {shown} is not an object")
        bits = DTYPE_BITS.get(str(fields.get("dtype")))
        if bits is None:
            _refuse_header(place, f"the dtype of {shown} is unknown")
        shape = _counts(fields.get("shape"))
        offsets = _counts(fields.get("data_offsets"))
        if shape is None or offsets is None or len(offsets) != 2:
            _refuse_header(place, f"the shape or place of {shown} is malformed")
        elements = 1
        for dimension in shape:
            elements *= dimension
            if elements > LARGEST_DIMENSION:
                _refuse_header(place, f"{shown} is larger than any file")
        begin, end = offsets
        if elements * bits != (end - begin) * 8:
            _refuse_header(place, f"the size of {shown} does not fit its shape")
        tensors[name] = Tensor(shape=shape, elements=elements)
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            _refuse_header(place, f"the data of {printable(name)} overlap, or leave a hole")
        position = end
    if position != data_size:
        _refuse_header(place, f"its tensors take {position} bytes, and {data_size} are there")
    return tensors


def _counts(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    counts = [count for item in value if (count := _count(item)) is not None and count <= LARGEST_DIMENSION]
    return tuple(counts) if len(counts) == len(value) else None


# --- LoRA names -------------------------------------------------------------------------------------------


def _lora_module(name: str) -> str | None:
    """The module a LoRA tensor belongs to; None for a tensor that is no LoRA matrix."""
    parts = name.split(".")
    if parts[-1] == "weight" and len(parts) >= 2 and parts[-2] in ("lora_A", "lora_B"):
        return ".".join(parts[:-2])
    if parts[-1] in ("lora_embedding_A", "lora_embedding_B"):
        return ".".join(parts[:-1])
    return None


def _is_matrix_a(name: str) -> bool:
    return name.endswith((".lora_A.weight", ".lora_embedding_A"))


def _module_names(matrices: Mapping[str, Tensor], place: str) -> Iterator[str]:
    for name in matrices:
        # PEFT's name for the first of two fused expert matrices: lora_model.py, check_unexpected_modules.
        last = (_lora_module(name) or "").removesuffix(".base_layer").rsplit(".", 1)[-1]
        if not last or not name.isprintable():
            _refuse_header(place, f"{printable(name)} names no module")
        yield last


def _largest_row_count(matrices: Mapping[str, Tensor], place: str) -> int:
    largest = 0
    for name, tensor in matrices.items():
        if len(tensor.shape) < 2:
            raise UserError(
                f"{place}: {printable(name)} has {len(tensor.shape)} dimensions, and a LoRA matrix has at least 2; "
                f"save the adapter again with PEFT's save_pretrained."
            )
        module = (_lora_module(name) or "").removesuffix(".base_layer")
        # Fused experts stack every expert's rows in one matrix: vllm/lora/model_manager.py reshapes them to
        # (experts, rank, width), so that the rows say nothing about the rank.
        if _is_matrix_a(name) and not module.endswith(".experts"):
            largest = max(largest, tensor.shape[0])
    return largest
