"""The arguments of vLLM 0.32's API server that the tests use, under the same names (Python >= 3.8)."""

import argparse
import json
from typing import List, NamedTuple, Optional, Sequence

LEGAL_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class LoraModule(NamedTuple):
    """One item of ``--lora-modules``."""

    name: str
    path: str
    base_model_name: Optional[str]


class Arguments(NamedTuple):
    """What the stand-in acts on; every other known argument is parsed and left alone."""

    model: str
    served_names: List[str]
    host: str
    port: int
    max_model_len: int
    api_keys: List[str]
    max_lora_rank: int
    shutdown_timeout: int
    lora_modules: List[LoraModule]


def lora_module(text: str) -> LoraModule:
    """``name=path`` or a JSON object, as vLLM takes them."""
    if not text.startswith("{"):
        name, equals, path = text.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"Invalid fields for --lora-modules: {text}")
        return LoraModule(name, path, None)
    try:
        item = json.loads(text)
        return LoraModule(item["name"], item["path"], item.get("base_model_name"))
    except (ValueError, KeyError) as error:
        raise argparse.ArgumentTypeError(f"Invalid fields for --lora-modules: {text} ({error})") from None


def parse(argv: Sequence[str]) -> Arguments:
    """Parses like vLLM: an unknown or malformed argument ends the process with status 2."""
    parser = argparse.ArgumentParser(prog="api_server.py", allow_abbrev=False)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key", nargs="+", default=[])
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-loras", type=int, default=1)
    parser.add_argument("--max-lora-rank", type=int, choices=LEGAL_RANKS, default=16)
    parser.add_argument("--max-cpu-loras", type=int)
    parser.add_argument("--lora-modules", nargs="*", type=lora_module, default=[])
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--shutdown-timeout", type=int, default=0)
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float", "float16", "float32", "half"])
    for name in ("--max-num-seqs", "--max-num-batched-tokens", "--tensor-parallel-size", "--seed"):
        parser.add_argument(name, type=int)
    for name in (
        "--chat-template",
        "--download-dir",
        "--load-format",
        "--quantization",
        "--revision",
        "--tokenizer",
        "--tool-call-parser",
    ):
        parser.add_argument(name)
    for name in ("--allowed-origins", "--hf-overrides"):
        parser.add_argument(name, type=json.loads)
    parser.add_argument("--middleware", action="append")
    for name in (
        "--enforce-eager",
        "--trust-remote-code",
        "--enable-prefix-caching",
        "--enable-log-requests",
        "--enable-auto-tool-choice",
    ):
        switch = parser.add_mutually_exclusive_group()
        switch.add_argument(name, action="store_true")
        switch.add_argument("--no-" + name[2:], action="store_true")
    given = parser.parse_args(argv)

    if given.lora_modules and not given.enable_lora:
        parser.error("--lora-modules needs --enable-lora")
    if given.max_cpu_loras is not None and given.max_cpu_loras < given.max_loras:
        raise ValueError(f"max_cpu_loras ({given.max_cpu_loras}) must be >= max_loras ({given.max_loras}).")
    return Arguments(
        model=given.model,
        served_names=given.served_model_name or [given.model],
        host=given.host or "0.0.0.0",
        port=given.port,
        max_model_len=given.max_model_len,
        api_keys=given.api_key,
        max_lora_rank=given.max_lora_rank,
        shutdown_timeout=given.shutdown_timeout,
        lora_modules=given.lora_modules,
    )
