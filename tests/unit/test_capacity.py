"""What an engine takes of a GPU's memory: exact numbers of known bases, and what holds of any."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.capacity import (
    BaseSizes,
    Matrix,
    Quantization,
    Slots,
    Unknown,
    slot_bytes,
    token_bytes,
    weight_bytes,
)
from components.core.check.base_model import base_model_of
from components.core.check.base_sizes import quantization_of, sizes_of

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}


def found(config: dict[str, Any], **changes: Any) -> BaseSizes | Unknown:
    config = {**config, **changes}
    return sizes_of(config, base_model_of(config, config["architectures"][0], "0" * 64))


def sizes(config: dict[str, Any], **changes: Any) -> BaseSizes:
    base = found(config, **changes)
    assert isinstance(base, BaseSizes)
    return base


def number(amount: int | Unknown) -> int:
    assert isinstance(amount, int)
    return amount


def test_llama_8b() -> None:
    base = sizes(LLAMA_8B)
    # Per layer: q and o 4096 + 4096, k and v 4096 + 1024, gate, up and down 4096 + 14336; embedding and output once.
    numbers = 32 * (2 * 8192 + 2 * 5120 + 3 * 18432) + 2 * (128256 + 4096)
    assert slot_bytes(base, Slots(16)) == 16 * numbers * 2 == 92_356_608
    # 8.03 billion parameters less 266,240 of norms.
    assert weight_bytes(base, 2) == 2 * (8_030_261_248 - 266_240)
    assert token_bytes(base, 2) == 32 * 8 * 128 * 2 * 2


def test_qwen_7b_has_no_slots_for_embedding_and_output() -> None:
    base = sizes(QWEN_7B)
    assert slot_bytes(base, Slots(64)) == 64 * 28 * (2 * 7168 + 2 * 4096 + 3 * 22528) * 2
    # 7.6 billion parameters less those of norms and biases.
    assert weight_bytes(base, 2) == 2 * (7_615_616_512 - 57 * 3584 - 28 * (3584 + 2 * 512))
    assert token_bytes(base, 2) == 28 * 4 * 128 * 2 * 2


def test_two_gpus_share_what_can_be_split() -> None:
    base = sizes(LLAMA_8B)
    columns = 4096 + 2048 + 2 * (4096 + 512) + 2 * (4096 + 7168)
    rows = 2048 + 4096 + 7168 + 4096
    assert slot_bytes(base, Slots(16, tensor_parallel=2)) == 16 * 2 * (32 * (columns + rows) + 2 * (128256 + 4096))
    assert weight_bytes(base, 2, 2) == number(weight_bytes(base, 2)) // 2
    assert token_bytes(base, 2, 2) == number(token_bytes(base, 2)) // 2


def test_a_head_of_keys_is_the_least_a_gpu_holds() -> None:
    base = sizes(LLAMA_8B)
    assert token_bytes(base, 2, 16) == token_bytes(base, 2, 8)
    assert token_bytes(base, 2, 5) == Unknown("its 32 attention heads cannot be shared by 5 GPUs")


def test_a_quantised_base_takes_its_bits_and_those_of_its_scales() -> None:
    base = sizes(QWEN_7B, quantization_config=AWQ)
    layer = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944
    bits = 28 * layer * 4 + 28 * layer // 128 * 20
    assert weight_bytes(base, 2) == bits // 8 + 2 * 152064 * 3584 * 2
    assert slot_bytes(base, Slots(8)) == slot_bytes(sizes(QWEN_7B), Slots(8))


@pytest.mark.parametrize(
    ("given_config", "quantization"),
    [
        (None, None),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, Quantization(8)),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, Quantization(8, 24, 32)),
        (AWQ, Quantization(4, 20, 128)),
    ],
)
def test_bits_that_are_known(given_config: Any, quantization: Quantization | None) -> None:
    assert quantization_of({"quantization_config": given_config}) == quantization


def test_weights_that_something_else_quantised_are_not_counted_as_they_are() -> None:
    assert isinstance(quantization_of({"compression_config": {"quant_method": "compressed-tensors"}}), Unknown)


def test_heads_of_keys_that_no_base_can_have() -> None:
    """None at all are as many as heads; anything else that is no number says nothing."""
    as_many = token_bytes(sizes(LLAMA_8B, num_key_value_heads=None), 2)
    assert number(as_many) == 4 * number(token_bytes(sizes(LLAMA_8B), 2))
    for strange in ("8", 0, 5, 64, -8, True):
        assert isinstance(found(LLAMA_8B, num_key_value_heads=strange), Unknown), strange


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "gptq", "bits": 4, "group_size": -1},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True},
        {**AWQ, "modules_to_not_convert": ["o_proj"]},
        {"quant_method": ["awq"]},
        {},
        "awq",
    ],
)
def test_bits_that_are_not(config: Any) -> None:
    assert isinstance(quantization_of({"quantization_config": config}), Unknown)
    base = sizes(LLAMA_8B, quantization_config=config)
    assert isinstance(weight_bytes(base, 2), Unknown)
    assert isinstance(slot_bytes(base, Slots(16)), int)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["NewForCausalLM"]}, "the modules of NewForCausalLM are not known here"),
        ({"architectures": ["Glm4ForCausalLM"]}, "the modules of Glm4ForCausalLM are not known here"),
        ({"architectures": ["MixtralForCausalLM"]}, "the experts of MixtralForCausalLM are not counted"),
        ({"num_hidden_layers": None}, "config.json does not say how many layers the base has"),
        ({"hidden_size": "4096"}, "config.json does not say how wide q_proj is"),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "llama"}},
            "what LlavaForConditionalGeneration has beside its language model is not counted",
        ),
    ],
)
def test_what_is_not_known_is_said(changes: dict[str, Any], reason: str) -> None:
    assert found(LLAMA_8B, **changes) == Unknown(reason)


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({}, False),
        ({"sliding_window": None}, False),
        ({"sliding_window": 4096}, True),
        ({"sliding_window": 4096, "use_sliding_window": False}, False),
        ({"architectures": ["MistralForCausalLM"]}, True),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, False),
        ({"layer_types": ["full_attention", "full_attention"]}, False),
        ({"layer_types": ["full_attention", "sliding_attention"]}, True),
    ],
)
def test_the_kv_cache_is_counted_where_every_layer_keeps_the_whole_context(
    changes: dict[str, Any], windowed: bool
) -> None:
    assert isinstance(token_bytes(sizes(LLAMA_8B, **changes), 2), Unknown) == windowed


def test_a_tied_output_is_no_weight_of_its_own_and_has_slots() -> None:
    base, tied = sizes(LLAMA_8B), sizes(LLAMA_8B, tie_word_embeddings=True)
    assert number(weight_bytes(base, 2)) - number(weight_bytes(tied, 2)) == 128256 * 4096 * 2
    assert slot_bytes(base, Slots(16)) == slot_bytes(tied, Slots(16))


def test_vllm_pads_a_vocabulary_and_not_its_slots() -> None:
    base, odd = sizes(LLAMA_8B), sizes(LLAMA_8B, vocab_size=128256 - 63)
    assert weight_bytes(odd, 2) == weight_bytes(base, 2)
    assert number(slot_bytes(base, Slots(16))) - number(slot_bytes(odd, Slots(16))) == 2 * 63 * 16 * 2


def test_a_vocabulary_that_vllm_adapts_no_output_of() -> None:
    base = sizes(LLAMA_8B, vocab_size=262144)
    assert slot_bytes(base, Slots(16)) == Unknown("vLLM adapts no output of more than 258048 tokens")


def test_target_modules_leave_slots_out_and_a_part_brings_what_it_is_packed_with() -> None:
    base = sizes(LLAMA_8B)
    attention = 16 * 32 * (8192 + 2 * 5120) * 2
    assert slot_bytes(base, Slots(16, targets=["q_proj"])) == attention
    assert slot_bytes(base, Slots(16, targets=["qkv_proj", "k_proj"])) == attention
    assert slot_bytes(base, Slots(16, targets=["o_proj"])) == 16 * 32 * 8192 * 2
    for strange in ("model.layers.0.self_attn.q_proj", "fc1"):
        assert slot_bytes(base, Slots(16, targets=["q_proj", strange])) == Unknown(
            f"what --lora-target-modules {strange} stands for is not known"
        )
    assert isinstance(slot_bytes(sizes(QWEN_7B), Slots(16, targets=["lm_head"])), Unknown)


def test_sharded_adapters_need_a_rank_that_can_be_shared() -> None:
    base = sizes(LLAMA_8B)
    assert number(slot_bytes(base, Slots(16, tensor_parallel=2, fully_sharded=True))) < number(
        slot_bytes(base, Slots(16, tensor_parallel=2))
    )
    assert slot_bytes(base, Slots(1, tensor_parallel=2, fully_sharded=True)) == Unknown(
        "rank 1 cannot be shared by 2 GPUs"
    )


# --- what holds of any base -------------------------------------------------------------------------------

widths = st.integers(1, 64).map(lambda width: 8 * width)
matrices = st.builds(
    Matrix,
    name=st.sampled_from(["q_proj", "k_proj", "o_proj", "up_proj", "fc1", "lm_head"]),
    inputs=widths,
    outputs=widths,
    kind=st.sampled_from(["column", "row", "whole", "embedding", "output"]),
    count=st.integers(1, 100),
    adapted=st.booleans(),
)
bases = st.builds(
    BaseSizes,
    matrices=st.lists(matrices, max_size=6).map(tuple),
    layers=st.integers(1, 100),
    tied=st.booleans(),
    heads=st.just(8),
    key_heads=st.sampled_from([1, 2, 4, 8]),
    key_width=widths,
)
ranks = st.sampled_from([8, 16, 32, 64, 128, 256, 320, 512])


@given(bases, ranks, ranks, st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_a_larger_rank_never_takes_less(base: BaseSizes, one: int, other: int, split: int, sharded: bool) -> None:
    small, large = (
        number(slot_bytes(base, Slots(rank, tensor_parallel=split, fully_sharded=sharded)))
        for rank in sorted((one, other))
    )
    assert small <= large
    # Without a constant part: twice the rank is twice the bytes.
    assert small * max(one, other) == large * min(one, other)


@given(bases, ranks, st.sampled_from([2, 4, 8]))
def test_more_gpus_never_take_more_each(base: BaseSizes, rank: int, split: int) -> None:
    alone = number(slot_bytes(base, Slots(rank)))
    shared = number(slot_bytes(base, Slots(rank, tensor_parallel=split)))
    assert number(slot_bytes(base, Slots(rank, tensor_parallel=split, fully_sharded=True))) <= shared <= alone
    assert number(weight_bytes(base, 2, split)) <= number(weight_bytes(base, 2))
    assert number(token_bytes(base, 2, split)) <= number(token_bytes(base, 2))


@given(bases, matrices, ranks)
def test_another_adapted_module_takes_as_much_as_it_has(base: BaseSizes, more: Matrix, rank: int) -> None:
    larger = replace(base, matrices=(*base.matrices, more))
    added = rank * (more.inputs + more.outputs) * more.count * 2 if more.adapted else 0
    assert number(slot_bytes(larger, Slots(rank))) == number(slot_bytes(base, Slots(rank))) + added


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from([*LLAMA_8B, "quantization_config", "layer_types", "sliding_window"]), json_values)
)
def test_no_config_is_too_strange(changes: dict[str, Any]) -> None:
    config = json.loads(json.dumps({**LLAMA_8B, **changes}))
    base = sizes_of(config, base_model_of(config, "LlamaForCausalLM", "0" * 64))
    if isinstance(base, BaseSizes):
        for amount in (
            slot_bytes(base, Slots(16, tensor_parallel=2)),
            weight_bytes(base, 2, 2),
            token_bytes(base, 2, 2),
        ):
            assert isinstance(amount, Unknown) or amount >= 0
