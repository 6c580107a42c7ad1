"""The JSON objects that say what should be, and the values in them."""

from __future__ import annotations

import json
from typing import Any, BinaryIO, Dict, Optional, Type, TypeVar

from .said import Refusal

T = TypeVar("T")

Document = Dict[str, Any]


def read_document(stream: BinaryIO) -> Document:
    try:
        document = json.loads(stream.read().decode("utf-8"))
    except ValueError:
        raise Refusal("the document on stdin is not JSON") from None
    if not isinstance(document, dict):
        raise Refusal("the document on stdin must be a JSON object")
    return document


KINDS: Dict[Any, str] = {
    str: "text",
    int: "a whole number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    object: "a value",
}


def optional(document: Document, path: str, kind: Type[T]) -> Optional[T]:
    """The value at a dotted `path`, None where it is absent or null; a value of another kind is refused."""
    value: object = document
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if value is None:
        return None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
        raise Refusal("the document's %s must be %s" % (path, KINDS[kind]))
    return value


def field(document: Document, path: str, kind: Type[T]) -> T:
    value = optional(document, path, kind)
    if value is None:
        raise Refusal("the document's %s is missing: it must be %s" % (path, KINDS[kind]))
    return value


def number(document: Document, path: str) -> float:
    value = field(document, path, object)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise Refusal("the document's %s must be a number" % path)
    return float(value)
