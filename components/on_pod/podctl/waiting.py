"""How often is looked while something is waited for, and whether anybody still waits."""

from __future__ import annotations

PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # before a store is asked again
POLL_SECONDS = 0.5  # at most: what begins a moment ago is looked at more often
SAY_SECONDS = 10.0  # between two lines of progress
SAY_AT_LAST_SECONDS = 60.0  # the same, where it takes long: a log keeps each of them


def poll_of(waited: float) -> float:
    """How long until the next look, after so many seconds: nothing is noticed much later than it took."""
    return min(POLL_SECONDS, max(0.02, waited / 20))


def pause_of(waited: float) -> float:
    """How long until the next line of progress, after so many seconds."""
    return min(max(SAY_SECONDS, waited / 4), SAY_AT_LAST_SECONDS)


def deserted() -> bool:
    """Whether whoever started this has gone away: sshd closes its end of stderr when a connection is over."""
    import select

    poll = select.poll()
    poll.register(2, 0)
    return bool(poll.poll(0))
