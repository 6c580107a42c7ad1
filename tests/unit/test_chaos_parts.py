"""The parts of `./dev chaos` that need no pod: what is planned, and what counts as an answer that was lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.chaos.schedule import CHANGES, FAULTS, STEADY, Adapter, schedule
from tests.chaos.witness import EXITED, STOPPING, Asked, Serving, judged, servings
from tests.chaos.world import digest_in, halves, left_behind

UNIT, HEX = "lora-pods-x.service", "a" * 64
UNIT_TEXT = f"ExecStart=vllm --lora-modules m=/b/blobs/sha256/{HEX}\n[Install]\nWantedBy=multi-user.target\n"
WHOLE = {
    "unit": UNIT_TEXT,
    "refs": {"m": f'{{"digest": "sha256:{HEX}", "base": "b"}}\n'},
    "blobs": [HEX],
    "staging": [],
    "generations": {"x/3": {"proven": True, "blobs": [HEX]}},
    "verified": {"ok": [HEX], "rotten": [], "strays": []},
    "stagingAfterAWeek": [],
    "blobsAfterAWeek": [HEX],
    "hidden": [],
    "building": [],
}


PLAN = [
    "  1  bad       the pod killed at 66%",
    "  2  flag      pulumi and all it started killed 1.62 s into activate",
    "  3  retrained podctl killed 0.11 s into place, given up",
    "  4  SSH key   the engine killed 0.15 s into prepare",
]


def test_a_seed_stands_for_one_plan() -> None:
    assert schedule(1, 30) == schedule(1, 30)
    assert schedule(1, 30) != schedule(2, 30)
    # What a seed that was written down stands for stays so.
    assert [str(planned) for planned in schedule(7, 4)] == PLAN


def test_every_fault_and_change_comes_and_the_moments_cover_a_whole_up() -> None:
    rounds = schedule(3, 72)
    assert set(Counter(planned.fault for planned in rounds).values()) == {9}
    assert {planned.fault for planned in rounds} == set(FAULTS)
    # Where there is nothing to remove one is added, and the other way round.
    assert {planned.change for planned in rounds} == set(CHANGES)
    assert [int(moment * 72) for moment in sorted(planned.moment for planned in rounds)] == list(range(72))
    assert {planned.aim for planned in rounds} == {None, *(aim for aims in CHANGES.values() for aim in aims)}


def test_each_round_changes_what_the_one_before_left() -> None:
    rounds = schedule(4, 60)
    for planned, following in pairwise(rounds):
        assert (
            following.before
            == planned.end
            == (planned.before if planned.gives_up or planned.change == "bad" else planned.after)
        )
    for planned in rounds:
        assert planned.after != planned.before
        assert planned.before.adapters[STEADY] == planned.after.adapters[STEADY] == Adapter(0)
        assert any(adapter.bad for adapter in planned.after.adapters.values()) == (planned.change == "bad")
        assert not any(adapter.bad for adapter in planned.before.adapters.values())
        assert 2 <= len(planned.before.adapters) <= 5
        assert planned.aim is None or planned.aim in CHANGES[planned.change]


def entry(at: float, message: str = "", message_id: str = "", unit: str = UNIT, pid: int = 7) -> dict[str, object]:
    about = {"MESSAGE_ID": message_id, "UNIT": unit} if message_id else {"_SYSTEMD_UNIT": unit, "_PID": str(pid)}
    return {"__REALTIME_TIMESTAMP": str(int(at * 1e6)), "MESSAGE": message, **about}


LISTENS = "Uvicorn running on http://127.0.0.1:8000"


def test_an_engine_serves_from_when_it_listens_until_it_is_stopped_ends_or_is_killed() -> None:
    journal = [
        entry(1, "vLLM API server version 0.33.0"),
        entry(2, LISTENS, pid=7),
        entry(5, "Stopping", STOPPING),
        entry(7, LISTENS, pid=8),
        entry(9, "Main process exited", EXITED),
        entry(11, LISTENS, pid=9),
        entry(12, "Stopping", STOPPING, unit="another.service"),
        entry(13, LISTENS, unit="another.service"),
        entry(20, LISTENS, pid=10),
    ]
    assert servings(journal, [15.0], UNIT) == [
        Serving(2, 5, "7"),
        Serving(7, 9, "8"),
        Serving(11, 15, "9"),
        Serving(20, float("inf"), "10"),
    ]


SERVED = [Serving(10, 20, "7")]
RIGHT = {"m": ["old", "new"]}
ANSWERED = Asked(12, 12.1, "m", 200, "model=m weights=new prompt=hello")


@pytest.mark.parametrize(
    ("asked", "is_lost"),
    [
        (ANSWERED, False),
        (replace(ANSWERED, said="model=m weights=others prompt=hello"), True),
        (replace(ANSWERED, status=503, said="", engine="active 7"), True),
        (replace(ANSWERED, status=0, said="ConnectionRefusedError", engine="active 7"), True),
        # The journal's last lines went with the pod: systemd knows better.
        (replace(ANSWERED, status=0, said="ConnectionRefusedError", engine="deactivating 7"), False),
        (replace(ANSWERED, status=0, said="ConnectionRefusedError", engine="active 8"), False),
        # Not wholly within the time that it served.
        (replace(ANSWERED, began=9.9, status=0, engine="active 7"), False),
        (replace(ANSWERED, ended=19.95, status=0, engine="active 7"), False),
        (replace(ANSWERED, began=30, ended=31, status=0, engine="failed 0"), False),
    ],
)
def test_an_answer_that_counts_as_lost(asked: Asked, is_lost: bool) -> None:
    assert bool(judged(SERVED, [asked], RIGHT).lost) == is_lost


def test_what_is_whole_has_no_fault() -> None:
    assert list(halves(WHOLE)) == []
    assert list(left_behind(schedule(1, 1)[0], WHOLE)) == []


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"unit": UNIT_TEXT[:-20]}, "half a unit: it ends with "),
        ({"blobs": []}, "m refers to aaaaaaaaaaaa, which is not there"),
        ({"unit": UNIT_TEXT.replace(HEX, "b" * 64)}, "the unit refers to bbbbbbbbbbbb, which is not there"),
        ({"verified": {"failed": "no"}}, "podctl verify failed: no"),
        ({"verified": {"rotten": [HEX], "strays": []}}, f"rotten on the pod: {HEX}"),
        ({"verified": {"rotten": [], "strays": ["blobs/x"]}}, "strays on the pod: blobs/x"),
    ],
)
def test_a_half(found: dict[str, object], said: str) -> None:
    assert next(halves({**WHOLE, **found})).startswith(said)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"staging": [f"{HEX}.tar.part"]}, f"staging/{HEX}.tar.part"),
        ({"stagingAfterAWeek": ["b.tar"]}, "staging/b.tar, after a week"),
        ({"blobs": [HEX, "b" * 64]}, "blob bbbbbbbbbbbb"),
        ({"blobsAfterAWeek": [HEX, "b" * 64]}, "blob bbbbbbbbbbbb, after a week"),
        ({"hidden": [".lock"]}, ".lock"),
        ({"building": ["vllm-0.33.0.building"]}, "venvs/vllm-0.33.0.building"),
        ({"generations": {"x/3": {"proven": False, "blobs": []}}}, "generations {'x/3': "),
    ],
)
def test_something_left_behind(found: dict[str, object], told: str) -> None:
    planned = schedule(1, 1)[0]
    assert next(left_behind(planned, {**WHOLE, **found})).startswith(told)


def test_an_upload_that_was_given_up_may_lie_there() -> None:
    planned = replace(schedule(1, 1)[0], gives_up=True)
    given_up = {"staging": ["b" * 64 + ".x.claim"], "blobs": [HEX, "b" * 64]}
    assert list(left_behind(planned, {**WHOLE, **given_up})) == []
    assert list(left_behind(planned, {**WHOLE, "staging": ["b.tar.part", f"{HEX}.x.claim"]})) == []
    assert list(left_behind(planned, {**WHOLE, "staging": [f"{HEX}.tar"]})) == [f"staging/{HEX}.tar"]


def test_the_digest_in_a_reference() -> None:
    assert digest_in(WHOLE["refs"]["m"]) == HEX  # type: ignore[index]
