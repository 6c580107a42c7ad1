"""How long after `up` starts the models answer, against vLLM started by hand with the same arguments."""

from __future__ import annotations

import subprocess
import time

from bench.support.options import Options
from bench.support.site import Site
from bench.support.table import Figure, Goal, Row, Table
from bench.support.timing import tell
from bench.support.vllm import ENGINE, Watch, vllm_site
from bootstrap.demo.prepare import BASE
from tests.support.machines import container_engine

IMAGES = ("sandbox",)


def run(options: Options) -> Table:
    ready, ended, by_hand = [], [], []
    with vllm_site() as (here, adapters, url):
        served = {BASE, *adapters}
        here.configure(adapters, base=BASE, engine=ENGINE)
        # Once without counting: files come from the disk's cache from then on, and compiled modules are there.
        for number in range(options.repeat + 1):
            tell(f"round {number}: up")
            here.forget_digests()
            watch, started = Watch(url, served), time.perf_counter()
            here.up()
            end = time.perf_counter()
            tell(f"round {number}: by hand")
            seconds = start_by_hand(here, *started_with(here), url, served)
            here.destroy()
            if number:
                ready.append(watch.wait() - started)
                ended.append(end - started)
                by_hand.append(seconds)
    table = Table(
        "Ready after up starts",
        f"A first `pulumi up --yes --skip-preview` of {len(adapters)} small adapters onto a "
        "pod that runs, from its start until `/v1/models` lists them all, against vLLM on the same pod, started by "
        "hand with the same arguments and environment, with everything in its place. vLLM for CPUs, SmolLM2-135M. "
        "`up` ends later: it asks each adapter.",
    )
    table.add(
        Row("ready", Figure(ready, "s"), "vLLM by hand", Figure(by_hand, "s"), Goal(at_most=5, of="more")),
        Row("the end of `up`", Figure(ended, "s"), "vLLM by hand", Figure(by_hand, "s")),
    )
    return table


def started_with(here: Site) -> tuple[list[str], dict[str, str]]:
    """The argv and the environment of the unit's process."""
    pid = here.machine.pid(here.unit)
    pairs = here.machine.read(f"/proc/{pid}/environ").split("\0")
    return here.machine.argv(pid), dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def start_by_hand(here: Site, words: list[str], environment: dict[str, str], url: str, served: set[str]) -> float:
    """Seconds until the same engine, started by a shell where the unit was, is ready."""
    here.machine.run("systemctl", "stop", here.unit)
    # vLLM remembers in its home what it found out of a model, nine seconds of its first start; that of `up` was empty,
    # too. The slash: of a DynamicUser= it is a link.
    here.machine.run("find", f"{environment['HOME']}/", "-mindepth", "1", "-delete")
    settings = [f"{name}={value}" for name, value in environment.items()]
    command = ("exec", here.machine.name, "sh", "-c", 'echo $$ >/run/by-hand; exec env -i "$@"', "sh")
    started = time.perf_counter()
    with subprocess.Popen(
        [*container_engine(), *command, *settings, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            return Watch(url, served).wait() - started
        finally:
            here.machine.run("sh", "-c", "kill $(cat /run/by-hand)", check=False)
            process.wait()
