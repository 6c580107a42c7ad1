"""Tensors that vLLM refuses by their names, and names that no trainer should have written.

vllm/lora/utils.py (0.32.0): `parse_fine_tuned_lora_name` raises "is unsupported LoRA weight" for whatever is no LoRA
matrix, except for a classifier's head, and `is_base_embedding_weights` passes two kinds of copies over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from components.core.check.base_model import BaseFacts
from components.core.check.tensor_pairs import Group, Pair, last_part, shown, some, told
from components.core.findings import Finding
from components.core.lora_names import PEFT_PREFIX
from components.core.vllm_loader import LoaderRules

BASE_EMBEDDINGS = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")

# Parts that training wrappers put in front of a model's own names; no base has a module called so.
WRAPPERS_OF_TRAINERS = frozenset(
    {"base_model", "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
_HEADS = ("score", "classifier")
# The parameters of PEFT's other tuners: PEFT 0.21, peft/tuners/*/layer.py and model.py.
_OTHER_METHODS = re.compile(
    r"(?:^|\.)(?:prompt_embeddings|prompt_encoder|ia3_l|vera_lambda_[bd]|vera_[AB]|hada_|lokr_|oft_|boft_|fourierft_|"
    r"vblora_|lora_E|randlora_|hra_|bone_|miss_|poly_lora_|adaption_|ln_tuning_|shira_|c3a_|road_|ranknum|waveft_|delora_)"
)

_REFUSED: Mapping[str, str] = {
    "dora": "magnitude vectors of DoRA, whatever use_dora says. vLLM loads no DoRA: train without it, or merge the "
    "adapter.",
    "bias-tensor": "biases. vLLM loads no biases of adapters: train with bias: none and without lora_bias.",
    "trainable-tokens": "trained tokens (trainable_token_indices). vLLM does not load them: merge the adapter into the "
    "base.",
    "full-weights": "weights of whole modules (as of modules_to_save). vLLM loads LoRA matrices only: merge the "
    "adapter into the base, or train these modules by LoRA.",
    "base-embeddings": "copies of the base's embeddings, which vLLM {version} does not skip: save the adapter with "
    "save_embedding_layers=False, or serve it by vLLM 0.12 or newer.",
    "classification-head": "a classifier's head. vLLM {version} takes one only if modules_to_save names it, and only "
    "for a base that classifies.",
    "adapter-name": "LoRA matrices with the name of an adapter in theirs (.lora_A.default.weight), which vLLM does not "
    "know: save with PEFT's save_pretrained, which leaves it out.",
    "not-lora": "tensors of another method than LoRA. vLLM loads LoRA only: train a LoRA adapter, or merge this one.",
    "unsupported-tensor": "tensors that vLLM does not know; it loads what ends in .lora_A.weight and .lora_B.weight. "
    "Save the adapter again with PEFT's save_pretrained.",
}


def is_passed_over(name: str, rules: LoaderRules) -> bool:
    """Whether vLLM skips the tensor without a word."""
    return rules.skips_base_embeddings and name.endswith(BASE_EMBEDDINGS)


def refused_names(
    place: str,
    names: list[str],
    total: int,
    config: Mapping[str, object],
    rules: LoaderRules,
    base_model: BaseFacts | None,
) -> Iterator[Finding]:
    """One finding for each kind of tensor among `names`, none of which is a LoRA matrix."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_kind(name), []).append(name)
    for kind, found in kinds.items():
        message = f"{len(found)} of {total} tensors ({some(found)}) are {_REFUSED[kind].format(version=rules.version)}"
        maybe = kind == "classification-head" and _head_may_load(found, config, rules, base_model)
        yield told(place, "warning" if maybe else "error", kind, found, message)


def odd_names(place: str, pairs: Mapping[str, Pair]) -> Iterator[Finding]:
    """Names of LoRA matrices that are wrong whatever the base is."""
    twice, wrapped, repeated, nameless = Group(), Group(), Group(), Group()
    for module, pair in pairs.items():
        for side in (pair.a, pair.b):
            if len(side) > 1:
                twice.add(side[0][0], side[1][0])
        repeated.names.extend(name for name, _ in pair.matrices if name.count(PEFT_PREFIX) > 1)
        parts = module.split(".")
        if "" in parts or not module.isprintable():
            nameless.add(module)
        elif not WRAPPERS_OF_TRAINERS.isdisjoint(parts[:-1]):
            wrapped.add(module, next(part for part in parts if part in WRAPPERS_OF_TRAINERS))
    if twice.names:
        yield told(
            place,
            "error",
            "twice",
            twice.names,
            f"{len(twice.names)} matrices are there twice under different names ({shown(twice.names[0])} and "
            f"{shown(twice.detail)}), and vLLM would use the one it reads last; keep one.",
        )
    if repeated.names:
        yield told(
            place,
            "warning",
            "repeated-prefix",
            repeated.names,
            f"{len(repeated.names)} names hold {PEFT_PREFIX} more than once. vLLM reads them as if it stood there "
            f"once, PEFT does not; save the adapter from the inner model.",
        )
    if wrapped.names:
        yield told(
            place,
            "error",
            "training-wrapper",
            wrapped.names,
            f"{len(wrapped.names)} of {len(pairs)} modules ({some(wrapped.names)}) carry {wrapped.detail} in their "
            f"names, which is the trainer's and in no base: vLLM would load them and never use them. Save the "
            f"unwrapped model, or rename the tensors.",
        )
    if nameless.names:
        yield told(
            place,
            "error",
            "module-name",
            nameless.names,
            f"{len(nameless.names)} of {len(pairs)} modules have names that no module can have "
            f"({some(nameless.names)}); save the adapter again with PEFT's save_pretrained.",
        )


def _kind(name: str) -> str:
    """Which sentence fits a tensor that vLLM refuses: a key of `_REFUSED`."""
    last = last_part(name)
    if "lora_magnitude_vector" in name:
        return "dora"
    if name.endswith(BASE_EMBEDDINGS):
        return "base-embeddings"
    if "trainable_tokens" in name or "token_adapter" in name:
        return "trainable-tokens"
    if last in ("weight", "bias") and last_part(name.rpartition(".")[0]) in _HEADS and "." in name:
        return "classification-head"
    if last == "bias":
        return "bias-tensor"
    if ".lora_A." in name or ".lora_B." in name or ".lora_embedding_" in name:
        return "adapter-name" if last == "weight" or ".lora_embedding_" in name else "unsupported-tensor"
    if _OTHER_METHODS.search(name):
        return "not-lora"
    return "full-weights" if last == "weight" else "unsupported-tensor"


def _head_may_load(
    names: list[str], config: Mapping[str, object], rules: LoaderRules, base_model: BaseFacts | None
) -> bool:
    """vllm/lora/model_manager.py, `_validate_modules_to_save`: listed, and the base has such a head."""
    saved = config.get("modules_to_save")
    listed = saved if isinstance(saved, list) else []
    heads = {last_part(name.rpartition(".")[0]) for name in names}
    generates = base_model is not None and base_model.known
    return not generates and all(head in listed and head in rules.full_modules for head in heads)
