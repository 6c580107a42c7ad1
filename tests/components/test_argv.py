"""Names, paths and values of a stack file, on their way to a pod: the words that arrive are the words that were given,
through a real shell, the command line's parser on the pod, and systemd's reading of the unit."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from components import remote
from components.core import naming
from components.core.errors import UserError
from components.on_pod.boot import BOOT, piped_line
from components.on_pod.podctl import command_line, names
from components.settings import SettingsError
from tests.components.graph import register
from tests.components.test_settings import ENGINE, HOST, PRIVATE_KEY, Config
from tests.unit import unit_text_model as systemd

# Prints the words it was called with. What comes on standard input is read, as podctl reads it.
ECHO = '#!/bin/sh\ncat >/dev/null\nfor word in "${0##*/}" "$@"; do printf "%s\\0" "$word"; done\n'
AWKWARD = st.one_of(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30),
    st.lists(
        st.sampled_from([*"%$\"'\\;#:@-+!|{}<>&*?()[]~`= ^\u202e\u2028é", "$(id)", "`id`", "--", "%n", "\\n"]),
        min_size=1,
        max_size=8,
    ).map("".join),
)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout that is a directory of programs too, which tell how they are called; podctl's path needs quotes."""
    monkeypatch.setattr(naming, "POD_ROOT", f"{tmp_path}/pod's root")
    monkeypatch.setattr(remote, "POD_ROOT", f"{tmp_path}/pod's root")
    there = Path(naming.podctl_path(remote.podctl_sha256()))
    there.parent.mkdir(parents=True)
    there.touch()
    (tmp_path / "Pulumi.yaml").write_text("name: lora-pods\nruntime: python\nstackConfigDir: stacks\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    for name in ("python3", "sudo"):
        (tmp_path / name).write_text(ECHO)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def arrives(line: str, shell: Path) -> list[str]:
    done = subprocess.run(
        ["sh", "-c", line], env={"PATH": f"{shell}:/usr/bin:/bin"}, input=b"{}", capture_output=True, check=True
    )
    assert done.stderr == b""
    return done.stdout.decode().split("\0")[:-1]


def commands(user: str, base: str, engine: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    pods = [{"base": base, "host": {**HOST, "user": user}, "engine": {**ENGINE, **engine}}]
    secrets = {"sshPrivateKey": PRIVATE_KEY, "apiKey": "key", "hfToken": "token"}
    registered, _ = register(Config(pods=pods, models=[{"id": "m", "base": base}], **secrets))
    return {
        item.name.removeprefix(base + "-"): item.inputs for item in registered if item.type == "command:remote:Command"
    }


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    base=AWKWARD,
    value=AWKWARD,
    path=AWKWARD.map(lambda text: re.sub(r"[\\\"'$]", "", text)),
    user=st.sampled_from(["root", "ops"]),
)
def test_what_a_stack_file_says_arrives_as_it_was(base: str, value: str, path: str, user: str, shell: Path) -> None:
    python = "/opt/" + path
    engine = {"python": python, "args": {"chatTemplate": value, "x": [value, 1]}, "env": {"A_1": value}}
    try:
        told = commands(user, base, engine)
    except (SettingsError, UserError):
        reject()  # told, before anything is touched
    before = ["sudo", "-n", "python3"] if user == "ops" else ["python3"]
    before.append(naming.podctl_path(remote.podctl_sha256()))
    for name, verb in (("secrets", "secrets"), ("place", "place"), ("activate", "activate")):
        assert arrives(told[name]["create"], shell) == [*before, verb]
    if user == "ops":
        assert arrives(told["prepare"]["create"], shell) == ["sudo", "-n", "sh", "-c", BOOT]
    undone = arrives(told["place"]["delete"], shell)
    assert undone[: len(before)] == before
    parsed = command_line.parse(undone[len(before) :])
    assert (parsed.verb, parsed.stack, parsed.base) == ("unplace", "acme", base)

    document = json.loads(told["activate"]["stdin"])
    assert json.loads(told["place"]["stdin"])["base"] == base
    key = naming.engine_key("acme", base)
    for name, verb in (("activate", "deactivate"), ("secrets", "unsecret")):
        assert arrives(told[name]["delete"], shell) == [*before, verb, "--engine", key]
    assert arrives(told["prepare"]["delete"], shell) == [*before, "remove"]
    assert arrives(remote.leave_line(user, key), shell) == [*before[:-1], "-", "leave", "--engine", key]
    assert names.name_of(document["engine"], "engine") == key
    unit = systemd.settings(document["unit"]["text"])
    (argv,) = [systemd.command(text) for name, text in unit if name == "ExecStart"]
    assert argv[0] == python
    assert argv[argv.index("--model") + 1] == base
    assert argv[argv.index("--chat-template") + 1] == value
    assert value in argv[argv.index("--x") + 1 :]
    assert dict(systemd.assignment(text) for name, text in unit if name == "Environment")["A_1"] == value


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(AWKWARD, max_size=3), user=st.sampled_from(["root", "ops"]))
def test_every_verb_gets_its_words(words: list[str], user: str, shell: Path) -> None:
    verbs = [*command_line.DOCUMENT_VERBS, *command_line.OPTION_VERBS]
    assert {"activate", "fetch", "intact", "missing", "receive-all", "rollback", "status", "verify"} <= set(verbs)
    lines = [make(user, verb, words) for verb in verbs for make in (remote.podctl_line, piped_line)]
    before = ["sudo", "-n", "python3"] if user == "ops" else ["python3"]
    there = naming.podctl_path(remote.podctl_sha256())
    assert arrives("\n".join(lines), shell) == [
        word for verb in verbs for program in (there, "-") for word in (*before, program, verb, *words)
    ]


def test_nothing_is_handed_to_a_shell_but_what_was_quoted() -> None:
    """Words become a line in `boot.shell`, and in two conditions of `remote`; all else are lists of words."""
    here = Path(remote.__file__).parents[1]
    quoting, shells = set(), set()
    starts = r"os\.(system|popen)\b|subprocess\.get\w*output\b|asyncio\.create_subprocess_shell\b"
    for path in sorted(path for room in ("components", "bootstrap", "bench") for path in (here / room).rglob("*.py")):
        name = str(path.relative_to(here))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("shlex."):
                quoting.add(name)
            if isinstance(node, ast.Attribute) and re.match(starts, ast.unparse(node)):
                shells.add(name)
            if isinstance(node, ast.keyword) and node.arg == "shell":
                shells.add(name)
    assert {name for name in quoting if name.startswith("components/")} == {
        "components/on_pod/boot.py",
        "components/remote.py",
    }
    assert shells == set()
