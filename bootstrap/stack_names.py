"""The stacks of this project as a line for `$GITHUB_OUTPUT`: `names=["acme","globex"]`. Needs nothing but Python.

The demo's stack and the file that explains every key are none of a workflow's business.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

STACKS = Path(__file__).resolve().parent.parent / "stacks"
NOT_DEPLOYED = ("example", "sandbox")
FILE = re.compile(r"Pulumi\.([A-Za-z0-9_.-]{1,100})\.yaml")


def stack_names(directory: Path = STACKS) -> list[str]:
    """The names of all stacks with a file, sorted."""
    found = (FILE.fullmatch(path.name) for path in directory.glob("Pulumi.*.yaml"))
    return sorted(match[1] for match in found if match and match[1] not in NOT_DEPLOYED)


def main(only: str = "") -> int:
    """Print them all, or the one asked for; 1 if there is none of that name."""
    names = stack_names()
    if only and only not in names:
        sys.stderr.write(f"no stack {only!r} in stacks/; there are: {', '.join(names) or 'none'}\n")
        return 1
    sys.stdout.write(f"names={json.dumps([only] if only else names)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
