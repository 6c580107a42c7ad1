"""`up` three times: the first, one in which nothing changed, one with one adapter changed; and others' ways."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.peers.ansible import AnsibleCopy, AnsibleSynchronize
from bench.peers.peer import UNIT, Peer, without_our_places
from bench.peers.pyinfra import PyinfraSync
from bench.peers.scripts import RsyncChecksumScript, RsyncScript, Scp, ScpAes, offer_rsync
from bench.peers.venv import peers_venv
from bench.support.bare import bare_program, kinds_of
from bench.support.machine import version_of
from bench.support.options import Options
from bench.support.site import BASE, Site, adapters_of, replace_weights, site, total_size
from bench.support.table import Figure, Goal, Row, Table
from bench.support.timing import tell, timed

IMAGES = ("standin",)
FIRST, SAME, CHANGED = "first, all of them", "nothing changed", "one adapter changed"
READY = """systemctl restart "$0"; begin=$(date +%s%N)
until curl -fs -o /dev/null http://127.0.0.1:8000/v1/models; do sleep 0.02; done
echo $(($(date +%s%N) - begin))"""


def run(options: Options) -> Table:
    count = options.large_adapters
    with site() as here:
        adapters = adapters_of(here.work / "adapters", count)
        here.configure(adapters)
        tell("what the peers get")
        here.up()
        megabytes = total_size(adapters) / 1e6
        bare = bare_program(here, "bare", kinds_of(here.stack.export()))
        unit = unit_of(here)
        here.destroy()
        peers = peers_for(here, unit)
        scps: list[Scp] = [Scp(here, here.work / "adapters", unit), ScpAes(here, here.work / "adapters", unit)]
        ours: dict[str, list[float]] = {FIRST: [], SAME: [], CHANGED: [], "engine": [], "floor": []}
        theirs: dict[str, dict[str, list[float]]] = {peer.name: {FIRST: [], SAME: [], CHANGED: []} for peer in peers}
        copies: dict[str, list[float]] = {scp.name: [] for scp in scps}
        for number in range(options.repeat):
            tell(f"round {number + 1}: lora-pods")
            here.forget_digests()
            story(ours, here.up, adapters, lambda: ours["engine"].append(engine_start(here)))
            here.destroy()
            ours["floor"].append(timed(bare.up))
            for peer in peers:
                tell(f"round {number + 1}: {peer.name}")
                story(theirs[peer.name], peer.run, adapters)
                peer.clear()
            for scp in scps:
                here.machine.run("mkdir", "-p", "/srv")
                os.sync()
                copies[scp.name].append(timed(scp.run))
                scp.clear()
    table = Table(
        "Updates",
        f"{count} adapters of 160 MB and one systemd unit, over SSH to a container on this machine, so that "
        "its cores do both ends. `pulumi up --yes --skip-preview` here, and there what else brings about the same "
        "files and the same unit, restarted when something changed. Only `up` waits for the engine and asks every "
        "adapter; how long the engine itself takes to start is taken off its figures where it starts. scp copies "
        "the bytes and no more.",
        versions=versions(),
    )
    table.add(*rows(ours, theirs, copies, megabytes))
    return table


def story(
    seconds: Mapping[str, list[float]],
    deploy: Callable[[], None],
    adapters: Mapping[str, Path],
    after_first: Callable[[], object] = lambda: None,
) -> None:
    """Deploy onto an empty pod, then again, then once more with one adapter replaced."""
    os.sync()  # both ends share a disk, and what is still on its way there from before is nobody's here
    seconds[FIRST].append(timed(deploy))
    after_first()
    os.sync()
    seconds[SAME].append(timed(deploy))
    replace_weights(adapters[min(adapters)])
    os.sync()
    time.sleep(2)  # whoever deploys what was trained takes longer; younger files' times say nothing (digest_cache.py)
    seconds[CHANGED].append(timed(deploy))


def unit_of(here: Site) -> Path:
    """The peers' unit, from the one that `up` put on the pod."""
    digests = {model: digest for model, digest in here.stack.outputs()["engines"][BASE]["models"].items() if digest}
    unit = here.work / UNIT
    unit.write_text(without_our_places(here.machine.read(f"/etc/systemd/system/{here.unit}"), digests))
    return unit


def peers_for(here: Site, unit: Path) -> list[Peer]:
    source = here.work / "adapters"
    peers_venv()
    kinds: list[type[Peer]] = [AnsibleCopy, PyinfraSync]
    if offer_rsync(here):
        kinds[1:1] = [AnsibleSynchronize]
        kinds += [RsyncScript, RsyncChecksumScript]
    return [kind(here, source, unit) for kind in kinds]


def engine_start(here: Site) -> float:
    """Seconds from the engine's start until it answers, as `up` waits for it."""
    return int(here.machine.run("sh", "-c", READY, here.unit)) / 1e9


def rows(
    ours: Mapping[str, Sequence[float]],
    theirs: Mapping[str, Mapping[str, Sequence[float]]],
    copies: Mapping[str, Sequence[float]],
    megabytes: float,
) -> list[Row]:
    engine = Figure(ours["engine"], "s")
    here = {
        FIRST: Figure(ours[FIRST], "s") - engine,
        SAME: Figure(ours[SAME], "s"),
        CHANGED: Figure(ours[CHANGED], "s") - engine,
    }
    made = [Row("the engine's start, taken off below", engine)]
    throughput = Figure([megabytes / value for value in here[FIRST].values], "MB/s")
    for name, values in copies.items():
        scp = Figure([megabytes / value for value in values], "MB/s")
        goal = Goal(at_least=0.7) if name == "scp" else None
        made.append(Row(f"up, {FIRST}", throughput, name, scp, goal))
    for what, figure in here.items():
        for name, seconds in theirs.items():
            goal = None
            if "script" not in name:
                goal = Goal(at_most=1)
            elif what == CHANGED and name == RsyncChecksumScript.name:
                goal = Goal(at_most=1.3)
            made.append(Row(f"up, {what}", figure, name, Figure(seconds[what], "s"), goal))
        if what == SAME:
            made.append(Row(f"up, {what}", figure, "a bare program's up", Figure(ours["floor"], "s")))
    return made


def versions() -> dict[str, str]:
    programs = {
        "pulumi": ["pulumi", "version"],
        "ansible-core": [str(peers_venv() / "ansible"), "--version"],
        "pyinfra": [str(peers_venv() / "pyinfra"), "--version"],
        "rsync": ["rsync", "--version"],
        "OpenSSH": ["ssh", "-V"],
    }
    return {name: version_of(words) for name, words in programs.items()}
