"""What the locks are made from: the dependency tables of pyproject.toml, as one digest.

Reformatting the file, or changing a tool's settings in it, leaves the digest alone.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from pathlib import Path
from typing import cast

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def read_project(path: Path = PROJECT) -> dict[str, object]:
    """The parsed pyproject.toml."""
    # The standard library has it from 3.11; before that the locked test tools bring the same module.
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return cast("dict[str, object]", toml.loads(path.read_text(encoding="utf-8")))


def inputs_digest(document: dict[str, object]) -> str:
    """64 hex digits over the Python range, the dependencies and the dependency groups."""
    project = cast("dict[str, object]", document["project"])
    tables = {
        "requires-python": project["requires-python"],
        "dependencies": project["dependencies"],
        "optional-dependencies": project.get("optional-dependencies", {}),
        "dependency-groups": document.get("dependency-groups", {}),
    }
    return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()


if __name__ == "__main__":
    sys.stdout.write(inputs_digest(read_project()) + "\n")
