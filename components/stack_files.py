"""The files of a stack on this disk: `Pulumi.<stack>.yaml` as Pulumi reads it, and `<stack>.lock.yaml` beside it.

The only owner of YAML.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from components.core.errors import UserError, os_reason, printable
from components.core.lock import LockEntry, lock_entries, lock_name, lock_text

STACK_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")  # pulumi 3.274, sdk/go/common/tokens/names.go
FILE_LIMIT = 16 * 1024 * 1024
DEPTH = 8
# pulumi 3.274, sdk/go/common/workspace/project.go, ProjectStack; it passes over what is none of them.
STACK_FILE_KEYS = ("config", "environment", "encryptionsalt", "encryptedkey", "secretsprovider")

_CONFLICT = re.compile(r"^(<{7}|>{7})( |$)", re.MULTILINE)
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class LockError(UserError):
    """Every fault of a lock, each with the file and its path in it."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(faults))


def stack_directory(start: Path | None = None) -> Path:
    """Where the stack files lie: `stackConfigDir` beside the Pulumi.yaml at or above the working directory.

    Pulumi starts the program and its dynamic providers in the project's directory.
    """
    here = (start or Path.cwd()).absolute()
    for directory in (here, *here.parents):
        project = directory / "Pulumi.yaml"
        if project.is_file():
            try:
                declared = yaml.safe_load(project.read_text(encoding="utf-8")) or {}
                return directory / str(declared.get("stackConfigDir") or "")
            except OSError as error:
                raise UserError(f"{printable(project)}: cannot be read ({os_reason(error)})") from None
            except (yaml.YAMLError, UnicodeDecodeError, AttributeError):
                raise UserError(f"{printable(project)}: not the YAML of a Pulumi project; restore it") from None
    raise UserError(f"no Pulumi.yaml in {here} or above it: run this in the project's directory")


def path_here(directory: Path, path: str) -> Path:
    """A path that somebody wrote as one of this machine; one that is not absolute begins in `directory`."""
    try:
        return directory / Path(path).expanduser()
    except RuntimeError:  # the home of a user there is none of
        return directory / path


def stack_config(directory: Path, stack: str, project: str) -> dict[str, Any]:
    """The configuration of a stack file without pulumi; what is encrypted stays so (`{"secure": "…"}`).

    Raises UserError if there is none of that name, or if it cannot be read.
    """
    if not STACK_NAME.fullmatch(stack):
        raise UserError(f"{printable(stack)!r} is no stack's name: give the last part of it alone, such as `acme`")
    path = directory / f"Pulumi.{stack}.yaml"
    place = _place(path)
    text = _text(path, place)
    if text is None:
        others = sorted(other.name[len("Pulumi.") : -len(".yaml")] for other in directory.glob("Pulumi.*.yaml"))
        raise UserError(f"{place}: no such file; the stacks here are: {', '.join(map(printable, others)) or 'none'}")
    document = _document(text, place)
    try:
        return _configuration(document, project)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def holds_alone(directory: Path, name: str, key: str) -> bool:
    """Whether this file can be read and is a mapping of this key alone."""
    path = directory / name
    try:
        document = _document(_text(path, "") or "", "")
    except UserError:
        return False
    return isinstance(document, dict) and set(document) == {key}


def _document(text: str, place: str) -> object:
    try:
        document: object = yaml.load(text, Loader=_AsPulumi)
    except yaml.YAMLError as error:
        raise UserError(f"{place}: {_sentence(error)}") from None
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError):
        raise UserError(f"{place}: holds a value that cannot be read as YAML") from None
    return document


def _configuration(document: object, project: str) -> dict[str, Any]:
    if document is not None and not isinstance(document, dict):
        raise UserError("must be a mapping with the key config")
    for key in document or {}:
        if key not in STACK_FILE_KEYS:
            raise UserError(f"{printable(key)}: unknown key; known here: {', '.join(STACK_FILE_KEYS)}")
    config = (document or {}).get("config")
    if config is not None and not isinstance(config, dict):
        raise UserError("config: must be a mapping")
    result: dict[str, Any] = {}
    for key, value in (config or {}).items():
        name = str(key).removeprefix(f"{project}:")
        if name in result:
            raise UserError(f"config: {printable(name)} stands there twice, with and without {project}:")
        result[name] = value
    if "environment" in (document or {}) and "models" not in result:
        raise UserError(
            f"environment: may bring {project}:models, which pulumi alone can read; write them into this file "
            f"(`{project}:models: []` if there are none)"
        )
    return result


