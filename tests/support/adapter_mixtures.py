"""Random adapters: sound ones with odd values, names and shapes mixed in. The same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.support.adapter_cases import ALL, CONFIG, INFINITY, NAN, Q, V, Write, tensors, with_config
from tests.support.adapters import Json

KEYS = [
    *("alora_invocation_tokens", "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "eva_config"),
    *("fan_in_fan_out", "init_lora_weights", "layer_replication", "loftq_config", "lora_alpha", "lora_bias"),
    *("lora_dropout", "modules_to_save", "peft_type", "r", "rank_pattern", "target_modules", "target_parameters"),
    *("task_type", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora", "use_rslora"),
    "vllm_lora_scaling_factor",
]
VALUES: Sequence[Json] = [
    *(None, True, False, 0, 1, -1, 4, 8, 16, 600, 10**20, 0.5, 1.5, NAN, INFINITY, -INFINITY),
    *("", "none", "q_proj", "8", "gaussian", "pissa", "all"),
    *([], ["q_proj"], ["score"], ["lm_head"], [1], [[0, 1]], [None]),
    *({}, {"q_proj": 8}, {"q_proj": 4}, {"k_proj": 600}, {"q_proj": None}, {"q_proj": True}, {"q_proj": 0.5}),
    *({"x": NAN}, {"(": 4}, {".*": 4}, {"model.layers.0.self_attn.q_proj": 4}, {"^model.layers.0": 4}, {"a": {"b": 1}}),
]
BODIES = ["base_model.model.model.", "model.", "base_model.model.", "", "base_model.", "base_model.model.model.model."]
PARENTS = ["layers.0.self_attn.", "layers.1.self_attn.", "layers.0.mlp.", "layers.2.self_attn.", "", "experts.0."]
NAMES = [
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "lm_head"),
    *("embed_tokens", "score", "classifier", "experts", "x", "q_proj.base_layer"),
]
SUFFIXES = [
    *(".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B", ".weight", ".bias"),
    *(".base_layer.weight", ".lora_magnitude_vector", ".lora_A", ".lora_B.bias", ".lora_A.default.weight"),
]
SHAPES = [
    *([4, 128], [128, 4], [4, 256], [64, 4], [256, 4], [8, 128], [128, 8], [4, 512], [512, 4], [2, 128], [600, 128]),
    *([], [4], [0, 128], [128, 0], [1, 4, 128]),
]


def mixtures(seed: int, count: int) -> list[Write]:
    chance = random.Random(seed)
    return [_mixture(chance) for _ in range(count)]


def _mixture(chance: random.Random) -> Write:
    rank = chance.choice([4, 4, 4, 8, 1])
    shapes = tensors(chance.choice([(Q, V), (Q,), ALL]), rank)
    config: dict[str, Json] = {**CONFIG, "r": rank}
    for _ in range(chance.choice([0, 1, 1, 2, 3])):
        config[chance.choice(KEYS)] = chance.choice(VALUES)
    if chance.random() < 0.1:
        del config[chance.choice(list(config))]
    if chance.random() < 0.3:
        name = chance.choice(BODIES) + chance.choice(PARENTS) + chance.choice(NAMES)
        for suffix in chance.choice([(chance.choice(SUFFIXES),), (".lora_A.weight", ".lora_B.weight")]):
            shapes[name + suffix] = chance.choice(SHAPES)
    if chance.random() < 0.1:
        del shapes[chance.choice(list(shapes))]
    if chance.random() < 0.1:
        shapes[chance.choice(list(shapes))] = chance.choice(SHAPES)
    names = list(shapes)
    chance.shuffle(names)
    return with_config(config, {name: shapes[name] for name in names})
