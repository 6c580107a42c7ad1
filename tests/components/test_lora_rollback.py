"""`lora rollback -s STACK --base BASE`: what it tells of what the pod answered, and of the state."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from components.cli import rollback
from components.cli.main import main
from components.core.errors import UserError
from components.core.naming import engine_key
from tests.components.test_lora_status import Servers, servers, stack

__all__ = ["servers", "stack"]

OLD, NEW = "sha256:" + "a" * 64, "sha256:" + "b" * 64
ANSWER = {
    "models": {"org/base-1": None, "acme-v1": OLD, "gone": OLD, "same": NEW},
    "before": {"org/base-1": None, "acme-v1": NEW, "new": NEW, "same": NEW},
}


def roll_back(*words: str) -> int:
    return main(["rollback", "-s", "acme", "--identity", "key", *words])


def test_what_serves_now_and_what_pulumi_is_told(
    servers: Servers, stack: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other, port = servers.start("{}"), servers.start(json.dumps(ANSWER))
    stack(other, port)
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(rollback, "ask_pulumi", lambda *words, to_ask_for: asked.append(words))

    assert roll_back("--base", "org/base-1") == 0

    assert capsys.readouterr() == (
        f"org/base-1 on ops@127.0.0.1:{port} serves again what it served before:\n"
        "  ~ acme-v1  aaaaaaaaaaaa, was bbbbbbbbbbbb\n"
        "  + gone  aaaaaaaaaaaa\n"
        "  - new  was bbbbbbbbbbbb\n"
        "    org/base-1  (the base)\n"
        "    same  bbbbbbbbbbbb\n"
        "The stack file of acme differs from that now: the next `pulumi up` brings back what was rolled back. To stay, "
        "change the stack file first (`git revert`); then `pulumi up` sends nothing and restarts nothing.\n"
        "`pulumi preview --diff` shows the difference.\n",
        "",
    )
    (told,) = servers.told
    assert told[0] == f"sudo -n python3 - rollback --engine {engine_key('acme', 'org/base-1')}", "that pod alone"
    refresh = ("refresh", "--yes", "--skip-preview", "--stack", "acme", "--target", "**ReachedPod::org/base-1-reach")
    assert asked == [refresh]


def test_that_no_model_went_back_is_said(
    servers: Servers, stack: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollback, "ask_pulumi", lambda *_, **__: "")
    stack(servers.start(json.dumps({**ANSWER, "before": ANSWER["models"]})))
    assert roll_back("--base", "org/base-0") == 0
    assert (
        "    same  bbbbbbbbbbbb\n"
        "No model is another one now: the last activation changed flags or secrets. To go further back: "
        "`git revert`, then `pulumi up`.\n"
    ) in capsys.readouterr().out


def test_a_state_that_cannot_be_told_is_said(
    servers: Servers, stack: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: str, to_ask_for: str) -> str:
        raise UserError("`pulumi refresh --yes` failed (no stack named acme)")

    monkeypatch.setattr(rollback, "ask_pulumi", fails)
    stack(servers.start(json.dumps(ANSWER)))
    assert roll_back("--base", "org/base-0") == 0, "it serves"
    assert capsys.readouterr().err == (
        "warning: the state does not know of it, and a preview without --refresh shows nothing: `pulumi refresh --yes` "
        "failed (no stack named acme); run `pulumi refresh --stack acme`\n"
    )


def test_a_pod_that_refuses(
    servers: Servers, stack: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollback, "ask_pulumi", lambda *_, **__: pytest.fail("nothing changed"))
    stack(servers.start("nothing is kept on this pod that engine x served before", status=1), 1)
    assert roll_back("--base", "org/base-0") == 1
    assert capsys.readouterr() == ("", "nothing is kept on this pod that engine x served before\n")
    assert roll_back("--base", "org/base-1") == 1
    assert capsys.readouterr().err.startswith("ops@127.0.0.1:1 cannot be reached (Connection refused)")


def test_a_base_that_there_is_not(stack: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    stack(1, 2)
    assert roll_back("--base", "org/absent") == 2
    assert capsys.readouterr().err == (
        "lora: --base org/absent: no pod of this stack serves it; its bases: org/base-0, org/base-1\n"
    )
