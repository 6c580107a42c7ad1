"""Everything that is wrong with the tensors of one adapter. No rule looks at a tensor's values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from components.core.check.base_model import BaseFacts
from components.core.check.tensor_modules import left_out, modules, not_listed, other_layers
from components.core.check.tensor_names import is_passed_over, odd_names, refused_names
from components.core.check.tensor_pairs import Pair, told
from components.core.check.tensor_shapes import halves, shapes, types
from components.core.findings import Finding
from components.core.lora_names import lora_module
from components.core.safetensors_header import Tensor
from components.core.vllm_loader import LoaderRules


def tensor_findings(
    config: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    place: str,
    rules: LoaderRules,
    base_model: BaseFacts | None,
    lora_target_modules: tuple[str, ...] | None,
) -> Iterator[Finding]:
    """One finding for each kind of fault; whatever the names and shapes are, nothing is raised.

    Args:
        config: the parsed adapter_config.json, not necessarily a sound one.
        tensors: the header of the weights file.
        place: what findings call that file.
        rules: of the vLLM that is to load it.
        base_model: what the adapter is to be served on; None where its config.json is not at hand.
        lora_target_modules: vLLM's `--lora-target-modules`, if given.
    """
    pairs: dict[str, Pair] = {}
    others: list[str] = []
    for name, tensor in tensors.items():
        found = lora_module(name)
        if found is None:
            others.append(name)
            continue
        module, side = found
        pair = pairs.setdefault(module, Pair(module)) if module not in pairs else pairs[module]
        (pair.a if side == "A" else pair.b).append((name, tensor))
    refused = [name for name in others if not is_passed_over(name, rules)]
    yield from refused_names(place, refused, len(tensors), config, rules, base_model)
    if not pairs:
        if not refused:
            yield told(
                place,
                "error",
                "no-lora-tensors",
                [],
                "holds no LoRA matrix (no name ends in .lora_A.weight or .lora_B.weight); save the adapter again with "
                "PEFT's save_pretrained.",
            )
        return
    yield from odd_names(place, pairs)
    yield from halves(place, pairs)
    yield from shapes(place, pairs, config)
    yield from types(place, pairs)
    yield from modules(place, pairs, rules, base_model)
    yield from left_out(place, pairs, lora_target_modules, base_model)
    yield from not_listed(place, pairs, config)
    yield from other_layers(place, pairs, config)
