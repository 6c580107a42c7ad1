"""The words of our units, read by the real systemd of a pod instead of the model the unit tests use."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from components.core.engine_options import EngineOptions, PlannedAdapter
from components.core.engine_plan import plan_engine
from components.core.naming import blob_path, engine_key, secrets_path, unit_name
from components.core.unit_text import MAX_LINE_BYTES, MAX_WORD_BYTES, environment_word, exec_program, exec_word
from components.render import render_unit
from tests.support.machines import MOST_EXPOSED, Machine

pytestmark = pytest.mark.pod

UNITS = sorted((Path(__file__).parent.parent / "golden/units").glob("*/expected.service"))

# Its own argv and environment, as bytes: Python's decoding of them depends on the locale.
DUMP = """
import json
def words(name):
    return [word.hex() for word in open(f"/proc/self/{name}", "rb").read().split(b"\\0")[:-1]]
with open("/run/dump.json", "w") as out:
    json.dump({"argv": words("cmdline"), "environment": words("environ")}, out)
"""

NASTY = [
    *["", " ", "  two  spaces ", "\t", "\r", "\\", "\\\\", "a\\", "\\n", "\\x41", "\\101", "\\u0041", "\\s", "\\q"],
    *["%", "%%", "%n", "%H/%i", "100%", "%%n", "$", "$$", "$$$", "$HOME", "${HOME}", "$${HOME}", "a$HOME", "$ x", "${"],
    *["'", '"', "''", '""', "'\"", "it's", 'say "hi"', "'quoted'", '"quoted"', "'\"'\"'", "a'b\"c\\d", "$1", "@a"],
    *[";", ";;", "; rm", "a;b", "\\;", "#", "# comment", "-", "--", "-x", "--a=b c", ":a", "+a", "!a", "!!a", "|a"],
    *["{", "}", "{a,b}", "*", "?", "[x]", "~", "`id`", "$(id)", "&", "&&", ">", "<", "(", ")", "^", "=", "a=b", "=a"],
    *['{"name":"a","path":"/b"}', '{"a": "it\'s 50% of $x\\n"}', "é", "ünï 模型 🦙", "e\u0301", "\u00a0", "\u200b"],
    *["\u0085", "\u009f", "\u2028", "\u202e", "\ufeff", "\ud7ff", "\ue000", "\ufdcf", "\ufdf0", "\ufffd", "\U00010000"],
    *[chr(code) for code in (*range(1, 10), *range(11, 32), 127, 0x10FFFD)],
]  # fmt: skip


def invented(count: int, seed: int) -> list[str]:
    """Strings dense in what systemd treats specially, the same ones in every run."""
    choose = random.Random(seed)
    alphabet = [*"%$\"'\\;#:@-+!|{}= \t\r\x01\x1b\x7fnxuU0a7s", "é", "模", "\u2028", "${", "%%", "\\x", " ; "]
    return ["".join(choose.choices(alphabet, k=choose.randint(1, 20))) for _ in range(count)]


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine.start(tmp_path_factory.mktemp("keys"), "")
    try:
        machine.run("sh", "-c", "mkdir -p '/run/100% of ç;@'; ln -s /usr/bin/python3 '/run/100% of ç;@/python'")
        write(machine, "/run/dump.py", DUMP)
        yield machine
    finally:
        machine.remove()


def write(pod: Machine, path: str, text: str) -> None:
    pod.run("sh", "-c", 'cat > "$0"', path, stdin=text)


def started(
    pod: Machine, program: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, list[str]]:
    """Run a unit of our making; return the argv and environment that reached its program."""
    lines = ["[Service]", "Type=oneshot"]
    lines += [f"Environment={environment_word(name, value)}" for name, value in environment.items()]
    lines += ["ExecStart=" + " \\\n    ".join([exec_program(program), "/run/dump.py", *map(exec_word, arguments)])]
    write(pod, "/etc/systemd/system/dump.service", "\n".join(lines) + "\n")
    pod.run("rm", "-f", "/run/dump.json")
    pod.run("systemctl", "daemon-reload")
    pod.run("systemctl", "start", "dump.service")
    found: dict[str, list[str]] = json.loads(pod.read("/run/dump.json"))
    return {name: [bytes.fromhex(word).decode() for word in words] for name, words in found.items()}


def test_every_argument_arrives_as_it_was(pod: Machine) -> None:
    arguments = [*NASTY, *invented(2000, seed=1), "end"]
    found = started(pod, "/run/100% of ç;@/python", arguments, {})
    assert found["argv"] == ["/run/100% of ç;@/python", "/run/dump.py", *arguments]


def test_every_variable_arrives_as_it_was(pod: Machine) -> None:
    values = [*NASTY, *invented(1000, seed=2)]
    carried = [text for text in values if all(char == "\t" or (char >= " " and char != "\x7f") for char in text)]
    environment = {f"V{index}": text for index, text in enumerate(carried)}
    assert len(environment) > 300
    found = started(pod, "/usr/bin/python3", [], environment)
    assert {name: text for name, text in environment.items() if f"{name}={text}" not in found["environment"]} == {}


def test_the_longest_word_and_a_line_of_the_longest_kind(pod: Machine) -> None:
    longest = "é" * (MAX_WORD_BYTES // 2) + "a"
    # Seven of them and a rest: the logical line then has exactly the size that is still allowed.
    beginning = "ExecStart=" + " \\\n    ".join(["/usr/bin/python3", "/run/dump.py", *[exec_word(longest)] * 7])
    rest = "b" * (MAX_LINE_BYTES - len(beginning.encode()) - len(" \\\n    "))
    arguments = [longest] * 7 + [rest]
    assert started(pod, "/usr/bin/python3", arguments, {})["argv"][2:] == arguments


ENGINE = """
import json, os, resource, signal
dump = os.environ["HOME"] + "/dump.json"
if os.path.exists(dump):
    open(os.environ["HOME"] + "/again", "w").close()
    signal.pause()
