"""The annotated example is the reference: it loads, and it, the settings and Pulumi.yaml know the same keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from components.settings import SECRETS, Model, Pod, load
from tests.components.test_settings import PRIVATE_KEY, Config

ROOT = Path(__file__).resolve().parents[2]
TLS_KEY = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"
EXAMPLE = ROOT / "stacks" / "Pulumi.example.yaml"


@pytest.fixture
def text() -> str:
    return EXAMPLE.read_text(encoding="utf-8")


@pytest.fixture
def config(text: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(text)["config"]
    return loaded


def test_it_loads(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    short = {key.removeprefix("lora-pods:"): value for key, value in config.items()}
    settings = load(Config(short, sshPrivateKey=PRIVATE_KEY, apiKey="key", tlsKey=TLS_KEY))
    kinds = [type(pod.host or pod.ec2 or pod.sandbox).__name__ for pod in settings.pods]
    assert kinds == ["Host", "Ec2", "Sandbox"]
    assert settings.directory == ROOT / "stacks"


def test_it_explains_every_key_of_the_settings(text: str) -> None:
    for kind in (Pod, Model):
        for key in _keys(kind):
            assert re.search(rf"(^|[\s#{{,]){key}:", text), f"stacks/Pulumi.example.yaml does not show `{key}`"


def test_it_and_the_schema_know_the_same_top_level_keys(text: str) -> None:
    schema = yaml.safe_load((ROOT / "Pulumi.yaml").read_text(encoding="utf-8"))["config"]
    shown = set(re.findall(r"^  (?:# )?lora-pods:([A-Za-z]+):", text, flags=re.MULTILINE))
    assert shown == set(schema)
    assert {key for key, value in schema.items() if value["description"].startswith("Secret")} == set(SECRETS)


def test_it_says_what_each_default_is(text: str) -> None:
    """The numbers that the example names as defaults are the settings'."""
    pod = Pod.model_validate({"base": "b", "sandbox": {}})
    assert f"{pod.engine.port} if left out" in text
    assert f"{pod.engine.ready_timeout_seconds} if left out" in text
    assert pod.sandbox is not None
    assert f"image: {pod.sandbox.image} #" in text
    assert f"shmMiB: {pod.sandbox.shm_mi_b} #" in text


def _keys(kind: type[BaseModel]) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        yield field.alias or name
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _keys(part)
