"""How a preview in which nothing changed grows with the number of adapters, and the program's memory with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.support.bare import bare_program, kinds_of
from bench.support.machine import version_of
from bench.support.options import Options
from bench.support.processes import PeakMemory
from bench.support.site import UNPROVEN, Site, site
from bench.support.table import Figure, Goal, Row, Table
from bench.support.timing import in_turn, tell
from tests.support.adapters import seeded_adapter

IMAGES = ("standin",)
PROGRAM, PROVIDER = "pulumi-language-python-exec", "pulumi.dynamic"


def run(options: Options) -> Table:
    counts = (10, 30, 100) if options.quick else (10, 100, 300, 1000)
    table = Table(
        "A preview of many adapters",
        "`pulumi preview`, nothing changed, of a stack with so many small adapters on one pod, against that of a bare "
        "program with as many dynamic resources without any input. Linear means: each further adapter takes as long as "
        "those before it. The memory is the peak of the program's process.",
        versions={"pulumi": version_of(["pulumi", "version"])},
    )
    ours: dict[int, Figure] = {}
    theirs: dict[int, Figure] = {}
    with site() as here:
        # What is written after every resource is of no use to what is measured here.
        here.stack.checkout.environment |= {"PULUMI_EXPERIMENTAL": "1", "PULUMI_SKIP_CHECKPOINTS": "true"}
        for count in counts:
            resources = deploy(here, count)
            bare = bare_program(here, f"bare-{count}", {"dynamic": resources})
            tell(f"previews of {count} adapters ({resources} resources)")
            ours[count], theirs[count] = in_turn(options.repeat, here.preview, bare.preview)
            last = count == counts[-1]
            what = f"preview, nothing changed, {count} small adapters"
            table.add(
                Row(
                    what,
                    ours[count],
                    f"{resources} empty resources",
                    theirs[count],
                    Goal(at_most=1.3) if last else None,
                )
            )
        with PeakMemory([PROGRAM, PROVIDER], here.stack.checkout.root) as peak:
            here.preview()
    megabytes = Figure([peak.bytes[PROGRAM] / 1e6], "MB")
    beyond, before = counts[-2:], counts[-3:-1]
    table.add(
        Row(f"for each adapter beyond {counts[-2]}", growth(ours, *beyond),
            f"for each up to {counts[-2]}", growth(ours, *before), Goal(at_most=1.2)),
        Row(f"for each adapter beyond {counts[-2]}", growth(ours, *beyond),
            "for each empty resource", growth(theirs, *beyond)),
        Row("an empty resource, beyond", growth(theirs, *beyond), f"up to {counts[-2]}", growth(theirs, *before)),
        Row(f"the program's peak memory, {counts[-1]} adapters", megabytes, goal=Goal(at_most=400, of="alone")),
        Row("the dynamic providers' peak memory", Figure([peak.bytes[PROVIDER] / 1e6], "MB")),
    )  # fmt: skip
    return table


def growth(seconds: Mapping[int, Figure], fewer: int, more: int) -> Figure:
    """Milliseconds for each adapter between two numbers of them."""
    return Figure([1000 * (seconds[more].median - seconds[fewer].median) / (more - fewer)], "ms")


def deploy(here: Site, count: int) -> int:
    """Bring so many adapters up; return how many resources the stack has then."""
    adapters: dict[str, Path] = {}
    for number in range(count):
        model = f"client-{number:04}"
        adapters[model] = here.work / "adapters" / model
        if not adapters[model].exists():
            seeded_adapter(adapters[model], seed=number)
    tell(f"up with {count} adapters")
    here.configure(adapters, engine={**UNPROVEN, "probe": False})
    here.up()
    return kinds_of(here.stack.export()).total()