def words(name):
    return [word.hex() for word in open(f"/proc/self/{name}", "rb").read().split(b"\\0")[:-1]]
def can_write(path):
    try:
        open(path + "/written", "w").close()
    except OSError as error:
        return error.strerror
    return "yes"
with open(dump, "w") as out:
    json.dump({
        "argv": words("cmdline"),
        "environment": words("environ"),
        "uid": os.getuid(),
        "directory": os.getcwd(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "writes": {path: can_write(path) for path in (".", "/tmp", "/dev/shm", "/etc", "/run", "/var/lib/lora-pods")},
    }, out)
"""


def test_a_rendered_unit_runs_as_planned(pod: Machine) -> None:
    base = "/home/ops/50% off $HOME \\ \"q\" 'q' ; ü"
    options = EngineOptions(
        port=8000,
        args={"chatTemplate": "{{ '%s' }} $$ \\n\t\r", "hfOverrides": {"a": 'it\'s "50%" of $x\n'}},
        env={"PYTHONPATH": "/opt/fake", "GREETING": "$HOME is 100% 'mine'"},
    )
    adapters = [PlannedAdapter("acme-v1", "sha256:" + "a" * 64, 8), PlannedAdapter("globex", "sha256:" + "b" * 64, 48)]
    plan = plan_engine(base, "/usr/bin/python3", adapters, ["plain"], options, blob_path)
    key = engine_key("test", base)
    module = "/opt/fake/vllm/entrypoints/openai/api_server.py"
    blobs = [blob_path(adapter.digest) for adapter in adapters]
    pod.run("mkdir", "-p", str(Path(module).parent), "/var/lib/lora-pods/secrets", *blobs)
    write(pod, module, ENGINE)
    write(pod, secrets_path(key), 'VLLM_API_KEY="from the file"\n')
    write(pod, f"/etc/systemd/system/{unit_name(key)}", render_unit(plan, key=key))
    pod.run("systemctl", "daemon-reload")
    pod.run("systemctl", "enable", "--now", unit_name(key))
    home = f"/var/lib/lora-pods-{key}"
    assert pod.exposure(unit_name(key)) <= MOST_EXPOSED
    # The first run ends with exit code 0, as vLLM does when its engine process died.
    pod.run("timeout", "30", "sh", "-c", 'until [ -e "$0" ]; do sleep 0.1; done', f"{home}/again")
    found = json.loads(pod.read(f"{home}/dump.json"))

    assert [bytes.fromhex(word).decode() for word in found["argv"]] == list(plan.argv)
    environment = {bytes.fromhex(word).decode() for word in found["environment"]}
    wanted = {**plan.environment, "HOME": home, "HF_HOME": f"{home}/huggingface", "VLLM_API_KEY": "from the file"}
    assert {f"{name}={value}" for name, value in wanted.items()} - environment == set()
    assert found["uid"] >= 61184  # systemd's range for dynamic users
    assert found["directory"] == f"/var/lib/private/lora-pods-{key}"
    read_only = "Read-only file system"
    assert found["writes"] == {
        ".": "yes",
        "/tmp": "yes",
        "/dev/shm": "yes",
        "/etc": read_only,
        "/run": "Permission denied",
        "/var/lib/lora-pods": read_only,
    }
    assert pod.run("stat", "--format=%a", f"/var/lib/private/lora-pods-{key}").strip() == "700"
    pod.run("systemctl", "stop", unit_name(key))
    assert pod.show(unit_name(key), "ActiveState", "NRestarts") == {"ActiveState": "inactive", "NRestarts": "1"}

    # A blob that is gone is named, and nothing is started over and over.
    pod.run("rmdir", blobs[1])
    assert pod.run("sh", "-c", 'systemctl start "$0" 2>&1', unit_name(key), check=False).startswith("Assertion failed")
    assert pod.show(unit_name(key), "ActiveState", "NRestarts") == {"ActiveState": "inactive", "NRestarts": "1"}
    told = pod.run("systemctl", "status", "--no-pager", "--full", unit_name(key), check=False)
    assert f"AssertPathExists={blobs[1]} was not met" in told


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.parent.name)
def test_systemd_has_no_complaint(pod: Machine, path: Path) -> None:
    # The programs are not on this pod; everything else of the unit is checked as it is.
    text = "".join(
        "ExecStart=/bin/true \\\n" if line.startswith("ExecStart=") else line
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
    )
    name = f"{path.parent.name}.service"
    write(pod, f"/run/{name}", text)
    assert pod.run("sh", "-c", 'systemd-analyze verify --man=no "$0" 2>&1', f"/run/{name}") == ""
    assert pod.exposure("--offline=true", f"/run/{name}") <= MOST_EXPOSED
