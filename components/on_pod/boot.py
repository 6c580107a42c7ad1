"""The lines that run podctl on a pod that does not have it yet, or has another one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path

BOOT = (
    "command -v python3 >/dev/null||{ echo 'python3 is not on this pod: install 3.8 or newer'>&2;exit 1;};"
    "python3 -c 'import json,sys;d=json.load(sys.stdin.buffer);v=sys.version_info[:2];"
    'v<(3,8)and sys.exit("python3 is %d.%d on this pod: install 3.8 or newer"%v);'
    'exec(compile(d["podctl"],"podctl","exec"),{"__name__":"__main__","DOCUMENT":d})\' prepare'
)
"""A shell line that runs the `prepare` verb of the podctl whose source is the key `podctl` of the JSON document on its
stdin, with that document. For another user than root: `sudo -n sh -c` and this line quoted as one word."""


@cache
def podctl_source() -> str:
    return (Path(__file__).parent / "podctl.py").read_text(encoding="utf-8")


def shell(user: str, words: Sequence[str]) -> str:
    """The one place where words become a line for a shell; other users than root go through sudo."""
    return " ".join(map(shlex.quote, words if user == "root" else ["sudo", "-n", *words]))


def piped_line(user: str, verb: str, arguments: Sequence[str] = ()) -> str:
    """The shell line that runs a verb of the podctl whose source is on its stdin: also of a pod that has another."""
    return shell(user, ["python3", "-", verb, *arguments])
