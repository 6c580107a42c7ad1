"""`lora status -s STACK`: how the pods of a stack stand, at a glance. Changes nothing anywhere."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from components.cli.pods import Reached, ask_pods, stack_settings
from components.core.errors import printable
from components.core.sizes import shown_size

SECONDS = 20.0
HEADINGS = ("pod", "at", "unit", "since", "vLLM", "GPU", "disk")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Ask every pod of a stack how it stands, all at the same time: the unit and since when, the ids it serves, GPU "
        "and disk, and what is not as the last activation left it. Of adapters only the sizes are looked at; `pulumi "
        "refresh` reads them. What the stack file says and was not deployed yet is no drift."
    )
    parser.epilog = (
        "The addresses come from the stack file (of EC2 instances from pulumi's state), and the key that opens hosts "
        "and instances from the stack file through `pulumi config get`, or from --identity. Exit codes: 0 all is well, "
        "1 a pod drifted or cannot be reached, 2 wrong usage."
    )
    parser.add_argument("-s", "--stack", required=True, help="the stack's name: that of stacks/Pulumi.STACK.yaml")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--identity", metavar="FILE", help="the private key that opens the pods")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=_seconds, default=SECONDS, help="for each pod to answer (default: 20)"
    )


def run(args: argparse.Namespace) -> int:
    settings = stack_settings(args.stack)
    reached = ask_pods(args.stack, settings.pods, settings.running, args.identity, args.timeout, "status")
    if args.json:
        print(json.dumps({"stack": args.stack, "pods": [_document(pod) for pod in reached]}, indent=2))
    else:
        _show(reached)
    return 0 if all(_is_well(pod) for pod in reached) else 1


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError("must be a number of seconds, up to 3600")
    return seconds


def _engine(pod: Reached) -> Mapping[str, Any] | None:
    """What the pod says of this stack's engine; one machine may have those of other stacks as well."""
    engines = pod.answer.get("engines")
    for engine in engines if isinstance(engines, list) else []:
        if isinstance(engine, dict) and engine.get("engine") == pod.engine:
            return engine
    return None


def _drift(pod: Reached) -> dict[str, str]:
    engine = _engine(pod)
    if engine is None:
        return {"engine": "is not on this pod"}
    found = engine.get("drift")
    return {str(what): str(how) for what, how in found.items()} if isinstance(found, dict) else {}


def _is_well(pod: Reached) -> bool:
    return pod.off or not (pod.fault or _drift(pod))


def _document(pod: Reached) -> dict[str, Any]:
    return {
        "base": pod.base,
        "at": pod.at,
        "switchedOff": pod.off,
        "reachable": not (pod.fault or pod.off),
        "fault": pod.fault or None,
        "machineId": pod.answer.get("machineId"),
        "engine": _engine(pod),
        "drift": {} if pod.fault or pod.off else _drift(pod),
        "gpus": pod.answer.get("gpus"),
        "disk": pod.answer.get("disk"),
    }


def _show(reached: Sequence[Reached]) -> None:
    rows = {pod.base: _row(pod) for pod in reached if not (pod.fault or pod.off)}
    table = [HEADINGS, *rows.values()] if rows else []
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADINGS))] if rows else []

    def line(row: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    if rows:
        print(line(HEADINGS))
    for pod in reached:
        if pod.off:
            print(f"{printable(pod.base)}  is switched off (lora-pods:running is false)")
        elif pod.fault:
            print(f"{printable(pod.base)}  NOT REACHED: {printable(pod.fault, 500)}")
        else:
            print(line(rows[pod.base]))
            for detail in _details(pod):
                print(f"  {detail}")


def _row(pod: Reached) -> tuple[str, ...]:
    engine, disk, gpus = _engine(pod) or {}, pod.answer.get("disk"), pod.answer.get("gpus")
    return tuple(
        printable(cell)
        for cell in (
            pod.base,
            pod.at,
            engine.get("state") or "-",
            _since(engine.get("since")),
            engine.get("vllm") or "-",
            ", ".join(map(_gpu, gpus if isinstance(gpus, list) else [])) or "-",
            _disk(disk if isinstance(disk, dict) else {}),
        )
    )


def _details(pod: Reached) -> Iterator[str]:
    models = (_engine(pod) or {}).get("models")
    if models and isinstance(models, list):
        yield "serves " + ", ".join(map(printable, models))
    for what, how in sorted(_drift(pod).items()):
        yield f"DRIFT {printable(what)}: {printable(how, 500)}"


def _gpu(gpu: Any) -> str:
    if not isinstance(gpu, dict):
        return str(gpu)
    used, total = _number(gpu.get("usedMiB")), _number(gpu.get("totalMiB"))
    memory = f" {used / 1024:.1f}/{total / 1024:.1f} GiB" if used is not None and total is not None else ""
    return f"{gpu.get('name')}{memory}"


def _disk(disk: Mapping[str, Any]) -> str:
    free, total = _number(disk.get("freeBytes")), _number(disk.get("totalBytes"))
    return "-" if free is None or total is None else f"{shown_size(free)} of {shown_size(total)} free"


def _number(value: Any) -> float | None:
    """A pod may answer anything."""
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:
        return None


def _since(moment: Any) -> str:
    since = _number(moment)
    if since is None:
        return "-"
    seconds = max(0, time.time() - since)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"
