"""A few rounds of `./dev chaos`, always the same ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import play
from tests.chaos.report import table
from tests.chaos.schedule import schedule

pytestmark = pytest.mark.pod

# What takes least time, and each way of killing. All are looked at as they were left, one is given up.
SEED = 2
CHANGES = ("retrained", "flag", "API key", "bad")
MET = ("pulumi and all it started", "podctl", "the pod", "the SSH sessions")


def test_some_rounds(tmp_path: Path) -> None:
    outcomes = play(schedule(SEED, len(MET), MET, CHANGES), tmp_path, thorough=False)

    print(table(outcomes))
    assert [str(outcome) for outcome in outcomes if outcome.faults or not outcome.converged] == []
    assert all(outcome.told.asked > 10 for outcome in outcomes), "the client asked all the while"
    assert {outcome.round.fault for outcome in outcomes} == set(MET)
