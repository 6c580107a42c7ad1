"""The names and shapes of a safetensors file, read without a tensor and checked as safetensors itself checks them.

Layout and rules: safetensors 0.8.0, safetensors/src/tensor.rs. 8 bytes little-endian length, that many bytes of JSON,
then the data, which the tensors cover without holes.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NoReturn

from components.core.adapter_files import open_regular, read_up_to, unreadable
from components.core.errors import printable
from components.core.findings import fault
from components.core.json_text import (
    LFS_POINTER,
    DuplicateKeyError,
    NotReadableError,
    as_object,
    no_constants,
    no_negative_zero,
    parse_json,
)

# safetensors takes 100,000,000 bytes. An adapter of every expert of the largest mixtures known (61 layers of 384
# experts) has 140,000 tensors in 25 MB; more than this is not read, so that no file takes all memory.
HEADER_LIMIT = 32 * 1024 * 1024
TENSORS_LIMIT = 200_000
# A trainer's notes may hold JSON of their own, whose colons count as well.
METADATA_LIMIT = 100_000
LARGEST_DIMENSION = 2**64 - 1

_HALF_A_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")

# safetensors/src/tensor.rs: Dtype and its width in bits
DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a safetensors header."""

    shape: tuple[int, ...]
    elements: int
    dtype: str = "F32"
    """A key of `DTYPE_BITS`."""


def read_tensors(path: Path, place: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, in the order of the header.

    Raises:
        UserError: it cannot be read, or is not what safetensors would load; `place` is what the message calls it.
    """
    with open_regular(path, place) as stream:
        try:
            raw, data_size = _header(stream, place)
        except OSError as error:
            raise unreadable(place, error) from None
    if raw.count(b"{") > TENSORS_LIMIT or raw.count(b"[") > 2 * TENSORS_LIMIT:
        _refuse(place, f"its header has more than {TENSORS_LIMIT} entries")
    # The entry of a tensor has its name and three keys; any other key is metadata's.
    if raw.count(b":") > 4 * raw.count(b"{") + METADATA_LIMIT:
        _refuse(place, f"its __metadata__ has more than {METADATA_LIMIT} entries")
    try:
        document = parse_json(raw, parse_constant=no_constants, parse_int=no_negative_zero)
    except DuplicateKeyError as error:
        _refuse(place, str(error))
    except NotReadableError:
        _refuse(place, "its header is not JSON")
    header = as_object(document)
    if header is None:
        _refuse(place, "its header is not a JSON object")
    if _HALF_A_CHARACTER.search(raw) and not _is_text(header):
        _refuse(place, "its header holds half of a character")
    _check_metadata(header.pop("__metadata__", None), place)
    return _checked_tensors(header, data_size, place)


def _header(stream: FileIO, place: str) -> tuple[bytes, int]:
    """The header's bytes, and how many bytes of data follow."""
    size = os.fstat(stream.fileno()).st_size
    prefix = read_up_to(stream, 8)
    if len(prefix) < 8:
        _refuse(place, f"it is {len(prefix)} bytes long")
    if LFS_POINTER.startswith(prefix):
        raise fault(place, "lfs-pointer", "a Git LFS pointer, not the weights themselves; run git lfs pull.")
    (length,) = struct.unpack("<Q", prefix)
    if length > size - 8:
        _refuse(place, f"its header claims {length} bytes, and the file has {size}")
    if length > HEADER_LIMIT:
        _refuse(place, f"its header has {length} bytes, over the limit of {HEADER_LIMIT}")
    return read_up_to(stream, length), size - 8 - length


def _refuse(place: str, what: str) -> NoReturn:
    raise fault(place, "damaged", f"damaged, or not a safetensors file: {what}. Copy or save it again.")


def _is_text(header: Mapping[str, object]) -> bool:
    """Whether no name and no metadata holds a lone surrogate, which JSON's escapes can write and UTF-8 cannot."""
    metadata = as_object(header.get("__metadata__")) or {}
    try:
        "".join(map(str, (*header, *metadata, *metadata.values()))).encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_metadata(metadata: object, place: str) -> None:
    if metadata is None:
        return
    entries = as_object(metadata)
    if entries is None or not all(isinstance(value, str) for value in entries.values()):
        _refuse(place, "its __metadata__ is not a map of texts")


def _checked_tensors(header: Mapping[str, object], data_size: int, place: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        fields = as_object(entry)
        if fields is None:
            _refuse(place, f"the entry of {printable(name)} is not an object")
        if len(fields) != 3:
            _refuse(place, f"the entry of {printable(name)} has other keys than dtype, shape and data_offsets")
        dtype = fields.get("dtype")
        bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
        if bits is None or not isinstance(dtype, str):
            _refuse(place, f"the dtype of {printable(name)} is unknown")
        shape = _counts(fields.get("shape"))
        offsets = _counts(fields.get("data_offsets"))
        if shape is None or offsets is None or len(offsets) != 2:
            _refuse(place, f"the shape or place of {printable(name)} is malformed")
        elements = 1
        for dimension in shape:
            elements *= dimension
            if elements > LARGEST_DIMENSION:
                _refuse(place, f"{printable(name)} is larger than any file")
        begin, end = offsets
        if elements * bits != (end - begin) * 8:
            _refuse(place, f"the size of {printable(name)} does not fit its shape")
        tensors[name] = Tensor(shape, elements, dtype)
        spans.append((begin, end, name))
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            _refuse(place, f"the data of {printable(name)} overlap, or leave a hole")
        position = end
    if position != data_size:
        _refuse(place, f"its tensors take {position} bytes, and {data_size} are there")
    return tensors


def _counts(value: object) -> tuple[int, ...] | None:
    """A list of whole numbers from 0 (`true` is none)."""
    if not isinstance(value, list):
        return None
    for item in value:
        if type(item) is not int or not 0 <= item <= LARGEST_DIMENSION:
            return None
    return tuple(value)
