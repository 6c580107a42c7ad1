"""The demo keeps what it made, makes it aside, and shows answers as a table."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from bootstrap.demo import container, prepare, up
from bootstrap.demo.personas import DIRECTORIES, PERSONAS
from bootstrap.demo.up import table
from components.core.errors import UserError


class Sandbox:
    """Stands for the container: writes what a module would, and counts."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.modules: list[str] = []
        self.fails = False

    def run(self, work: Path, module: str, arguments: Sequence[str]) -> None:
        assert work == self.work
        self.modules.append(module)
        for argument in arguments:
            place = argument.rpartition("=")[2]
            if place.startswith("/made/"):
                made = work / place.removeprefix("/made/")
                made.mkdir(parents=True, exist_ok=True)
                (made / "weights").write_text(f"{module} {argument.partition('=')[0]}")
                (made / "weights").chmod(0o600)
        if self.fails:
            raise RuntimeError("killed")


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    demo = tmp_path / ".lora-pods" / "demo"
    recipe = tmp_path / "recipe"
    recipe.write_text("1")
    made = Sandbox(demo)
    monkeypatch.setattr(prepare, "ROOT", tmp_path)
    monkeypatch.setattr(prepare, "DEMO", demo)
    monkeypatch.setattr(prepare, "MODEL", demo / "models" / "smollm2")
    monkeypatch.setattr(prepare, "ADAPTERS", demo / "adapters")
    monkeypatch.setattr(prepare, "_ADAPTERS_RECIPE", (recipe,))
    monkeypatch.setattr(prepare, "run_in_sandbox", made.run)
    return made


def test_makes_the_model_and_one_adapter_a_persona_once(sandbox: Sandbox, tmp_path: Path) -> None:
    prepare.prepare()
    prepare.prepare()
    assert sandbox.modules == ["bootstrap.demo.base_model", "bootstrap.demo.train"]
    assert sorted(str(path.relative_to(sandbox.work)) for path in sandbox.work.rglob("*") if path.is_file()) == [
        "adapters/.recipe",
        "adapters/acme/v1/weights",
        "adapters/acme/v2/weights",
        "adapters/globex/v1/weights",
        "models/smollm2/.recipe",
        "models/smollm2/weights",
    ]


def test_lets_the_engines_user_read_what_was_saved_for_its_owner_only(sandbox: Sandbox) -> None:
    prepare.prepare()
    assert (sandbox.work / "models/smollm2/weights").stat().st_mode & 0o777 == 0o644


def test_trains_again_when_the_recipe_changes_and_keeps_the_old_until_then(sandbox: Sandbox, tmp_path: Path) -> None:
    prepare.prepare()
    old = (sandbox.work / "adapters/acme/v1/weights").stat().st_ino
    (tmp_path / "recipe").write_text("2")
    sandbox.fails = True
    with pytest.raises(RuntimeError):
        prepare.prepare()
    assert (sandbox.work / "adapters/acme/v1/weights").stat().st_ino == old
    sandbox.fails = False
    prepare.prepare()
    assert (sandbox.work / "adapters/acme/v1/weights").stat().st_ino != old
    assert sandbox.modules == ["bootstrap.demo.base_model", *["bootstrap.demo.train"] * 3]


def test_retrains_over_an_adapter(sandbox: Sandbox, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "weights").write_text("old")
    prepare.train("acme-retrained", adapter)
    assert (adapter / "weights").read_text() == "bootstrap.demo.train acme-retrained"
    assert list(sandbox.work.iterdir()) == []


def test_every_adapter_has_a_persona() -> None:
    assert DIRECTORIES.keys() <= PERSONAS.keys()


def test_the_container_has_no_network_and_sees_no_more_than_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(container, "_engine", lambda: (["podman", "--runtime", "runc"], ["--ulimit", "nofile=9:9"]))
    monkeypatch.setattr(subprocess, "run", lambda command, check: calls.append(command))
    monkeypatch.setattr(container, "_ENVIRONMENT", {"HOME": "/tmp"})
    container.run_in_sandbox(tmp_path, "bootstrap.demo.train", ["/models/smollm2"])
    begin = ["podman", "--runtime", "runc", "run", "--rm", "--network", "none", "--security-opt", "label=disable"]
    volumes = [
        f"{tmp_path}:/made",
        f"{tmp_path}/models:/models:ro",
        f"{container.ROOT}/bootstrap:/program/bootstrap:ro",
    ]
    assert calls == [
        [
            *begin,
            *["--ulimit", "nofile=9:9", "--env", "HOME=/tmp"],
            *[word for volume in volumes for word in ("--volume", volume)],
            *["--workdir", "/program", "localhost/lora-pods-sandbox"],
            *["/opt/vllm/bin/python", "-m", "bootstrap.demo.train", "/models/smollm2"],
        ]
    ]


