"""An adapter's two files: where they are, and how they are opened. Nothing else in the directory is read.

Which names count is vLLM's rule, not ours: vllm/lora/peft_helper.py (0.32.0) opens `adapter_config.json`,
vllm/lora/lora_model.py `adapter_model.safetensors`, and only where that is missing `adapter_model.bin`, then `.pt`; top
level only, no shards.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from itertools import islice
from pathlib import Path

from components.core.errors import os_reason, printable
from components.core.findings import FaultError, fault
from components.core.listing import listed_names

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
OTHER_WEIGHTS_NAMES = ("adapter_model.bin", "adapter_model.pt")

NAMES_SHOWN = 8
ENTRIES_LOOKED_AT = 2000
PIECE = 1024 * 1024  # bytes


@dataclass(frozen=True)
class AdapterFiles:
    """Where an adapter's two files are: `directory` as it was named, the rest with every link resolved."""

    directory: Path
    real_directory: Path
    config: Path
    weights: Path


def shown_path(path: Path) -> str:
    """A path in a message: terminal-safe, and long enough to be found again."""
    return printable(path, limit=1000)


# Path's own raise, before Python 3.14, for what lies in a folder that is closed to us, and for a name that is too long.
def is_directory(path: Path) -> bool:
    """Whether it is one, as far as can be seen: why it cannot be, whoever reads it is told."""
    return os.path.isdir(path)  # noqa: PTH112


def is_plain_file(path: Path) -> bool:
    """Whether it is one, or a link to one, as far as can be seen."""
    return os.path.isfile(path)  # noqa: PTH113


def is_absent(path: Path) -> bool:
    """Whether there is surely nothing: what cannot be looked at may be there."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def locate_adapter(directory: Path) -> AdapterFiles:
    """Finds the adapter's two files by looking at names and types only: no file is opened.

    A link is followed to a regular file in the adapter's own directory or, in a Hugging Face cache
    (`models--…/snapshots/<revision>`), in the same `models--…` directory.

    Raises:
        UserError: the directory or a file is missing or is something else, or a link leads elsewhere.
    """
    real = real_directory(directory)
    config, weights = real_config(directory, real), real_weights(directory, real)
    return AdapterFiles(directory=directory, real_directory=real, config=config, weights=weights)


def real_directory(directory: Path) -> Path:
    """The directory itself, links resolved.

    Raises:
        FaultError: there is none, or it is something else.
    """
    place = shown_path(directory)
    if "\0" in str(directory):
        raise fault(place, "directory", "a path cannot hold a NUL character.")
    try:
        real = Path(os.path.realpath(directory, strict=True))
        status = real.stat()
    except FileNotFoundError:
        raise fault(place, "directory", "no such directory.") from None
    except OSError as error:
        raise fault(place, "directory", f"cannot be read ({os_reason(error)}).") from None
    if not stat.S_ISDIR(status.st_mode):
        raise fault(place, "directory", f"not a directory; name the directory that holds {CONFIG_NAME}.")
    return real


def real_config(directory: Path, real: Path) -> Path:
    """The real `adapter_config.json` of a directory.

    Raises:
        FaultError: it is missing, or no plain file, or a link that leads elsewhere.
    """
    path = _real_file(directory, real, CONFIG_NAME)
    if path is not None:
        return path
    children = [name for name in _entry_names(real) if os.path.lexists(real / name / CONFIG_NAME)]
    if children:
        message = f"holds no {CONFIG_NAME}, but these folders in it do: {_listed(children)}; name the one to serve."
    else:
        message = f"holds no {CONFIG_NAME}; name the directory that PEFT's save_pretrained wrote."
    raise fault(shown_path(directory), "no-config", message)


def real_weights(directory: Path, real: Path) -> Path:
    """The real `adapter_model.safetensors` of a directory.

    Raises:
        FaultError: it is missing, or no plain file, or a link that leads elsewhere.
    """
    path = _real_file(directory, real, WEIGHTS_NAME)
    if path is not None:
        return path
    names = _entry_names(real)
    pickled = [name for name in OTHER_WEIGHTS_NAMES if name in names]
    shards = [name for name in names if name.startswith("adapter_model-") or name.endswith(".index.json")]
    if pickled:
        advice = f"convert {pickled[0]} to safetensors (PEFT's save_pretrained with safe_serialization=True)"
    elif shards:
        advice = "vLLM reads no shards: save the adapter again as one file"
    else:
        advice = "adapters are served from no other name"
    found = _listed([name for name in names if name != CONFIG_NAME]) or "nothing else"
    raise fault(shown_path(directory), "no-weights", f"holds no {WEIGHTS_NAME}; {advice}. Found: {found}.")


def entries_named(real: Path, names: Sequence[str]) -> list[str]:
    """Those of the names that a directory has, whatever they are; opens nothing."""
    return [name for name in names if os.path.lexists(real / name)]


def open_regular(path: Path, place: str) -> FileIO:
    """Opens a real path for unbuffered reading and makes sure that it is a plain file.

    Never waits (a FIFO put there meanwhile) and never follows a link.

    Raises:
        UserError: it cannot be opened, or is not a plain file; `place` is what the message calls it.
    """
    flags = os.O_RDONLY
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    try:
        # What is no plain file is not even opened: opening a device may do something.
        if not stat.S_ISREG(path.lstat().st_mode):
            raise fault(place, "not-a-file", "not a plain file.")
        descriptor = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise fault(place, "not-a-file", "not a plain file.")
        return FileIO(descriptor, "rb")
    except OSError as error:
        raise unreadable(place, error) from None


def read_up_to(stream: FileIO, count: int) -> bytes:
    """The next `count` bytes, or all there are. Raises OSError."""
    pieces: list[bytes] = []
    while count > 0 and (piece := stream.read(min(count, PIECE))):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def read_start(path: Path, place: str, count: int) -> bytes:
    """The first `count` bytes of a plain file, or all there are.

    Raises:
        UserError: as `open_regular`, or it cannot be read.
    """
    with open_regular(path, place) as stream:
        try:
            return read_up_to(stream, count)
        except OSError as error:
            raise unreadable(place, error) from None


def unreadable(place: str, error: OSError) -> FaultError:
    """What to raise where the system does not let a file be read."""
    return fault(place, "unreadable", f"cannot be read ({os_reason(error)}).")


def _real_file(directory: Path, real: Path, name: str) -> Path | None:
    """The regular file behind `name` in the adapter's real directory; None if there is none."""
    path = real / name
    place = shown_path(directory / name)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(place, error) from None
    if stat.S_ISREG(mode):
        return path
    if not stat.S_ISLNK(mode):
        raise fault(place, "not-a-file", "not a plain file.")
    try:
        target = Path(os.path.realpath(path, strict=True))
        mode = target.lstat().st_mode
    except FileNotFoundError:
        raise fault(
            place, "link", "the link leads to nothing; download the adapter again or copy the file here."
        ) from None
    # A loop is an OSError on some Pythons and a RuntimeError on others.
    except (OSError, RuntimeError):
        raise fault(place, "link", "the link cannot be followed; replace it by a copy of the file.") from None
    if not stat.S_ISREG(mode):
        raise fault(place, "link", "the link does not lead to a plain file; replace it by a copy of the file.")
    if not target.is_relative_to(real) and not _same_hub_model(real, target):
        raise fault(place, "link", "the link leads out of the adapter's directory; replace it by a copy of the file.")
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
    return listed_names(names, NAMES_SHOWN, limit=80)
