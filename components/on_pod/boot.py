"""podctl as one text, and the lines that run it on a pod that does not have it yet, or has another one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path

MODULES = (
    "said", "names", "documents", "waiting", "files", "tars", "store", "programs", "units", "secret_files", "part",
    "blobs", "receiving", "fetching", "proof", "probe", "proxy", "activation", "rollback", "drift", "status",
    "preparing", "leaving", "command_line",
)  # fmt: skip
"""podctl's modules, in the order of its text: each uses only those before it."""

FIRST = r'''
# Below, each in a call of `module`, are the modules of podctl, as they are in its repository.

import importlib.machinery
import sys
import types


def added(name, is_package):
    made = sys.modules[name] = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=is_package)
    return made


def module(name, line, source):
    """Runs the text of a module. It begins at a `line` of this one, which is what a traceback tells."""
    made = added("podctl." + name, False)
    exec(compile("\n" * (line - 1) + source, module.__code__.co_filename, "exec", dont_inherit=True), made.__dict__)
    setattr(PODCTL, name, made)


PODCTL = added("podctl", True)
'''

LAST = """
from podctl.command_line import main

sys.exit(main(sys.argv[1:], sys.stdin.buffer, globals().get("DOCUMENT")))
"""

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
    """One program that needs nothing beside it: a file, the standard input of Python, or what BOOT is given.

    Its modules are in it as they are, for whoever has to read it on a pod.
    """
    package = Path(__file__).parent / "podctl"
    text = "#!/usr/bin/env python3\n" + (package / "__init__.py").read_text(encoding="utf-8") + FIRST
    for name in MODULES:
        source = (package / f"{name}.py").read_text(encoding="utf-8")
        line = text.count("\n") + 3
        text += f"\n\nmodule(\"{name}\", {line}, r'''\n{source}''')\n"
    return text + LAST


def shell(user: str, words: Sequence[str]) -> str:
    """The one place where words become a line for a shell; other users than root go through sudo."""
    return " ".join(map(shlex.quote, words if user == "root" else ["sudo", "-n", *words]))


def piped_line(user: str, verb: str, arguments: Sequence[str] = ()) -> str:
    """The shell line that runs a verb of the podctl whose source is on its stdin: also of a pod that has another."""
    return shell(user, ["python3", "-", verb, *arguments])
