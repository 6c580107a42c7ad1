"""What holds for many models is said once, naming them: a block that stays readable however many models there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from components.core.adapter_files import CONFIG_NAME, WEIGHTS_NAME
from components.core.errors import printable
from components.core.findings import Finding, Severity
from components.core.listing import item_number, listed, shared_place


@dataclass(frozen=True)
class Checked:
    """One model's findings. `place` is where it stands in the stack file: `models[2]`."""

    model: str
    place: str
    findings: Sequence[Finding]


def told_once(checked: Iterable[Checked], severity: Severity) -> list[str]:
    """The findings of one severity, in the order of the first model that each holds for."""
    groups: dict[tuple[str, str, str, str], list[tuple[Checked, Finding]]] = {}
    for one in sorted(checked, key=lambda one: item_number(one.place)):
        for finding in one.findings:
            if finding.severity == severity:
                key = (finding.rule, _file(finding), finding.subject, finding.message)
                groups.setdefault(key, []).append((one, finding))
    return [_line(found) for found in groups.values()]


def _file(finding: Finding) -> str:
    """The file's name, which all adapters share; nothing for a finding about the directory."""
    name = finding.path.rpartition("/")[2]
    return name if name in (CONFIG_NAME, WEIGHTS_NAME) else ""


def _line(found: Sequence[tuple[Checked, Finding]]) -> str:
    one, finding = found[0]
    if len(found) == 1 and not _file(finding):
        return f"{one.place}.adapter: {printable(one.model)}: {finding}"
    where = f"{shared_place(each.place for each, _ in found)}.adapter"
    models = listed([printable(each.model) for each, _ in found])
    return ": ".join(filter(None, (where, models, _file(finding), finding.subject, finding.message)))
