"""`lora check PATH…`: the check of adapters on its own, for a person, a script or a pre-commit hook."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from components.core.adapter_files import (
    CONFIG_NAME,
    OTHER_WEIGHTS_NAMES,
    WEIGHTS_NAME,
    is_directory,
    is_plain_file,
    shown_path,
)
from components.core.check.adapter_check import Against, check_adapter
from components.core.check.base_model import read_base_model
from components.core.errors import UserError
from components.core.findings import Finding
from components.core.vllm_loader import version_warning

FILES = (CONFIG_NAME, WEIGHTS_NAME, *OTHER_WEIGHTS_NAMES)
WORDS = {"error": "1;31", "warning": "1;33", "ok": "32"}
LABEL = max(map(len, WORDS)) + 2
INDENT = "  "
NARROWEST = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check PEFT adapters: everything vLLM's LoRA loader would refuse, and what it would load and serve wrongly. "
        "Reads the config and the header of the weights, never a tensor. Exits with 1 if there are errors."
    )
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help=f"an adapter's directory, or the {CONFIG_NAME} or {WEIGHTS_NAME} in it"
    )
    parser.add_argument(
        "--base-config",
        metavar="FILE",
        help="the base's config.json: whether the base has what an adapter names",
    )
    parser.add_argument("--base", metavar="NAME", help="the base that will serve them, as the stack file names it")
    parser.add_argument("--vllm", metavar="VERSION", help="the vLLM that will serve them; the newest known if left out")
    parser.add_argument("--json", action="store_true", help="print a list of findings instead of the table")


def run(args: argparse.Namespace) -> int:
    """0: no errors; 1: errors. Raises UserError for what is no adapter's path, and for a base that cannot be read."""
    adapters = adapter_directories(args.paths)
    against = Against(
        base=args.base,
        base_model=read_base_model(Path(args.base_config)) if args.base_config is not None else None,
        vllm=args.vllm,
    )
    doubt = version_warning(args.vllm)
    if doubt:
        print(f"lora: {doubt}", file=sys.stderr)
    findings = check_all(adapters, against)
    if args.json:
        print(json.dumps([_as_json(finding) for found in findings for finding in found], indent=2))
    else:
        for line in table(adapters, findings, _width(), _colours()):
            print(line)
    return 1 if any(finding.severity == "error" for found in findings for finding in found) else 0


def adapter_directories(paths: Sequence[str]) -> list[Path]:
    """The directories meant, each once, in the order given; a hook names the files of an adapter one by one."""
    found: dict[Path, Path] = {}
    for text in paths:
        path = Path(text)
        if path.name in FILES and not is_directory(path):
            path = path.parent
        elif is_plain_file(path):
            raise UserError(f"{shown_path(path)}: name an adapter's directory, or the {CONFIG_NAME} in it")
        found.setdefault(path.absolute(), path)
    return list(found.values())


def check_all(adapters: Sequence[Path], against: Against) -> list[list[Finding]]:
    """The findings of each, in the same order."""
    return [check_adapter(adapter, against) for adapter in adapters]


def table(
    adapters: Sequence[Path], findings: Sequence[Sequence[Finding]], width: int, colours: bool = False
) -> Iterator[str]:
    """One line per adapter, its findings beneath, and the counts; a finding told before refers to where it was."""
    told: dict[tuple[str, ...], str] = {}
    verdicts = {"ok": 0, "warning": 0, "error": 0}
    for adapter, found in zip(adapters, findings, strict=True):
        verdict = min((finding.severity for finding in found), default="ok")
        verdicts[verdict] += 1
        place = shown_path(adapter)
        yield _label(verdict, colours) + place
        for finding in found:
            where = ": ".join(filter(None, (_inside(finding.path, place), finding.subject)))
            key = (where, finding.severity, finding.rule, finding.message)
            first = told.setdefault(key, place)
            text = finding.message if first == place else f"the same as in {first}"
            body = f"{where}: {text}" if where else text
            lines = textwrap.wrap(body, max(width, NARROWEST) - len(INDENT) - LABEL, break_long_words=False)
            for number, line in enumerate(lines):
                yield INDENT + (" " * LABEL if number else _label(finding.severity, colours)) + line
    yield _counts(verdicts)


def _as_json(finding: Finding) -> Mapping[str, str]:
    return {
        "path": finding.path,
        "severity": finding.severity,
        "rule": finding.rule,
        "subject": finding.subject,
        "message": finding.message,
    }


def _inside(path: str, place: str) -> str:
    """The file's name where it lies in the adapter's directory, which stands above it; the whole path otherwise."""
    return "" if path == place else path.removeprefix(f"{place}/")


def _counts(verdicts: Mapping[str, int]) -> str:
    total = sum(verdicts.values())
    parts = [
        f"{verdicts[verdict]} {words}"
        for verdict, words in (("error", "with errors"), ("warning", "with warnings only"), ("ok", "ok"))
        if verdicts[verdict]
    ]
    return f"{total} adapter{'' if total == 1 else 's'}: {', '.join(parts)}"


def _label(word: str, colours: bool) -> str:
    return (f"\x1b[{WORDS[word]}m{word}\x1b[0m" if colours else word) + " " * (LABEL - len(word))


def _colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _width() -> int:
    return shutil.get_terminal_size().columns
