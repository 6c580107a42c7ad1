"""podctl as it comes to a pod: one text, which runs alone in each of the ways that it is called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.on_pod import boot, podctl
from components.on_pod.boot import BOOT, podctl_source
from tests.unit.podctl.pods import PodDirectory, bundle, digest_of

PACKAGE = Path(podctl.__file__).parent
REPOSITORY = PACKAGE.parents[2]


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, which is the current one, with a `python3` that knows nothing of this repository."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    directory = tmp_path / "alone"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def called(*argv: str, stdin: str) -> tuple[int, str, str]:
    ran = subprocess.run(["python3", "-I", *argv], input=stdin, capture_output=True, encoding="utf-8")
    return ran.returncode, ran.stdout, ran.stderr


def test_it_runs_as_a_file_and_from_standard_input(alone: Path, pod: PodDirectory) -> None:
    (alone / "podctl-0123456789ab.py").write_text(podctl_source(), encoding="utf-8")
    where = ["--root", str(pod.root), "--units-dir", str(pod.units)]
    digest = digest_of(bundle())
    document = json.dumps({"bundles": {digest: len(bundle())}})

    status, out, err = called("podctl-0123456789ab.py", *where, "missing", stdin=document)
    assert (status, json.loads(out)["missing"], err) == (0, {digest: 0}, "")
    assert called("-", *where, "gc", stdin=podctl_source()) == (0, '{"collected": []}\n', "")
    unplace = ["unplace", "--stack", "../x", "--base", "b"]
    refused = (1, "", "\"../x\" is not a usable stack: letters, digits, '.', '_' and '-' only\n")
    assert called("podctl-0123456789ab.py", *where, *unplace, stdin="") == refused
    assert called("-", *where, *unplace, stdin=podctl_source()) == refused


def test_it_runs_out_of_the_document_that_brings_it(alone: Path) -> None:
    document = {"podctl": podctl_source(), "needs": "nothing"}  # which is refused before anything is looked at
    ran = subprocess.run(["sh", "-c", BOOT], input=json.dumps(document), capture_output=True, encoding="utf-8")
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", "the document's needs must be an object\n")


def test_it_is_the_same_text_each_time(alone: Path) -> None:
    program = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
    program += "from components.on_pod.boot import podctl_source\nsys.stdout.buffer.write(podctl_source().encode())"
    texts = [
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert [text == podctl_source().encode() for text in texts] == [True, True]


def test_its_modules_are_in_it_as_they_are() -> None:
    text = podctl_source()
    assert text.startswith('#!/usr/bin/env python3\n"""podctl: the one program that touches a pod.')
    places = []
    for name in boot.MODULES:
        source = (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
        assert "'''" not in source, "it would end there"
        line = text[: text.index(source)].count("\n")
        places.append(text.index(f"\nmodule(\"{name}\", {line}, r'''\n{source}''')\n"))
    assert places == sorted(places)


WHERE_IT_IS = """
import sys
text = sys.stdin.read()
try:
    exec(compile(text, "bin/podctl", "exec"), {"__name__": "__main__"})
except SystemExit:
    pass
from podctl import activation, command_line, said
for function in (said.say, activation.go_back, command_line.main):
    code = function.__code__
    print(code.co_filename, text.splitlines()[code.co_firstlineno - 1])
"""


def test_a_traceback_names_a_line_of_the_text(alone: Path) -> None:
    status, out, err = called("-c", WHERE_IT_IS, "gc", "--help", stdin=podctl_source())
    assert (status, err) == (0, "")
    assert out.splitlines()[-3:] == [
        "bin/podctl def say(line: str, limit: int = 480) -> None:",
        "bin/podctl def go_back(",
        "bin/podctl def main(argv: Sequence[str], stdin: BinaryIO, document: Optional[Document] = None) -> int:",
    ]
