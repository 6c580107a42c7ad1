"""`lora new-stack`: a stack file that Pulumi and the program read, and never another one's secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from bootstrap.stack_names import NOT_DEPLOYED, stack_names
from components import settings
from components.cli import new_stack
from components.cli.main import main

OLD = """\
# How it is encrypted.
secretsprovider: passphrase
config:
  # The key of clients.
  lora-pods:apiKey:
    secure: v1:abc=
  lora-pods:pods: # one machine
    - base: Qwen/Qwen2.5-7B-Instruct
      host: {address: 10.20.0.7, hostKey: ssh-ed25519 AAAA} # secure enough
  "lora-pods:hfToken": {secure: "v1:def"}
  lora-pods:models:
    # The first.
    - {id: acme-v1, base: Qwen/Qwen2.5-7B-Instruct, adapter: ../adapters/acme/v1}
# What they were encrypted with.
encryptionsalt: v1:salt
"""
COPIED = """\
# globex: made like acme, without its secrets.
config:
  lora-pods:pods: # one machine
    - base: Qwen/Qwen2.5-7B-Instruct
      host: {address: 10.20.0.7, hostKey: ssh-ed25519 AAAA} # secure enough
  lora-pods:models:
    # The first.
    - {id: acme-v1, base: Qwen/Qwen2.5-7B-Instruct, adapter: ../adapters/acme/v1}
"""


@pytest.fixture
def stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "Pulumi.yaml").write_text("name: lora-pods\nstackConfigDir: stacks\n", encoding="utf-8")
    (tmp_path / "stacks").mkdir()
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    return tmp_path / "stacks"


def test_the_skeleton_names_the_client_and_what_comes_next(stacks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-stack", "acme"]) == 0
    made = yaml.safe_load((stacks / "Pulumi.acme.yaml").read_text(encoding="utf-8"))
    assert made["config"]["lora-pods:models"][0]["id"] == "acme-support-v1"
    assert set(made) == {"config"}
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "made stacks/Pulumi.acme.yaml"
    commands = ["pulumi stack init acme", "pulumi config set", "lora lock -s acme", "pulumi up --stack acme"]
    assert [command for command in commands if not any(command in line for line in told)] == []


def test_like_another_it_has_all_but_the_secrets(stacks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stacks / "Pulumi.acme.yaml").write_text(OLD, encoding="utf-8")
    assert main(["new-stack", "globex", "--like", "acme"]) == 0
    assert (stacks / "Pulumi.globex.yaml").read_text(encoding="utf-8") == COPIED
    assert "another port" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "config: {lora-pods:apiKey: {secure: v1:abc}, lora-pods:models: []}\n",
        'config:\n  lora-pods:models: []\n  ? lora-pods:apiKey\n  : secure: "v1:abc"\n',
        'config:\n  lora-pods:apiKey: {"secure": v1:abc}\n  lora-pods:models: []\n',
        'config:\n  lora-pods:apiKey: {"secur\\u0065": v1:abc}\n  lora-pods:models: []\n',
    ],
)
def test_a_secret_is_never_copied_however_it_is_written(
    stacks: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (stacks / "Pulumi.acme.yaml").write_text(text, encoding="utf-8")
    code = main(["new-stack", "globex", "--like", "acme"])
    made = stacks / "Pulumi.globex.yaml"
    assert "abc" not in (made.read_text(encoding="utf-8") if made.exists() else "")
    assert made.exists() == (code == 0)
    assert code == 0 or "without --like" in capsys.readouterr().err


def test_a_secret_that_was_left_in_the_open_is_not_copied_either(stacks: Path) -> None:
    assert set(new_stack.SECRETS) == set(settings.SECRETS)
    (stacks / "Pulumi.acme.yaml").write_text(OLD.replace("\n    secure: v1:abc=", " in-the-open"), encoding="utf-8")
    assert main(["new-stack", "globex", "--like", "acme"]) == 0
    assert (stacks / "Pulumi.globex.yaml").read_text(encoding="utf-8") == COPIED


@pytest.mark.parametrize(
    "text", ['"encryptionsalt": v1:abc\nconfig: {}\n', '{"encryptionsalt": "v1:abc", "config": {}}']
)
def test_what_it_was_encrypted_with_is_never_copied(
    stacks: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (stacks / "Pulumi.acme.yaml").write_text(text, encoding="utf-8")
    assert main(["new-stack", "globex", "--like", "acme"]) == 2
    assert "cannot be copied without its secrets" in capsys.readouterr().err
    assert not (stacks / "Pulumi.globex.yaml").exists()


def test_a_file_that_is_there_stays(stacks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stacks / "Pulumi.acme.yaml").write_text("config: {}\n", encoding="utf-8")
    (stacks / "Pulumi.globex.yaml").symlink_to("nowhere.yaml")
    for client in ("acme", "globex"):
        assert main(["new-stack", client]) == 2
        assert "is there already" in capsys.readouterr().err
    assert (stacks / "Pulumi.acme.yaml").read_text(encoding="utf-8") == "config: {}\n"
    assert not (stacks / "nowhere.yaml").exists()


@pytest.mark.parametrize("client", ["a b", "", "../x", "a/b", "ä", "x" * 81, "a\n", ".", "..", "_x", *new_stack.TAKEN])
def test_what_cannot_be_a_stacks_name_is_refused(stacks: Path, client: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-stack", client]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(stacks.iterdir()) == []


def test_without_a_project_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert main(["new-stack", "acme"]) == 2


def test_a_workflow_deploys_what_was_made_and_nothing_else(stacks: Path) -> None:
    for name in ("globex", "acme.eu", "$(id)", *NOT_DEPLOYED):
        (stacks / f"Pulumi.{name}.yaml").touch()
    (stacks / "acme.lock.yaml").touch()
    assert stack_names(stacks) == ["acme.eu", "globex"]
    assert set(new_stack.TAKEN) == set(NOT_DEPLOYED)
