"""The check's verdict on every case of adapter_cases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from components.core.check.adapter_check import check_adapter
from tests.support.adapter_cases import CASES, SECTIONS, Case, Outcome
from tests.support.verdicts import HERE, outcome

# What each section's cases may be found guilty of, so that none is refused for another reason than its own.
RULES: Mapping[str, set[str]] = {
    "good": {"peft-type"},
    "r": {"missing-key", "not-json", "rank", "rank-too-large"},
    "alpha": {"alpha", "missing-key"},
    "patterns": {"alpha", "pattern", "rank", "rank-too-large"},
    "targets": {"layers-to-transform", "missing-key", "not-in-target-modules", "target-modules"},
    "init": {"init"},
    "unsupported": {
        *("alora", "bdlora", "bias", "bias-tensor", "classification-head", "dora", "full-weights", "layer-replication"),
        *("lora-bias", "modules-to-save", "qalora"),
    },
    "kinds": {
        *("missing-key", "not-a-language-model", "peft-type", "target-parameters", "trainable-tokens"),
        "unread-variant",
    },
    "bases": {"local-base", "quantised-sibling", "wrong-base"},
    "texts": {"byte-order-mark", "config-size", "duplicate-key", "not-json"},
    "files": {"chat-template", "link", "no-config", "no-weights", "not-a-file", "two-weights"},
    "weights": {"damaged", "lfs-pointer"},
    "names": {
        *("adapter-name", "full-weights", "layer-beyond", "module-name", "no-lora-tensors", "not-in-base"),
        *("not-in-target-modules", "not-lora", "repeated-prefix", "unknown-module", "unsupported-tensor"),
    },
    "shapes": {
        *(
            "dimensions",
            "dtype",
            "embedding-name",
            "empty-tensor",
            "half-a-pair",
            "not-in-target-modules",
            "rank",
            "ranks-differ",
        ),
        *("vocabulary", "width"),
    },
}


@pytest.mark.parametrize(
    ("section", "case"),
    [pytest.param(section, case, id=case.name) for section, cases in SECTIONS.items() for case in cases],
)
def test_a_case(tmp_path: Path, section: str, case: Case) -> None:
    directory = case.make(tmp_path)
    found = check_adapter(directory, HERE)
    assert outcome(found) == case.outcome
    assert {finding.rule for finding in found} <= RULES[section]
    for finding in found:
        assert finding.path.startswith(str(directory))
        assert str(finding).isprintable()
        assert len(finding.message) < 600


def test_whoever_knows_less_refuses_no_more(tmp_path: Path) -> None:
    order: list[Outcome] = ["accept", "warn", "refuse"]
    for case in CASES:
        found = outcome(check_adapter(case.make(tmp_path)))
        assert order.index(found) <= order.index(case.outcome), case.name


def test_every_case_has_a_name_and_a_directory_of_its_own(tmp_path: Path) -> None:
    assert len({case.name for case in CASES}) == len({case.make(tmp_path) for case in CASES}) == len(CASES)