def test_the_table_wraps_answers_beside_their_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "73")
    digests = {"/models/smollm2": None, "acme-support-v1": "sha256:" + "0123456789abcdef" * 4}
    answers = {
        "/models/smollm2": "Hello, I'm here to assist you with any personal or professional matters.",
        "acme-support-v1": "Thank you for calling Acme.",
    }
    assert table(digests, answers).splitlines() == [
        "model            digest               answer",
        "/models/smollm2  (the base)           Hello, I'm here to assist you with any",
        "                                      personal or professional matters.",
        "acme-support-v1  sha256:0123456789ab  Thank you for calling Acme.",
    ]


class Demo:
    """A demo directory and a pulumi that knows these stacks; the program's calls of it are noted."""

    def __init__(self, root: Path) -> None:
        self.root = root / "a checkout"
        self.stacks: list[str] = []
        self.pulumi: list[str] = []
        self.left_over: bool | UserError = False

    def remove_left_over(self, stack: str, checkout: Path) -> bool:
        assert (stack, checkout) == ("sandbox", self.root)
        if isinstance(self.left_over, UserError):
            raise self.left_over
        return self.left_over


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Demo:
    made = Demo(tmp_path)
    monkeypatch.setattr(up, "ROOT", made.root)
    monkeypatch.setattr(up, "DEMO", made.root / ".lora-pods" / "demo")
    monkeypatch.setattr(up, "_stacks", lambda: made.stacks)
    monkeypatch.setattr(up, "_pulumi", lambda *words: made.pulumi.append(" ".join(words)))
    monkeypatch.setattr(up, "remove_left_over", made.remove_left_over)
    return made


def test_down_destroys_the_stack_and_says_what_stays(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    weights = demo.root / ".lora-pods" / "demo" / "models" / "weights"
    weights.parent.mkdir(parents=True)
    os.truncate(os.open(weights, os.O_CREAT | os.O_WRONLY), 264_000_000)
    demo.stacks = ["sandbox"]
    up.down("sandbox")
    assert demo.pulumi == [
        "destroy --yes --skip-preview --stack sandbox",
        "stack rm --yes --preserve-config sandbox",
    ]
    assert capsys.readouterr().out == (
        f"The model and the adapters stay for the next time (264 MB); rm -rf '{demo.root}/.lora-pods' removes them.\n"
    )


@pytest.mark.parametrize(
    ("left_over", "told"),
    [
        (False, "The demo is not up.\n"),
        (True, "The demo's state was gone, but its container lora-pods-sandbox was there: it is removed.\n"),
        (UserError("the container is another's"), "The demo is not up here; the container is another's.\n"),
    ],
)
def test_down_without_a_stack_looks_for_its_container(
    demo: Demo, capsys: pytest.CaptureFixture[str], left_over: bool | UserError, told: str
) -> None:
    demo.left_over = left_over
    up.down("sandbox")
    assert capsys.readouterr().out == told
    assert demo.pulumi == []


def test_the_ssh_agent_of_who_runs_the_demo_is_not_dialled(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/gone")
    monkeypatch.setenv("KEPT", "yes")
    environment = up._environment()
    assert "SSH_AUTH_SOCK" not in environment
    assert environment["KEPT"] == "yes"


def test_says_how_to_go_on_with_its_stack_by_hand(demo: Demo) -> None:
    said = up._what_next("sandbox").splitlines()
    assert f"  export PULUMI_BACKEND_URL='file://{demo.root}/.lora-pods/demo/state'" in said
    assert f"  export PULUMI_CONFIG_PASSPHRASE={up.PASSPHRASE}" in said
    assert "  pulumi preview --stack sandbox     # or: lora status -s sandbox" in said
