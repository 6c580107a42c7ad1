"""The check's verdict in one word, for the base of adapter_cases or another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from components.core.check.adapter_check import Against
from components.core.check.base_model import base_model_of
from components.core.findings import Finding
from tests.support.adapter_cases import BASE_CONFIG, BASE_NAME, Outcome
from tests.support.adapters import Json


def against(config: Mapping[str, Json] = BASE_CONFIG, vllm: str = "0.32.0", base: str = BASE_NAME) -> Against:
    architectures = config["architectures"]
    assert isinstance(architectures, list)
    return Against(base, base_model_of(config, str(architectures[0]), "0" * 64), vllm)


HERE = against()


def outcome(found: Sequence[Finding]) -> Outcome:
    if any(finding.severity == "error" for finding in found):
        return "refuse"
    return "warn" if found else "accept"
