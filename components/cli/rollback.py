"""`lora rollback -s STACK --base BASE`: puts back what an engine served before its last activation, at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from components.cli.pods import Reached, ask_pods, stack_settings
from components.cli.pulumi_cli import ask_pulumi
from components.core.errors import UserError, printable
from components.core.listing import listed
from components.core.lock import short_digest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Put back what the engine of a base served before its last activation, with the secrets of that time, and "
        "prove it as `pulumi up` does; if it does not serve, what served until now comes back. Nothing is sent. The "
        "stack file is not changed: it asks for what was rolled back, and the next `pulumi preview` says so."
    )
    parser.add_argument("-s", "--stack", required=True, help="the stack's name: that of stacks/Pulumi.STACK.yaml")
    parser.add_argument("--base", required=True, help="the base whose engine goes back, as the stack file names it")
    parser.add_argument("--identity", metavar="FILE", help="the private key that opens the pod")


def run(args: argparse.Namespace) -> int:
    """0: what was before serves again; 1: it does not, and what served goes on.

    Raises UserError for a stack or a base that there is not.
    """
    settings = stack_settings(args.stack)
    chosen = [pod for pod in settings.pods if pod.base == args.base]
    if not chosen:
        bases = listed(sorted(printable(pod.base) for pod in settings.pods))
        raise UserError(f"--base {printable(args.base)}: no pod of this stack serves it; its bases: {bases}")
    (pod,) = ask_pods(args.stack, chosen, settings.running, args.identity, None, "rollback", engine_argument=True)
    if pod.off or pod.fault:
        print(pod.fault or f"the pod of {printable(pod.base)} is switched off", file=sys.stderr)
        return 1
    for line in _told(pod):
        print(line)
    _record(args.stack, pod)
    return 0


def _told(pod: Reached) -> Iterator[str]:
    now, before = _models(pod.answer, "models"), _models(pod.answer, "before")
    yield f"{printable(pod.base)} on {pod.at} serves again what it served before:"
    for model in sorted({*now, *before}):
        name = printable(model)
        if model not in now:
            yield f"  - {name}  was {_shown(before[model])}"
        elif model not in before:
            yield f"  + {name}  {_shown(now[model])}"
        elif now[model] != before[model]:
            yield f"  ~ {name}  {_shown(now[model])}, was {_shown(before[model])}"
        else:
            yield f"    {name}  {_shown(now[model])}"
    if now and now == before:
        yield (
            "No model is another one now: the last activation changed flags or secrets. To go further back: "
            "`git revert`, then `pulumi up`."
        )


def _models(answer: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = answer.get(key)
    return found if isinstance(found, dict) else {}


def _shown(digest: Any) -> str:
    return short_digest(printable(digest)) if digest else "(the base)"


def _record(stack: str, pod: Reached) -> None:
    """Lets the state know, so that a preview without a refresh shows it."""
    print(
        f"The stack file of {stack} differs from that now: the next `pulumi up` brings back what was rolled back. To "
        "stay, change the stack file first (`git revert`); then `pulumi up` sends nothing and restarts nothing."
    )
    try:
        ask_pulumi(
            *("refresh", "--yes", "--skip-preview", "--stack", stack),
            *("--target", f"**ReachedPod::{pod.base}-reach"),
            to_ask_for="a refresh of the state",
        )
        print("`pulumi preview --diff` shows the difference.")
    except UserError as error:
        print(
            f"warning: the state does not know of it, and a preview without --refresh shows nothing: {error}; run "
            f"`pulumi refresh --stack {stack}`",
            file=sys.stderr,
        )
