"""`lora lock -s STACK`: what it writes, keeps, says and exits with."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from components.cli import lock as command
from components.cli.main import main
from components.core.digest_cache import DigestCache
from components.core.lock import LockEntry, short_digest
from components.stack_files import read_lock
from tests.support.adapters import seeded_adapter

STACK_FILE = """\
encryptionsalt: v1:x
config:
  lora-pods:pods:
    - base: example/base
      host:
        address: 10.0.0.7
        hostKey: ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA
      engine: {python: /opt/vllm/bin/python}
  lora-pods:models:
    - {id: acme-v2, base: example/base, adapter: ../adapters/v2}
    - {id: acme-v1, base: example/base, adapter: ../adapters/v1}
    - {id: plain, base: example/base}
  lora-pods:sshPrivateKey: {secure: v1:AAAA}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "Pulumi.yaml").write_text("name: lora-pods\nruntime: python\nstackConfigDir: stacks\n")
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "Pulumi.acme.yaml").write_text(STACK_FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # What keeps pulumi from a pod is nothing to a lock.
    monkeypatch.setenv("SSH_AUTH_SOCK", "/nowhere")
    for number in (1, 2):
        seeded_adapter(tmp_path / "adapters" / f"v{number}", seed=number)
    return tmp_path


def lora_lock(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(["-s", "acme", *words]))


def edit(project: Path, old: str, new: str) -> None:
    file = project / "stacks" / "Pulumi.acme.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def entry(project: Path, name: str) -> LockEntry:
    return LockEntry.of(DigestCache().describe(project / "adapters" / name), f"../adapters/{name}", "example/base")


def locked(project: Path) -> dict[str, LockEntry] | None:
    return read_lock(project / "stacks", "acme")


def test_it_writes_what_the_adapters_are(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = entry(project, "v1"), entry(project, "v2")
    assert lora_lock() == 0
    assert locked(project) == {"acme-v1": first, "acme-v2": second}
    assert capsys.readouterr().out == (
        f"  + acme-v1  {short_digest(first.digest)}\n"
        f"  + acme-v2  {short_digest(second.digest)}\n"
        "stacks/acme.lock.yaml: written (2 adapters, 2 added)\n"
    )
    assert lora_lock() == 0
    assert capsys.readouterr().out == "stacks/acme.lock.yaml: is right (2 adapters); nothing to write\n"


def test_it_says_what_changed(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora_lock()
    old = entry(project, "v1")
    seeded_adapter(project / "adapters" / "v1", seed=11)
    shutil.copytree(project / "adapters" / "v2", project / "adapters" / "moved")
    edit(
        project,
        "id: acme-v2, base: example/base, adapter: ../adapters/v2",
        "id: m, base: example/base, adapter: ../adapters/moved",
    )
    capsys.readouterr()

    before = (project / "stacks" / "acme.lock.yaml").read_bytes()
    assert lora_lock("--check") == 1
    assert (project / "stacks" / "acme.lock.yaml").read_bytes() == before
    told = capsys.readouterr().out
    assert lora_lock() == 0

    new, moved = entry(project, "v1"), entry(project, "moved")
    changes = (
        f"  ~ acme-v1  {short_digest(old.digest)} → {short_digest(new.digest)}\n"
        "  - acme-v2\n"
        f"  + m  {short_digest(moved.digest)}\n"
    )
    assert told == changes + "stacks/acme.lock.yaml: would be written (2 adapters, 1 added, 1 changed, 1 removed)\n"
    assert (
        capsys.readouterr().out
        == changes + "stacks/acme.lock.yaml: written (2 adapters, 1 added, 1 changed, 1 removed)\n"
    )
    assert lora_lock("--check") == 0


def test_another_path_of_the_same_bytes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora_lock()
    (project / "adapters" / "v2").rename(project / "adapters" / "moved")
    edit(project, "adapters/v2", "adapters/moved")
    capsys.readouterr()
    assert lora_lock() == 0
    assert "  ~ acme-v2  another path\n" in capsys.readouterr().out


def test_absent_adapters_keep_their_entries(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora_lock()
    second = entry(project, "v2")
    shutil.rmtree(project / "adapters" / "v2")
    seeded_adapter(project / "adapters" / "v1", seed=11)
    capsys.readouterr()
    assert lora_lock() == 0
    assert locked(project) == {"acme-v1": entry(project, "v1"), "acme-v2": second}
    assert capsys.readouterr().out.endswith("not on this machine, entries kept: acme-v2\n")
    assert lora_lock("--check") == 0


def test_what_it_can_it_writes_and_the_rest_it_names(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(project / "adapters" / "v2")
    assert lora_lock() == 1
    assert locked(project) == {"acme-v1": entry(project, "v1")}
    assert capsys.readouterr().err == (
        "stacks/acme.lock.yaml: has no entry that fits acme-v2, which this machine does not have; "
        "run `lora lock -s acme` where they are\n"
    )


def test_an_entry_that_fits_no_more_is_kept_for_whoever_has_the_adapter(project: Path) -> None:
    assert lora_lock() == 0
    before = locked(project)
    shutil.rmtree(project / "adapters" / "v2")
    file = project / "stacks" / "Pulumi.acme.yaml"
    file.write_text(file.read_text().replace("../adapters/v2", "../adapters/v3"))
    assert lora_lock() == 1
    assert locked(project) == before


def test_another_spelling_of_its_path_is_the_same_adapter(project: Path) -> None:
    assert lora_lock() == 0
    shutil.rmtree(project / "adapters" / "v2")
    file = project / "stacks" / "Pulumi.acme.yaml"
    file.write_text(file.read_text().replace("../adapters/v2", "../adapters/./v2"))
    assert lora_lock() == 0


def test_where_no_adapter_is_no_lock_is_made(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(project / "adapters")
    assert lora_lock() == 1
    assert locked(project) is None
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("stacks/acme.lock.yaml: has no entry that fits acme-v1, acme-v2, which")


def test_a_faulty_adapter_leaves_the_lock_alone(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "adapters" / "v2" / "adapter_config.json").write_text("{")
    assert lora_lock() == 1
    assert locked(project) is None
    assert "models[0].adapter: " in capsys.readouterr().err


def test_what_vllm_would_refuse_is_not_locked(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A preview from the lock alone checks nothing: it was checked here."""
    lora_lock()
    before = (project / "stacks" / "acme.lock.yaml").read_bytes()
    for number in (1, 2):
        seeded_adapter(project / "adapters" / f"v{number}", seed=10 + number, config={"use_dora": True})
    capsys.readouterr()
    for words in ((), ("--check",)):
        assert lora_lock(*words) == 1
        told = capsys.readouterr()
        assert told.out == ""
        first, only = told.err.splitlines()
        assert first == "the stack has 1 fault; nothing was touched:"
        assert only.startswith("  models[0, 1].adapter: acme-v2, acme-v1: adapter_config.json: use_dora: ")
    assert (project / "stacks" / "acme.lock.yaml").read_bytes() == before


def test_what_the_pod_says_counts_for_the_check(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(project, "engine: {python: /opt/vllm/bin/python}", "engine: {vllm: {version: 99.1.0}}\n      baseConfig: ../b")
    assert lora_lock() == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "  pods[0].baseConfig: ../b: cannot be read (no such file or directory)."
    assert lines[2].startswith("  warning: pods[0].engine.vllm.version: vLLM 99.1.0 is newer than ")
    edit(project, "../b\n", "x" * 300 + "\n")
    assert lora_lock() == 1
    assert capsys.readouterr().err.splitlines()[1].endswith(": cannot be read (file name too long).")
    edit(project, "99.1.0}}\n      baseConfig: " + "x" * 300, "0.32.0}, args: {loraTargetModules: [o_proj]}}")
    assert lora_lock() == 1
    assert "--lora-target-modules lets vLLM adapt o_proj" in capsys.readouterr().err
    assert locked(project) is None


def test_warnings_are_told_and_keep_nothing_from_being_written(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seeded_adapter(project / "adapters" / "v1", seed=1, config={"base_model_name_or_path": "another/base"})
    assert lora_lock() == 0
    assert set(locked(project) or {}) == {"acme-v1", "acme-v2"}
    assert capsys.readouterr().err.startswith("warning: models[1].adapter: acme-v1: adapter_config.json: base_model_")


def test_a_broken_lock_is_mended_where_all_adapters_are(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = project / "stacks" / "acme.lock.yaml"
    broken = "models: {}\n<<<<<<< HEAD\n"
    path.write_text(broken)
    shutil.move(project / "adapters" / "v2", project / "aside")
    assert lora_lock() == 1
    assert path.read_text() == broken
    assert "merge conflict (line 2)" in capsys.readouterr().err
    shutil.move(project / "aside", project / "adapters" / "v2")
    assert lora_lock("--check") == 1
    assert lora_lock() == 0
    assert set(locked(project) or {}) == {"acme-v1", "acme-v2"}


def test_faults_of_the_stack_file_come_first(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(project, "id: plain", "id: plain, adaptor: x")
    edit(project, "example/base, adapter: ../adapters/v1", "other, adapter: ../adapters/v1")
    assert lora_lock() == 1
    told = capsys.readouterr().err
    assert "  models[1].base: no pod serves other" in told
    assert "  models[2].adaptor: unknown key" in told
    assert "sshPrivateKey" not in told
    assert locked(project) is None


SLIPS = {
    "lora-pods:modles": "modles: unknown key; known here: pods, models, store, running, requireLock, sshPrivateKey, "
    "apiKey, hfToken, tlsKey",
    "Lora-pods:models": "Lora-pods:models: is read by nobody; our keys begin with lora-pods: (did you mean "
    "lora-pods:models?)",
    "lora_pods:modles": "lora_pods:modles: is read by nobody; our keys begin with lora-pods: (did you mean "
    "lora-pods:modles?)",
    "pods:models": "pods:models: is read by nobody; our keys begin with lora-pods: (did you mean lora-pods:models?)",
}


@pytest.mark.parametrize("key", SLIPS)
def test_a_slip_in_a_key_loses_no_entries(project: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    lora_lock()
    shutil.rmtree(project / "adapters")
    edit(project, "lora-pods:models", key)
    before = (project / "stacks" / "acme.lock.yaml").read_bytes()
    capsys.readouterr()
    assert lora_lock() == 1
    assert capsys.readouterr() == ("", f"the stack has 1 fault; nothing was touched:\n  {SLIPS[key]}\n")
    assert (project / "stacks" / "acme.lock.yaml").read_bytes() == before


def test_other_providers_keys_are_theirs(project: Path) -> None:
    edit(project, "config:\n", "config:\n  aws:region: eu-central-1\n  pulumi:tags: {a: b}\n  datadog:apiKey: x\n")
    assert lora_lock() == 0


@pytest.mark.parametrize("inside", ["stacks", "adapters/v1"])
def test_from_anywhere_in_the_project(project: Path, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project / inside)
    assert lora_lock() == 0
    assert set(locked(project) or {}) == {"acme-v1", "acme-v2"}


def test_ids_that_look_like_something_else(project: Path) -> None:
    """As Pulumi reads them: `no` is a name, and 1e3 in quotes too."""
    edit(project, "id: acme-v1", "id: no")
    edit(project, "id: acme-v2", 'id: "1e3"')
    assert lora_lock() == 0
    assert set(locked(project) or {}) == {"no", "1e3"}
    assert set(yaml.safe_load((project / "stacks" / "acme.lock.yaml").read_text())["models"]) == {"no", "1e3"}


def test_a_stack_that_is_not_here_is_a_wrong_command(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for stack in ("globex", "org/acme"):
        assert main(["lock", "-s", stack]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "lora: stacks/Pulumi.globex.yaml: no such file; the stacks here are: acme"
    assert told[1].startswith("lora: 'org/acme' is no stack's name")


def test_it_starts_without_pulumi(project: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    code = (
        "import argparse, sys; sys.path.insert(0, sys.argv.pop(1)); from components.cli import lock; "
        "p = argparse.ArgumentParser(); lock.add_arguments(p); code = lock.run(p.parse_args()); "
        "heavy = {'pulumi', 'grpc', 'asyncssh', 'jinja2'} & set(sys.modules); sys.exit(str(heavy) if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(root), "-s", "acme"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