def lock_place(directory: Path, stack: str) -> str:
    """What messages call a stack's lock: `stacks/acme.lock.yaml`."""
    return _place(directory / lock_name(stack))


def read_lock(directory: Path, stack: str) -> dict[str, LockEntry] | None:
    """The entries of a stack's lock by model id; None where there is no lock.

    Raises LockError with every fault.
    """
    path = directory / lock_name(stack)
    place = _place(path)
    again = f"write it anew where the adapters are: `lora lock -s {stack}`"
    try:
        text = _text(path, place)
    except UserError as error:
        raise LockError([str(error)]) from None
    if text is None:
        return None
    conflict = _CONFLICT.search(text)
    if conflict:
        line = text.count("\n", 0, conflict.start()) + 1
        raise LockError([f"{place}: holds the markers of a merge conflict (line {line}); {again}"])
    try:
        node = yaml.compose(text, Loader=_LOADER)
        entries, faults = lock_entries(_plain(node, DEPTH, set()))
    except yaml.YAMLError as error:
        raise LockError([f"{place}: {_sentence(error)}; {again}"]) from None
    except RecursionError:
        raise LockError([f"{place}: is nested too deeply for a lock; {again}"]) from None
    if faults:
        raise LockError([f"{place}: {fault}" for fault in faults])
    return entries


def write_lock(directory: Path, stack: str, entries: Mapping[str, LockEntry]) -> bool:
    """Make the lock say exactly this. -> whether it was written; what is the same already is left alone.

    The file is complete or the old one, whenever the power goes. Raises UserError if it cannot be written.
    """
    path = directory / lock_name(stack)
    data = lock_text(stack, entries).encode("utf-8")
    try:
        if path.is_file() and path.read_bytes() == data:
            return False
        target = Path(os.path.realpath(path))  # where it is a link
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{_place(path)}: cannot be written ({os_reason(error)})") from None
    return True


def _place(path: Path) -> str:
    return printable(f"{path.parent.name}/{path.name}")


def _text(path: Path, place: str) -> str | None:
    """The text of a file of somebody else's; None if there is none: a link to nowhere is one that cannot be read."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{place}: not a plain file")
        if status.st_size > FILE_LIMIT:
            raise UserError(f"{place}: larger than {FILE_LIMIT // 1024 // 1024} MiB")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if path.is_symlink():
            raise UserError(f"{place}: a link to a file that is not there") from None
        return None
    except OSError as error:
        raise UserError(f"{place}: cannot be read ({os_reason(error)})") from None
    except UnicodeDecodeError:
        raise UserError(f"{place}: not UTF-8 text") from None


def _sentence(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f" (line {mark.line + 1})" if mark else ""
    return f"not YAML: {printable(getattr(error, 'problem', None) or error)}{where}"


def _plain(node: yaml.Node | None, depth: int, seen: set[int]) -> object:
    """Mappings, lists and scalars, each scalar as the text that stands there: no type is guessed, no tag obeyed.

    An alias is refused: a few of them can stand for billions of values.
    """
    if depth == 0:
        raise RecursionError
    if node is not None:
        if id(node) in seen:
            raise yaml.constructor.ConstructorError(None, None, "a lock has no aliases", node.start_mark)
        seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        result: dict[str, object] = {}
        for key, value in node.value:
            _refuse_twice(key, key.value in result if isinstance(key, yaml.ScalarNode) else True)
            result[key.value] = _plain(value, depth - 1, seen)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, depth - 1, seen) for item in node.value]
    return node.value if node else None


def _refuse_twice(key: yaml.Node, seen: bool) -> None:
    if seen:
        name = printable(key.value) if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
        problem = f"{name} stands there twice" if isinstance(key, yaml.ScalarNode) else f"{name} cannot be a key"
        raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)


class _AsPulumi(yaml.SafeLoader):
    """YAML as Pulumi reads it (gopkg.in/yaml.v3): `no` is text, `1e3` is a number, and no key stands twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                _refuse_twice(key, key.value in seen)
                seen.add(key.value)
        return node


_AsPulumi.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith((":bool", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_AsPulumi.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_AsPulumi.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)
