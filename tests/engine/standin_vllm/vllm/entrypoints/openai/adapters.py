"""Loads adapters as far as the tests look: the config's rank, and which bytes the weights are (Python >= 3.8)."""

import hashlib
import json
import os
from typing import Dict, NamedTuple

from .arguments import Arguments, LoraModule


class Loaded(NamedTuple):
    """An adapter as it was when the server started; `applies` is False where the base answers in its name."""

    path: str
    parent: str
    sha256: str
    applies: bool


def load_all(arguments: Arguments) -> Dict[str, Loaded]:
    """Every adapter by its name. As in vLLM, the first that does not load raises and ends the server."""
    loaded: Dict[str, Loaded] = {}
    for module in arguments.lora_modules:
        if module.name in arguments.served_names:
            raise ValueError(f"The lora adapter '{module.name}' conflicts with a served base model.")
        if module.name in loaded:
            raise ValueError(f"The lora adapter '{module.name}' has already been loaded.")
        loaded[module.name] = _load(module, arguments)
    return loaded


def _load(module: LoraModule, arguments: Arguments) -> Loaded:
    config_path = os.path.join(module.path, "adapter_config.json")
    weights_path = os.path.join(module.path, "adapter_model.safetensors")
    for path in (config_path, weights_path):
        if not os.path.isfile(path):
            raise ValueError(f"Loading lora {module.name} failed: No adapter found for {module.path}")
    with open(config_path, encoding="utf-8") as stream:
        config = json.load(stream)
    if "standin_fail" in config:
        raise ValueError(config["standin_fail"])
    missing = [key for key in ("r", "lora_alpha", "target_modules") if key not in config]
    if missing:
        raise ValueError(f"Missing required configuration fields: {set(missing)}")
    rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    if rank > arguments.max_lora_rank:
        raise ValueError(f"LoRA rank {rank} is greater than max_lora_rank {arguments.max_lora_rank}.")
    parent = module.base_model_name
    if parent not in arguments.served_names:
        parent = arguments.served_names[0]
    applies = not config.get("standin_equals_base") and _names_modules(weights_path)
    return Loaded(module.path, parent, _sha256(weights_path), applies)


def _names_modules(weights_path: str) -> bool:
    """Whether any tensor could belong to a module. vLLM loads an adapter of which none does."""
    with open(weights_path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > os.path.getsize(weights_path):
            return True  # some tests' weights are no safetensors
        names = json.loads(stream.read(length))
    return any(name.startswith("base_model.model.model.layers.") for name in names)


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while True:
            chunk = stream.read(1 << 20)
            if not chunk:
                return digest.hexdigest()
            digest.update(chunk)
