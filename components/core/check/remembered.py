"""What was found in adapters before: an adapter that has not changed is not opened to be checked again.

A finding is remembered for the adapter's digest and for what it was checked against.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path

from components.core.adapter_files import real_directory, shown_path
from components.core.check.adapter_check import Against, around, check_adapter, check_files, placed
from components.core.digest_cache import BundleFacts, DigestCache, Sight, look, look_or_error, sources_digest
from components.core.errors import UserError
from components.core.findings import FaultError, Finding

CORE = Path(__file__).parents[1]


def check_all(
    digests: DigestCache, items: Sequence[tuple[Path, BundleFacts | UserError, Against]]
) -> list[list[Finding]]:
    """What is found in many adapters, each list sorted, in the same order; known ones are not opened.

    Args:
        digests: where the findings are remembered too.
        items: a directory, what `digests.describe_all` said of it, and what it is to be served by.
    """
    questions = [
        (path, _question(facts, against), facts.digest, against)
        for path, facts, against in items
        if isinstance(facts, BundleFacts)
    ]
    remembered = digests.memory.recall(_rules(), {question: "" for _, question, _, _ in questions})
    known = {question: _from_json(text) for question, text in remembered.items()}
    _find_anew(digests, [each for each in questions if each[1] not in known], known)
    return [
        _live(path, facts, against)
        if isinstance(facts, UserError)
        else _with_surroundings(path, known[_question(facts, against)])
        for path, facts, against in items
    ]


def _find_anew(
    digests: DigestCache, strangers: Sequence[tuple[Path, str, str, Against]], known: dict[str, list[Finding]]
) -> None:
    """Reads adapters, adds what is found to `known`, and remembers it where it is sure to last."""
    sights = {path: sight for path, *_ in strangers if isinstance(sight := look_or_error(path), Sight)}
    described = digests.recall(list(sights.values()))
    lasting = {}
    for path, question, digest, against in strangers:
        try:
            before = sights[path] if path in sights else look(path)
            known[question] = check_files(before.files, against)
        except FaultError as error:
            known[question] = [error.finding]
            continue
        facts = described.get(before.key)
        # Only if what was read is what has the digest.
        if facts and facts.digest == digest and look_or_error(path) == before:
            lasting[question] = ("", _to_json(known[question]))
    digests.memory.remember(_rules(), lasting)


@cache
def _rules() -> str:
    """The rules findings were found by: all of core, since a check takes only milliseconds."""
    return sources_digest(sorted(path.relative_to(CORE).as_posix() for path in CORE.rglob("*.py")))


def _question(facts: BundleFacts, against: Against) -> str:
    base_digest = against.base_model and against.base_model.digest
    return json.dumps([facts.digest, against.base, base_digest, against.vllm, against.lora_target_modules])


def _to_json(findings: Iterable[Finding]) -> str:
    return json.dumps([astuple(finding) for finding in findings])


def _from_json(text: str) -> list[Finding]:
    return [Finding(*fields) for fields in json.loads(text)]


def _with_surroundings(directory: Path, contents: Sequence[Finding]) -> list[Finding]:
    """What the files say, and what lies beside them now: looking at names is not opening anything."""
    try:
        return placed([*around(real_directory(directory)), *contents], directory)
    except FaultError as error:
        return [error.finding]


def _live(directory: Path, error: UserError, against: Against) -> list[Finding]:
    """What is wrong with an adapter that has no digest."""
    found = check_adapter(directory, against)
    if any(finding.severity == "error" for finding in found):
        return found
    if isinstance(error, FaultError):
        return [error.finding]
    return [
        Finding(shown_path(directory), "error", "unreadable", "", str(error).removeprefix(f"{shown_path(directory)}: "))
    ]
