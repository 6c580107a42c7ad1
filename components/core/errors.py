"""The one error a user is meant to read, and the one function that makes foreign text fit to be shown."""

from collections.abc import Sequence

SHOWN_CHARACTERS = 200
LONGEST_LINE = 10_000


class UserError(Exception):
    """A fault the user can mend. ``str(error)`` is the whole sentence: what, where, what to do."""

    @property
    def sentences(self) -> tuple[str, ...]:
        return (str(self),)


class UserErrors(UserError):
    """Several faults of one thing, found together: a sentence each."""

    def __init__(self, sentences: Sequence[str]) -> None:
        super().__init__("\n".join(sentences))
        self._sentences = tuple(sentences)

    @property
    def sentences(self) -> tuple[str, ...]:
        return self._sentences


def printable(text: object, limit: int = SHOWN_CHARACTERS) -> str:
    r"""Text from outside (a file name, a JSON key, a log line) as one line that no terminal acts upon.

    Whatever is not printable (newlines, escape codes, bidirectional marks, undecodable bytes) is written as
    a backslash escape; more than ``limit`` characters are cut off with an ellipsis.
    """
    shown = str(text)
    cut = shown[:limit]
    safe = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in cut)
    return safe if len(shown) <= limit else safe + "…"


def printable_text(text: object) -> str:
    """The same of a whole text whose lines stay lines: for where it leaves for a terminal, whoever put it together."""
    return "\n".join(printable(line, LONGEST_LINE) for line in str(text).split("\n"))


def os_reason(error: OSError) -> str:
    """Why the system refused, in its own words and without the path: "permission denied"."""
    return (error.strerror or type(error).__name__).lower()
