"""A preview in which nothing changed, of adapters of 160 MB, and what it reads of their weights."""

from __future__ import annotations

from bench.support.bare import bare_program, kinds_of
from bench.support.machine import version_of
from bench.support.options import Options
from bench.support.processes import bytes_read
from bench.support.site import Site, adapters_of, site
from bench.support.table import Figure, Goal, Row, Table
from bench.support.timing import in_turn, tell

IMAGES = ("standin",)


def run(options: Options) -> Table:
    count = options.large_adapters
    with site() as here:
        adapters = adapters_of(here.work / "adapters", count)
        here.configure(adapters)
        tell("the first up")
        here.up()
        kinds = kinds_of(here.stack.export())
        bare = bare_program(here, "bare", kinds)
        empty = bare_program(here, "empty", {})
        tell("previews")
        ours, theirs, floor = in_turn(options.repeat, here.preview, bare.preview, empty.preview)
        read = weights_read(here)
    declared = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    what = f"preview, nothing changed, {count} adapters of 160 MB"
    table = Table(
        "A preview in which nothing changed",
        f"`pulumi preview` of a stack with {count} adapters of 160 MB on one pod, "
        f"against that of a bare program with as many resources of the same kinds ({declared}), which does nothing "
        "but declare them, and of a program without any. The weights read are counted by strace, over pulumi and "
        "all that it starts.",
        versions={"pulumi": version_of(["pulumi", "version"])},
    )
    table.add(
        Row(what, ours, "a bare program", theirs, Goal(at_most=1.15)),
        Row(what, ours, "an empty program", floor),
        Row("weights read meanwhile", Figure([read], "bytes"), goal=Goal(at_most=0, of="alone")),
    )
    return table


def weights_read(here: Site) -> int:
    """The bytes of all weights that a preview reads."""
    checkout, stack = here.stack.checkout, here.stack.name
    weights = sorted((here.work / "adapters").glob("*/adapter_model.safetensors"))
    program = checkout.root / "__main__.py"
    words = ["pulumi", "preview", "--stack", stack, "--expect-no-changes", "--non-interactive"]
    read = bytes_read(words, [program, *weights], checkout.root, checkout.environment, here.work / "trace")
    if not read[str(program.resolve())]:
        raise RuntimeError("the trace does not reach into the program, so that it says nothing")
    return sum(read[str(file.resolve())] for file in weights)
