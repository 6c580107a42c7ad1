"""Secrets: one root-only file that systemd reads, whose revision rises only with its content."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.on_pod.podctl import secret_files
from components.on_pod.podctl.store import Store
from tests.unit.podctl.pods import Answer, PodDirectory, mode


@pytest.fixture(autouse=True)
def _early(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the beginning of time, revisions count from one."""
    monkeypatch.setattr(time, "time", lambda: 0.0)


def set_secrets(pod: PodDirectory, **secrets: object) -> Answer:
    return pod.run("secrets", stdin={"engine": "prod-base-1", "secrets": secrets, "identity": "pod-1"})


def test_the_file_is_for_root_and_quoted_for_systemd(pod: PodDirectory) -> None:
    answer = set_secrets(pod, VLLM_API_KEY="a\"b\\c`d$e %h #x 'q' ", HF_TOKEN="hf_x", EMPTY="")

    assert answer == (0, {"revision": 1}, [])
    path = pod.root / "secrets/prod-base-1.1.env"
    assert [path.name for path in path.parent.iterdir()] == [path.name], "none is in force before an activation"
    assert path.read_text() == (
        '# revision 1\nEMPTY=""\nHF_TOKEN="hf_x"\nVLLM_API_KEY="a\\"b\\\\c\\`d\\$e %h #x \'q\' "\n'
    )
    assert (mode(path), mode(path.parent)) == ("0o600", "0o700")


def test_the_revision_rises_only_when_the_content_changed(pod: PodDirectory) -> None:
    path = pod.root / "secrets/prod-base-1.1.env"
    assert set_secrets(pod, A="1").result == {"revision": 1}
    written = path.stat()
    assert set_secrets(pod, A="1").result == {"revision": 1}
    assert path.stat() == written
    assert set_secrets(pod, A="2").result == {"revision": 2}
    assert set_secrets(pod).result == {"revision": 3}
    assert (pod.root / "secrets/prod-base-1.3.env").read_text() == "# revision 3\n"
    assert set_secrets(pod).result == {"revision": 3}


def test_a_revision_an_engine_was_proven_with_is_not_used_again(pod: PodDirectory) -> None:
    generation = pod.root / "units/prod-base-1/1"
    generation.mkdir(parents=True)
    for name in ("unit", "proven"):
        (generation / name).write_text("")
    (generation / "doc.json").write_text(json.dumps({"secretsRevision": 7}))

    assert set_secrets(pod, A="2").result == {"revision": 8}


def test_no_revision_comes_twice_even_when_all_was_forgotten(
    pod: PodDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pulumi runs the activation again only for another number, and without one the new secrets would serve nobody."""
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.5)
    assert set_secrets(pod, A="1").result == {"revision": 1_700_000_000}
    assert set_secrets(pod, A="2").result == {"revision": 1_700_000_001}
    (pod.root / "secrets/prod-base-1.env").write_text("# revision 1\n")
    assert set_secrets(pod, A="2").result == {"revision": 1_700_000_001}, "it is the newest that counts"
    assert pod.run("unsecret", "--engine", "prod-base-1").result == {"removed": True}
    assert not (pod.root / "secrets").exists()
    assert pod.run("unsecret", "--engine", "prod-base-1").result == {"removed": False}

    monkeypatch.setattr(time, "time", lambda: 1_700_000_060.5)
    assert set_secrets(pod, A="1").result == {"revision": 1_700_000_060}


def test_one_engines_secrets_are_not_anothers(pod: PodDirectory) -> None:
    for engine in ("a", "a-b"):
        pod.run("secrets", stdin={"engine": engine, "secrets": {"A": engine}})

    assert pod.run("unsecret", "--engine", "a").result == {"removed": True}

    assert [path.name for path in (pod.root / "secrets").iterdir()] == ["a-b.1.env"]


@pytest.mark.parametrize("bad", ["a\nb", "a\r", "\0", "a\x1b", "a\u2028b", "\ud800", "a\x85b"])
def test_a_value_that_systemd_would_cut_is_refused_without_showing_it(bad: str, pod: PodDirectory) -> None:
    answer = set_secrets(pod, VLLM_API_KEY="canary" + bad)

    assert (answer.status, answer.lines) == (
        1,
        ["the secret VLLM_API_KEY holds a line break or another control character: set it again without"],
    )
    assert not pod.root.exists()


@pytest.mark.parametrize("value", [1, None, ["canary"], {"canary": "canary"}])
def test_a_value_that_is_no_text_is_refused_without_showing_it(value: object, pod: PodDirectory) -> None:
    answer = set_secrets(pod, VLLM_API_KEY=value)

    assert (answer.status, answer.lines) == (1, ["the secret VLLM_API_KEY must be text"])


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=B", "A\nB", "Ä"])
def test_a_name_that_is_no_variable_is_refused(name: str, pod: PodDirectory) -> None:
    answer = set_secrets(pod, **{name: "canary"})

    assert answer.status == 1
    assert answer.lines[0].endswith("is not a name for an environment variable")
    assert "canary" not in answer.lines[0]


def systemd_reads(text: str) -> dict[str, str]:
    """What systemd makes of an EnvironmentFile= whose values are all in double quotes.

    A model of parse_env_file_internal (src/basic/env-file.c, systemd 252): a backslash keeps the next character if
    it is one of the four that shells expand, and stays itself otherwise.
    """
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, value = line.split("=", 1)
        assert value[0] == value[-1] == '"'
        inner, read, position = value[1:-1], "", 0
        while position < len(inner):
            assert inner[position] != '"'
            if inner[position] == "\\":
                position += 1
                read += inner[position] if inner[position] in '"\\`$' else "\\" + inner[position]
            else:
                read += inner[position]
            position += 1
        found[name] = read
    return found


characters = st.one_of(st.sampled_from("\"\\`$%'# ;="), st.characters(blacklist_categories=["Cc", "Cs", "Zl", "Zp"]))
texts = st.text(characters, max_size=30)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(secrets=st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True), texts, max_size=4))
def test_systemd_and_podctl_read_back_what_was_set(secrets: dict[str, str], pod: PodDirectory) -> None:
    answer = pod.run("secrets", stdin={"engine": "e", "secrets": secrets})

    assert answer.status == 0
    revision = answer.result["revision"]
    assert systemd_reads((pod.root / f"secrets/e.{revision}.env").read_text(encoding="utf-8")) == secrets
    store = Store(str(pod.root), str(pod.units))
    assert secret_files.read_secrets(store, "e", revision) == secrets
