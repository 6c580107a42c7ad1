"""A base's config.json, and what it says of the base's modules. The real models' names: test_contract_bases.py."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.core.check.base_layouts import ARCHITECTURES, LAYOUTS, TEXT_MODELS, WRAPPERS
from components.core.check.base_model import (
    BaseFacts,
    Module,
    base_model_of,
    longest_context,
    read_base_model,
    split_layer,
)
from components.core.errors import UserError
from tests.support.adapters import Json
from tests.support.closed import close

SIZES: dict[str, Json] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}
LLAMA: dict[str, Json] = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def written(directory: Path, config: Json | bytes) -> Path:
    path = directory / "config.json"
    path.write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    return path


def base(architecture: str = "LlamaForCausalLM", **changes: Json) -> BaseFacts:
    config = {key: value for key, value in {**SIZES, **changes}.items() if value != "absent"}
    return base_model_of(config, architecture, "0" * 64)


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 4096),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 4096),
        ({"max_position_embeddings": 9, "text_config": {"max_position_embeddings": 4096}}, 4096),
        # What stretches it, or says it in another way, or not at all.
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, None),
        ({"max_position_embeddings": 4096, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, None),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": None, "type": "yarn", "factor": 4.0}}, None),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "factor": 4.0}}, None),
        ({"max_position_embeddings": 4096, "model_max_length": 131072}, None),
        ({"max_position_embeddings": "4096"}, None),
        ({"max_position_embeddings": True}, None),
        ({}, None),
    ],
)
def test_the_longest_context(config: dict[str, Json], longest: int | None) -> None:
    assert longest_context(config) == longest


def widths(model: BaseFacts, name: str) -> tuple[int | None, int | None]:
    module = model.find(split_layer(name)[0])
    assert module is not None
    return module.inputs, module.outputs


def test_a_llama(tmp_path: Path) -> None:
    path = written(tmp_path, LLAMA)
    model = read_base_model(path)
    assert (model.architecture, model.known, model.layers) == ("LlamaForCausalLM", True, 2)
    assert model.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert model.modules == {
        "model.layers.{}.self_attn.q_proj": Module(64, 64),
        "model.layers.{}.self_attn.k_proj": Module(64, 32),
        "model.layers.{}.self_attn.v_proj": Module(64, 32),
        "model.layers.{}.self_attn.o_proj": Module(64, 64),
        "model.layers.{}.mlp.gate_proj": Module(64, 96),
        "model.layers.{}.mlp.up_proj": Module(64, 96),
        "model.layers.{}.mlp.down_proj": Module(96, 64),
        "model.embed_tokens": Module(256, 64, "embedding"),
        "lm_head": Module(64, 256, "output"),
    }


def test_the_directory_of_a_base_and_a_link_into_a_cache_do_as_well(tmp_path: Path) -> None:
    written(tmp_path, LLAMA)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").symlink_to("../config.json")
    assert read_base_model(tmp_path) == read_base_model(tmp_path / "snapshot")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"[]", "not a JSON object"),
        (b'{"hidden_size": 64, "hidden_size": 128}', 'the key "hidden_size" stands in it twice'),
        (b"{}", "no architectures"),
        (b'{"architectures": []}', "no architectures"),
        (b'{"architectures": "LlamaForCausalLM"}', "no architectures"),
        (b'{"architectures": [7]}', "no architectures"),
        (b'{"peft_type": "LORA"}', "this is an adapter's config"),
        (b" " * (4 * 1024 * 1024 + 1), "larger than 4 MiB"),
    ],
)
def test_what_is_no_base_is_refused_in_one_sentence(tmp_path: Path, config: bytes, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_base_model(written(tmp_path, config))


def test_a_base_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_base_model(tmp_path / "config.json")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="cannot be read"):
        read_base_model(tmp_path / "loop")
    with pytest.raises(UserError, match="NUL"):
        read_base_model(Path("a\0b"))
    with pytest.raises(UserError, match=r"xxx: cannot be read \(file name too long\)\.$"):
        read_base_model(tmp_path / ("x" * 300))
    with pytest.raises(UserError, match=rf"^{tmp_path}: holds no config\.json; name the config\.json of the base"):
        read_base_model(tmp_path)
    (tmp_path / "config.json").symlink_to("gone")
    with pytest.raises(UserError, match=r"config\.json: cannot be read \(no such file or directory\)\.$"):
        read_base_model(tmp_path)


def test_a_base_in_a_closed_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, LLAMA)
    close(tmp_path.parent, monkeypatch)
    for path in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(UserError, match=rf"^{path}: cannot be read \(permission denied\)\.$"):
            read_base_model(path)
    monkeypatch.undo()
    # The folder itself can be seen.
    close(tmp_path, monkeypatch)
    with pytest.raises(UserError, match=rf"^{tmp_path}/config\.json: cannot be read \(permission denied\)\.$"):
        read_base_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "queries", "keys"),
    [
        ({"head_dim": 32}, 128, 64),
        ({"head_dim": None}, 64, 32),
        ({"num_key_value_heads": "absent"}, 64, 64),
        ({"num_key_value_heads": None}, 64, 64),
        ({"num_attention_heads": "absent"}, None, None),
        ({"num_attention_heads": True, "head_dim": 16}, None, 32),
        ({"num_attention_heads": -4, "head_dim": 16}, None, 32),
    ],
)
def test_widths_of_attention(changes: dict[str, Json], queries: int | None, keys: int | None) -> None:
    model = base("LlamaForCausalLM", **changes)
    assert widths(model, "model.layers.0.self_attn.q_proj") == (64, queries)
    assert widths(model, "model.layers.0.self_attn.k_proj") == (64, keys)


def test_what_a_config_does_not_tell_is_not_known() -> None:
    # Their classes assume numbers of their own.
    assert widths(base("MistralForCausalLM", num_key_value_heads="absent"), "model.layers.0.self_attn.k_proj") == (
        64,
        None,
    )
    assert widths(base("Qwen3ForCausalLM"), "model.layers.0.self_attn.q_proj") == (64, 4 * 128)
    assert widths(base("GemmaForCausalLM"), "model.layers.0.self_attn.q_proj") == (64, 4 * 256)
    assert widths(base("GemmaForCausalLM", head_dim=None), "model.layers.0.self_attn.q_proj") == (64, None)
    assert base(num_hidden_layers="absent").layers is None


@pytest.mark.parametrize(
    ("architecture", "name", "expected"),
    [
        ("Phi3ForCausalLM", "model.layers.0.self_attn.qkv_proj", (64, 64 + 2 * 32)),
        ("Phi3ForCausalLM", "model.layers.0.mlp.gate_up_proj", (64, 192)),
        ("GPTNeoXForCausalLM", "gpt_neox.layers.0.attention.query_key_value", (64, 192)),
        ("BaichuanForCausalLM", "model.layers.0.self_attn.W_pack", (64, 192)),
        ("InternLM2ForCausalLM", "model.layers.0.attention.wqkv", (64, 128)),
    ],
)
def test_widths_of_fused_modules(architecture: str, name: str, expected: tuple[int, int]) -> None:
    assert widths(base(architecture), name) == expected


def test_what_vllm_refuses_in_a_base_it_serves() -> None:
    def refused(architecture: str) -> set[str]:
        return {name.rpartition(".")[2] for name, module in base(architecture).modules.items() if not module.served}

    assert refused("LlamaForCausalLM") == set()
    assert refused("Qwen2ForCausalLM") == {"embed_tokens", "lm_head"}
    assert refused("Glm4ForCausalLM") == {"embed_tokens", "lm_head", "gate_up_proj"}
    assert [name for name in ("LlamaForCausalLM", "GPT2LMHeadModel") if not base(name).takes_lora] == [
        "GPT2LMHeadModel"
    ]


def test_deepseek_has_one_or_two_steps_to_its_queries() -> None:
    sizes: dict[str, Json] = {
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
    }
    one, two = base("DeepseekV2ForCausalLM", **sizes), base("DeepseekV3ForCausalLM", **sizes, q_lora_rank=48)
    assert widths(one, "model.layers.0.self_attn.q_proj") == (64, 4 * 24)
    assert one.find("model.layers.{}.self_attn.q_a_proj") is None
    assert widths(two, "model.layers.0.self_attn.q_b_proj") == (48, 4 * 24)
    assert two.find("model.layers.{}.self_attn.q_proj") is None
    assert widths(two, "model.layers.0.self_attn.kv_b_proj") == (32, 4 * (16 + 24))


def test_experts_are_there_and_nothing_is_said_of_them() -> None:
    model = base("MixtralForCausalLM")
    for name in ("model.layers.0.mlp.experts.3.w1", "model.layers.1.block_sparse_moe.gate"):
        assert widths(model, name) == (None, None)
    assert model.has_experts
    assert model.adapted is None
    assert widths(model, "model.layers.0.self_attn.v_proj") == (64, 32)


@pytest.mark.parametrize(
    ("architecture", "name", "found"),
    [
        ("Gemma3ForConditionalGeneration", "model.language_model.layers.0.mlp.up_proj", True),
        ("Gemma3ForConditionalGeneration", "language_model.model.layers.0.mlp.up_proj", True),
        ("Gemma3ForConditionalGeneration", "model.layers.0.mlp.up_proj", False),
        ("Mistral3ForConditionalGeneration", "model.layers.0.mlp.up_proj", True),
        ("Idefics3ForConditionalGeneration", "model.text_model.layers.0.mlp.up_proj", True),
    ],
)
def test_the_language_model_of_a_multimodal_base(architecture: str, name: str, found: bool) -> None:
    model = base_model_of({"text_config": {**SIZES, "model_type": "llama"}}, architecture, "0")
    assert model.multimodal
    assert (model.find(split_layer(name)[0]) is not None) == found
    if not found:
        assert model.nearest(name) == "model.language_model.layers.0.mlp.up_proj"


def test_a_multimodal_base_whose_sizes_are_at_the_top() -> None:
    model = base("Qwen2VLForConditionalGeneration", vision_config={"depth": 1})
    assert widths(model, "model.layers.1.self_attn.k_proj") == (64, 32)
    tower = model.find("visual.blocks.{}.attn.qkv")
    assert tower is not None
    assert tower.kind == "tower"


def test_of_an_unknown_base_nothing_is_said() -> None:
    for model in (
        base("Future\x1bModel"),
        base_model_of({"text_config": {"model_type": "future"}}, "LlavaForConditionalGeneration", "0"),
        base_model_of({"text_config": {"model_type": ["llama"]}}, "LlavaForConditionalGeneration", "0"),
    ):
        assert (model.known, model.modules) == (False, {})
        assert model.architecture.isprintable()


def test_the_nearest_name() -> None:
    assert base().nearest("transformer.layers.7.self_attn.q_proj") == "model.layers.7.self_attn.q_proj"
    assert base().nearest("model.lm_head") == "lm_head"
    assert base().nearest("model.layers.7.attn.q_proj") is None


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("model.layers.31.mlp.up_proj", ("model.layers.{}.mlp.up_proj", 31)),
        ("model.layers.1.mlp.experts.2.w1", ("model.layers.{}.mlp.experts.2.w1", 1)),
        ("lm_head", ("lm_head", None)),
        ("model.layers.01.mlp", ("model.layers.01.mlp", None)),
        ("model.layers.٣.mlp", ("model.layers.٣.mlp", None)),
        ("model.layers.9999999.mlp", ("model.layers.9999999.mlp", None)),
    ],
)
def test_the_number_of_a_layer(name: str, split: tuple[str, int | None]) -> None:
    assert split_layer(name) == split


def test_the_tables_name_each_other() -> None:
    assert {served.layout for served in ARCHITECTURES.values()} <= set(LAYOUTS)
    assert set(TEXT_MODELS.values()) <= set(ARCHITECTURES)
    assert {wrapper.text_model for wrapper in WRAPPERS.values()} - {None} <= set(TEXT_MODELS)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=6,
)
KEYS = sorted({*SIZES, "head_dim", "text_config", "model_type", "n_embd", "multi_query_attention", "q_lora_rank"})


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), json_values), st.sampled_from([*ARCHITECTURES, *WRAPPERS, "Other"]))
def test_no_config_raises(config: dict[str, object], architecture: str) -> None:
    model = base_model_of(config, architecture, "0")
    assert all(
        size is None or size > 0 for module in model.modules.values() for size in (module.inputs, module.outputs)
    )


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.json; name the config\.json of the base model\.$"):
        read_base_model(tmp_path)
