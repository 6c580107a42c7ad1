"""`lora check`: which adapters are meant, how findings are told, and what a hook gets."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from components.cli import check
from components.cli.main import main
from components.core.findings import Finding
from tests.support.adapters import CONFIG, write_adapter
from tests.support.large_adapters import large_adapters

ROOT = Path(__file__).resolve().parents[2]
BROKEN = {**CONFIG, "use_dora": True}


def test_a_good_adapter_is_one_line_and_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = write_adapter(tmp_path / "a")
    assert main(["check", str(adapter)]) == 0
    assert capsys.readouterr() == (f"ok       {adapter}\n1 adapter: 1 ok\n", "")


def test_an_error_is_exit_code_1_and_stands_beneath_its_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = write_adapter(tmp_path / "good"), write_adapter(tmp_path / "bad", BROKEN)
    assert main(["check", str(good), str(bad)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"ok       {good}", f"error    {bad}"]
    assert lines[2].startswith("  error    adapter_config.json: use_dora: ")
    assert lines[-1] == "2 adapters: 1 with errors, 1 ok"


def test_json_is_a_list_of_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = write_adapter(tmp_path / "good"), write_adapter(tmp_path / "bad", BROKEN)
    assert main(["check", "--json", str(good), str(bad)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [set(finding) for finding in found] == [{"path", "severity", "rule", "subject", "message"}] * len(found)
    errors = [finding for finding in found if finding["severity"] == "error"]
    assert [(error["path"], error["subject"]) for error in errors] == [(f"{bad}/adapter_config.json", "use_dora")]
    assert main(["check", "--json", str(good)]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_the_files_of_an_adapter_stand_for_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_adapter(tmp_path / "a")
    write_adapter(tmp_path)
    monkeypatch.chdir(tmp_path)
    named = ["a/adapter_config.json", "adapter_model.safetensors", "a", "./a/", "a/adapter_model.safetensors", "."]
    assert check.adapter_directories(named) == [Path("a"), Path()]


def test_another_file_is_no_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").touch()
    assert main(["check", str(tmp_path / "README.md")]) == 2
    assert capsys.readouterr().err == (
        f"lora: {tmp_path}/README.md: name an adapter's directory, or the adapter_config.json in it\n"
    )


def test_what_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "gone")]) == 1
    assert "no such directory" in capsys.readouterr().out


def test_a_base_that_cannot_be_read_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = write_adapter(tmp_path / "a")
    assert main(["check", "--base-config", str(tmp_path / "config.json"), str(adapter)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert re.fullmatch(rf"lora: {tmp_path}/config\.json.*\n", told.err)
    assert main(["check", "--base-config", "x" * 300, str(adapter)]) == 2
    assert capsys.readouterr().err == f"lora: {'x' * 300}: cannot be read (file name too long).\n"


def test_the_bases_config_is_held_against_the_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = write_adapter(tmp_path / "a")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    base = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "num_key_value_heads": 4, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(base), encoding="utf-8")
    for named in (tmp_path, tmp_path / "config.json"):
        assert main(["check", "--base-config", str(named), str(adapter)]) == 1
        assert "64" in capsys.readouterr().out


def test_another_base_than_the_trainers_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = write_adapter(tmp_path / "a")
    main(["check", "--base", "another/base", str(adapter)])
    assert "example/base" in capsys.readouterr().out


def test_a_vllm_that_is_too_new_to_be_known_is_doubted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = write_adapter(tmp_path / "a")
    assert main(["check", "--vllm", "99.0.0", str(adapter)]) == 0
    assert "99.0.0" in capsys.readouterr().err


# --- the table --------------------------------------------------------------------------------------------

LONG = "names a module that this base does not have, so that nothing of it would ever be used; train it again " * 2


def finding(adapter: str, severity: str = "warning", message: str = LONG) -> Finding:
    return Finding(f"{adapter}/adapter_config.json", severity, "some-rule", "r", message)  # type: ignore[arg-type]


def test_lines_keep_to_the_terminals_width() -> None:
    lines = list(check.table([Path("a")], [[finding("a", "error"), finding("a")]], 80))
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.startswith("  error    adapter_config.json: r: names a module")]
    assert [line.split()[0] for line in lines if re.match("(ok|error|warning|  error|  warning) ", line)] == [
        "error",
        "error",
        "warning",
    ]


def test_two_hundred_adapters_with_one_fault_are_told_briefly() -> None:
    adapters = [Path(f"adapters/client-{number}") for number in range(200)]
    lines = list(check.table(adapters, [[finding(str(adapter))] for adapter in adapters], 80))
    assert sum("names a module" in line for line in lines) == 1
    assert lines[-2:] == [
        "  warning  adapter_config.json: r: the same as in adapters/client-0",
        "200 adapters: 200 with warnings only",
    ]


def test_a_finding_about_the_directory_repeats_no_path() -> None:
    assert list(check.table([Path("a")], [[Finding("a", "error", "x", "", "holds nothing")]], 80))[1] == (
        "  error    holds nothing"
    )


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" in next(check.table([Path("a")], [[]], 80, colours=True))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert check._colours()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not check._colours()
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert not check._colours()


# --- many and large ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts what a process reads as Linux does")
def test_two_hundred_large_adapters_are_checked_without_their_tensors(tmp_path: Path) -> None:
    adapters = large_adapters(tmp_path, 200)
    program = (
        "import sys; from components.cli.main import main; code = main(sys.argv[1:]); "
        "sys.stderr.write(open('/proc/self/io').readline().split()[1]); sys.exit(code)"
    )
    command = [sys.executable, "-c", program, "check", *map(str, adapters)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.splitlines()[-1] == "200 adapters: 200 ok"
    assert int(done.stderr) < 20_000_000
    assert done.returncode == 0


# --- pre-commit -------------------------------------------------------------------------------------------


def test_the_hook_runs_on_what_pre_commit_hands_over(tmp_path: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    write_adapter(tmp_path / "models/good")
    write_adapter(tmp_path / "bad", BROKEN)
    write_adapter(tmp_path)
    (tmp_path / "my_adapter_config.json").touch()
    (tmp_path / "adapter_config.json.bak").touch()
    tracked = [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    given = [name for name in tracked if re.search(hook["files"], name)]
    assert len(given) == 6
    command = shlex.split(hook["entry"])
    environment = {**os.environ, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        [*command, *given], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "3 adapters: 1 with errors, 2 ok"
    assert (hook["id"], hook["language"]) == ("lora-check", "python")
