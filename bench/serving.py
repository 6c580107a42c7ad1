"""Twelve requests at once to three adapters, with the flags that are computed here and with vLLM's own."""

from __future__ import annotations

from functools import partial

from bench.support.options import Options
from bench.support.table import Figure, Goal, Row, Table
from bench.support.timing import tell, timed
from bench.support.vllm import ENGINE, ask_all, vllm_site
from bootstrap.demo.prepare import BASE

IMAGES = ("sandbox",)
REQUESTS = 12


def run(options: Options) -> Table:
    tokens = 16 if options.quick else 48
    seconds: dict[int | None, tuple[list[float], list[float]]] = {None: ([], []), 1: ([], [])}
    with vllm_site() as (here, adapters, url):
        models = list(adapters)
        spread = [models[number % len(models)] for number in range(REQUESTS)]
        alone = [models[0]] * REQUESTS
        for number in range(options.repeat):
            for most, figures in seconds.items():
                tell(f"round {number + 1}: {'the computed --max-loras' if most is None else f'--max-loras {most}'}")
                here.configure(adapters, base=BASE, engine={**ENGINE, **({"maxLoras": most} if most else {})})
                here.up()
                ask_all(url, spread, tokens)  # what an engine does at first it does once
                for figure, models_asked in zip(figures, (spread, alone), strict=True):
                    figure.append(timed(partial(ask_all, url, models_asked, tokens)))
        here.destroy()
    many, one = ([Figure(values, "s") for values in figures] for figures in seconds.values())
    table = Table(
        "Serving",
        f"{REQUESTS} requests of {tokens} tokens at the same time to one engine: over {len(models)} "
        "adapters, and all to the same one. With the `--max-loras` that is computed here and with 1, which is "
        "vLLM's own; the engine is started anew for each, in turn. Tokens a second of all together; vLLM for CPUs, "
        "SmolLM2-135M.",
    )
    total = REQUESTS * tokens
    table.add(
        Row(
            f"over {len(models)} adapters",
            rate(many[0], total),
            "--max-loras 1",
            rate(one[0], total),
            Goal(at_least=1.8),
        ),
        Row(f"over {len(models)} adapters", rate(many[0], total), "all to one adapter", rate(many[1], total)),
        Row("all to one adapter", rate(many[1], total), "--max-loras 1", rate(one[1], total)),
    )
    return table


def rate(seconds: Figure, tokens: int) -> Figure:
    return Figure([tokens / value for value in seconds.values], "tokens/s")
