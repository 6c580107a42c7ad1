"""A first `up` over a link of 200 Mbit/s: how much of the link it uses, and what it sends again where it was cut."""

from __future__ import annotations

from bench.peers.scripts import Scp
from bench.support.link import Link
from bench.support.machine import version_of
from bench.support.options import Options
from bench.support.site import Site, adapters_of, site, total_size
from bench.support.table import Figure, Goal, Row, Table
from bench.support.timing import tell, timed
from bench.updates import engine_start

IMAGES = ("standin",)
MEGABITS = 200
CUT_AT = 0.6


def run(options: Options) -> Table:
    count = options.large_adapters
    ours, engine, theirs, again = [], [], [], []
    with site() as here, Link(here.machine.port(), MEGABITS) as link:
        adapters = adapters_of(here.work / "adapters", count)
        size = total_size(adapters)
        here.configure(adapters, port=link.port)
        scp = Scp(here, here.work / "adapters", here.work / "none")
        scp.port = link.port
        for number in range(options.repeat):
            tell(f"round {number + 1}: lora-pods")
            here.forget_digests()
            ours.append(timed(here.up))
            engine.append(engine_start(here))
            here.destroy()
            tell(f"round {number + 1}: scp")
            here.machine.run("mkdir", "-p", "/srv")
            theirs.append(timed(scp.run))
            scp.clear()
            tell(f"round {number + 1}: lora-pods, cut")
            again.append(sent_again(here, link, size))
            here.destroy()
    starts = Figure(engine, "s")
    seconds = Figure(ours, "s") - starts
    what = f"first up, {count} adapters of 160 MB, {MEGABITS} Mbit/s"
    table = Table(
        "A slow link",
        f"A first `pulumi up --yes --skip-preview` of {count} adapters of 160 MB through a TCP forwarder that lets "
        f"{MEGABITS} Mbit/s pass, from its start to its end without the engine's own start, against `scp` of the same "
        f"bytes through it. Then the forwarder breaks all connections once {CUT_AT:.0%} of the bytes are through; what "
        "the next `up` sends is counted there.",
        versions={"pulumi": version_of(["pulumi", "version"]), "OpenSSH": version_of(["ssh", "-V"])},
    )
    table.add(
        Row(what, rate(seconds, size), "scp", rate(Figure(theirs, "s"), size), Goal(at_least=0.95)),
        Row("the same in seconds", seconds, "scp", Figure(theirs, "s")),
        Row("the engine's start, taken off above", starts),
        Row(f"sent by the next up after a cut at {CUT_AT:.0%}", Figure(again, "%"), goal=Goal(at_most=45, of="alone")),
    )
    return table


def rate(seconds: Figure, size: int) -> Figure:
    return Figure([8 * size / 1e6 / value for value in seconds.values], "Mbit/s")


def sent_again(here: Site, link: Link, size: int) -> float:
    """How many per cent of the adapters' bytes a second `up` sends, after the first was cut."""
    link.mend()
    link.cut_at(int(CUT_AT * size))
    try:
        here.up()
    except AssertionError:
        if not link.is_cut:
            raise
    else:
        raise RuntimeError("the link was cut, and `up` did not notice")
    link.mend()
    here.up()
    return 100 * link.sent / size
