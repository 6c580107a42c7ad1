from __future__ import annotations

from collections.abc import Iterator

import pytest

from components.core.meter import Meter, paced

MIB = 1024**2


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def said() -> list[str]:
    return []


def test_the_lines_of_an_upload(clock: Clock, said: list[str]) -> None:
    meter = Meter("uploading", 2, 320 * MIB, said.append, clock)
    for name in ("acme-v1", "acme-v2"):
        meter.begin(name)
        for _ in range(16):
            clock.now += 0.25
            meter.add(10 * MIB)
    meter.end("uploaded")
    assert said == [
        "uploading acme-v1 (1 of 2): 40.0 MiB of 320.0 MiB, 40.0 MiB/s",
        "uploading acme-v1 (1 of 2): 80.0 MiB of 320.0 MiB, 40.0 MiB/s",
        "uploading acme-v1 (1 of 2): 120.0 MiB of 320.0 MiB, 40.0 MiB/s",
        "uploading acme-v1 (1 of 2): 160.0 MiB of 320.0 MiB, 40.0 MiB/s",
        "uploading acme-v2 (2 of 2): 200.0 MiB of 320.0 MiB, 40.0 MiB/s",
        "uploading acme-v2 (2 of 2): 240.0 MiB of 320.0 MiB, 40.0 MiB/s",
        "uploading acme-v2 (2 of 2): 280.0 MiB of 320.0 MiB, 40.0 MiB/s",
        "uploading acme-v2 (2 of 2): 320.0 MiB of 320.0 MiB, 40.0 MiB/s",
        "uploaded 320.0 MiB in 8 s",
    ]


def test_short_work_says_nothing(clock: Clock, said: list[str]) -> None:
    meter = Meter("hashing", 1, 8 * MIB, said.append, clock)
    meter.begin("a")
    for _ in range(8):
        clock.now += 0.12
        meter.add(MIB)
    meter.end("hashed")
    assert said == []


def test_no_more_than_a_line_a_second(clock: Clock, said: list[str]) -> None:
    meter = Meter("hashing", 1, 10_000, said.append, clock)
    meter.begin("a")
    for _ in range(10_000):
        clock.now += 0.001
        meter.add(1)
    assert len(said) in (9, 10)  # the sum of a thousandth is no round second


def test_bytes_that_are_read_twice_are_not_more_than_there_are(clock: Clock, said: list[str]) -> None:
    meter = Meter("uploading", 1, MIB, said.append, clock)
    for _ in range(2):
        meter.begin("a")
        clock.now += 1
        meter.add(MIB)
    assert said == ["uploading a: 1.0 MiB of 1.0 MiB, 1.0 MiB/s", "uploading a: 1.0 MiB of 1.0 MiB, 1.0 MiB/s"]


def test_a_name_steers_no_terminal(clock: Clock, said: list[str]) -> None:
    meter = Meter("hashing", 1, 2, said.append, clock)
    meter.begin("a\x1b[2J")
    clock.now += 1
    meter.add(1)
    assert said == ["hashing a\\x1b[2J: 1 bytes of 2 bytes, 1 bytes/s"]


def test_chunks_are_counted_once_they_are_gone(clock: Clock, said: list[str]) -> None:
    def chunks() -> Iterator[memoryview]:
        for _ in range(2):
            clock.now += 1
            yield memoryview(b"x" * 1024)

    meter = Meter("uploading", 1, 2048, said.append, clock)
    taken = meter.through("a", chunks())
    assert (len(next(taken)), said) == (1024, [])
    next(taken)
    assert said == ["uploading a: 1.0 KiB of 2.0 KiB, 1.0 KiB/s"]


def test_what_is_heard_is_passed_on_at_most_once_a_second(clock: Clock, said: list[str]) -> None:
    say = paced(said.append, clock)
    assert say is not None
    for number in range(40):
        say(f"line {number}")
        clock.now += 0.125
    assert said == ["line 0", "line 8", "line 16", "line 24", "line 32"]


def test_nobody_is_told(clock: Clock) -> None:
    meter = Meter("hashing", 1, 2, None, clock)
    meter.begin("a")
    clock.now += 9
    meter.add(2)
    meter.end("hashed")
    assert paced(None) is None
