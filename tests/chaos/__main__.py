"""`./dev chaos`: many an `up` killed at a random moment, and what came of each."""

from __future__ import annotations

import argparse
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.chaos.report import table
from tests.chaos.schedule import CHANGES, FAULTS, Round, first, schedule
from tests.chaos.world import Outcome, World
from tests.support.machines import ROOT


def play(rounds: Sequence[Round], directory: Path, thorough: bool = True) -> list[Outcome]:
    """All rounds, on a pod of their own; each is told as it ends.

    A thorough run measures an `up` that changes a flag, the others the very first one, which takes longer.
    """
    declared = first(rounds)
    world = World(directory, replace(declared, max_model_len=256) if thorough else declared)
    try:
        began = time.monotonic()
        world.client.stack.up()
        if thorough:
            world.declare(declared)
            began = time.monotonic()
            world.client.stack.up()
        usual = time.monotonic() - began
        print(f"an `up` that nothing breaks takes {usual:.1f} s here", flush=True)
        outcomes = []
        for planned in rounds:
            outcomes.append(world.play(planned, usual))
            print(outcomes[-1], flush=True)
        world.client.stack.destroy()
        left = world.machine.run("ls", "-A", ROOT, check=False)
        if left:
            outcomes[-1].faults.append(f"destroy leaves {left.split()}")
        return outcomes
    finally:
        world.close()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--rounds", type=int, default=72)
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="these alone")
    parser.add_argument("--change", action="append", choices=list(CHANGES), help="these alone")
    parser.add_argument("--plan", action="store_true", help="print what would be done, and do nothing")
    given = parser.parse_args(argv)
    rounds = schedule(given.seed, given.rounds, given.fault or (), given.change or ())
    if given.plan:
        print(*rounds, sep="\n")
        return 0
    version = subprocess.run(["pulumi", "version"], capture_output=True, text=True, check=True).stdout.strip()
    print(f"seed {given.seed}, {given.rounds} rounds; pulumi {version}, Python {platform.python_version()}", flush=True)
    # Who starts this in the background has SIGINT ignored, by all that this starts as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A pod and what runs on this machine are to go with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lora-pods-chaos-") as directory:
        outcomes = play(rounds, Path(directory))
    print()
    print(table(outcomes))
    met = sum(outcome.hit for outcome in outcomes)
    print(f"\n{met} of {len(outcomes)} met their fault; the others had ended before")
    faults = sum(len(outcome.faults) for outcome in outcomes)
    again = f"again with: ./dev chaos --seed {given.seed} --rounds {given.rounds}"
    print(f"{faults} faults found in {time.monotonic() - began:.0f} s; {again}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
