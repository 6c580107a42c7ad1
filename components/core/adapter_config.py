"""The text of `adapter_config.json`: read as vLLM reads it, and no further than makes sense."""

from __future__ import annotations

from pathlib import Path

from components.core.adapter_files import read_start
from components.core.findings import fault
from components.core.json_text import LFS_POINTER, DuplicateKeyError, NotReadableError, as_object, parse_json

CONFIG_LIMIT = 1024 * 1024  # bytes; a real one has about a thousand


def read_config(path: Path, place: str) -> dict[str, object]:
    """The config as it stands; what its keys say is not looked at.

    vllm/lora/peft_helper.py (0.32.0) opens it as text in the locale's encoding, UTF-8 on every pod, without a byte
    order mark, and takes `NaN`.

    Raises:
        UserError: it cannot be read or is no JSON object; `place` is what the message calls it.
    """
    raw = read_start(path, place, CONFIG_LIMIT + 1)
    if len(raw) > CONFIG_LIMIT:
        raise fault(place, "config-size", "larger than 1 MiB, which no adapter's config is.")
    if raw.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise fault(
            place,
            "byte-order-mark",
            "starts with a byte order mark, which vLLM does not read; save it as UTF-8 without one.",
        )
    if raw.startswith(LFS_POINTER):
        raise fault(place, "lfs-pointer", "a Git LFS pointer, not the config itself; run git lfs pull.")
    try:
        config = as_object(parse_json(raw))
    except DuplicateKeyError as error:
        raise fault(place, "duplicate-key", f"{error}; keep one.") from None
    except NotReadableError as error:
        raise fault(place, "not-json", f"{error}; PEFT's save_pretrained writes the file.") from None
    if config is None:
        raise fault(place, "not-json", "not a JSON object; PEFT's save_pretrained writes one.")
    return config
