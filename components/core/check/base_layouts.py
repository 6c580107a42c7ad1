"""Which modules the usual architectures have, how wide they are, and which of them vLLM adapts. A table and no logic.

Names and widths are those of transformers 5.19 (its `modeling_*.py`), which are the names PEFT writes. What vLLM makes
of them was read in vLLM 0.32.0: `embedding_modules`, `hf_to_vllm_mapper` and `SupportsLoRA` of every model class, and
for what `registry.py` leaves to the Transformers backend its `models/transformers/base.py`. It is the same in all of
`VERSIONS`. tests/e2e/test_contract_bases.py holds the table against both.

A module is written `name: inputs > outputs`. Widths are sums and products of the names in `WIDTHS`; `?` is a width that
differs from layer to layer or that config.json does not tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# The minor versions of vLLM that adapt, and leave out, what the table says.
VERSIONS = ((0, 32), (0, 33))

# What a width may be made of; components/core/check/base_model.py takes them from config.json.
WIDTHS = ("hidden", "q", "kv", "mlp", "vocab", "embed", "heads", "nope", "rope", "value", "q_rank", "kv_rank")

_QKV = {"self_attn.q_proj": "hidden > q", "self_attn.k_proj": "hidden > kv", "self_attn.v_proj": "hidden > kv"}
_ATTENTION = {**_QKV, "self_attn.o_proj": "q > hidden"}
_UP_DOWN = {"mlp.up_proj": "hidden > mlp", "mlp.down_proj": "mlp > hidden"}
_GATED = {"mlp.gate_proj": "hidden > mlp", **_UP_DOWN}
_LLAMA = {**_ATTENTION, **_GATED}
_PHI3 = {
    "self_attn.qkv_proj": "hidden > q+2*kv",
    "self_attn.o_proj": "q > hidden",
    "mlp.gate_up_proj": "hidden > 2*mlp",
    "mlp.down_proj": "mlp > hidden",
}
# Some layers are dense, others hold experts; which is which differs from model to model.
_EXPERTS = {"mlp.*": "? > ?"}


@dataclass(frozen=True)
class Layout:
    """The modules of one kind of language model."""

    modules: Mapping[str, str]
    """Of one layer: name in the layer to `inputs > outputs`. A last part `*` stands for whatever is below it."""
    layers: str = "layers"
    """What the list of layers is called, below `body`."""
    body: str = "model"
    """What stands before the layers."""
    embedding: str = "embed_tokens"
    """The token embedding, below `body`."""
    heads: tuple[str, ...] = ("lm_head",)
    """What the output layer at the top is called; the first is what transformers 5 says."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Modules below `body` outside of the layers."""
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names in config.json where they are not those of Llama: "hidden" to ("n_embd",), the first present one counts."""
    head_dim: int | None = None
    """Width of a head where config.json gives none; None: hidden / heads."""
    all_heads_have_keys: bool = False
    """Key/value heads where config.json gives no number: as many as heads. Otherwise they are not known."""
    mlp_of_hidden: int | None = None
    """Width of the MLP where config.json gives none, as a multiple of hidden."""


_GPT_KEYS = {
    "hidden": ("n_embd", "hidden_size"),
    "heads": ("n_head", "num_attention_heads"),
    "layers": ("n_layer", "num_hidden_layers"),
    "mlp": ("n_inner",),
}

LAYOUTS: Mapping[str, Layout] = {
    "llama": Layout(_LLAMA, all_heads_have_keys=True),
    # As llama, except for what is assumed where config.json says nothing.
    "llama-strict": Layout(_LLAMA),
    "llama-128": Layout(_LLAMA, head_dim=128),
    "llama-256": Layout(_LLAMA, head_dim=256),
    "up-down": Layout({**_ATTENTION, **_UP_DOWN}, all_heads_have_keys=True),
    "phi3": Layout(_PHI3, all_heads_have_keys=True),
    "glm": Layout({**_ATTENTION, "mlp.gate_up_proj": "hidden > 2*mlp", "mlp.down_proj": "mlp > hidden"}, head_dim=128),
    "phi": Layout(
        {**_QKV, "self_attn.dense": "q > hidden", "mlp.fc1": "hidden > mlp", "mlp.fc2": "mlp > hidden"},
        all_heads_have_keys=True,
    ),
    "starcoder2": Layout({**_ATTENTION, "mlp.c_fc": "hidden > mlp", "mlp.c_proj": "mlp > hidden"}),
    "baichuan": Layout({"self_attn.W_pack": "hidden > 3*hidden", "self_attn.o_proj": "hidden > hidden", **_GATED}),
    "internlm2": Layout(
        {
            "attention.wqkv": "hidden > q+2*kv",
            "attention.wo": "q > hidden",
            "feed_forward.w1": "hidden > mlp",
            "feed_forward.w3": "hidden > mlp",
            "feed_forward.w2": "mlp > hidden",
        },
        embedding="tok_embeddings",
        heads=("output",),
    ),
    "exaone": Layout(
        {
            "attn.attention.q_proj": "hidden > q",
            "attn.attention.k_proj": "hidden > kv",
            "attn.attention.v_proj": "hidden > kv",
            "attn.attention.out_proj": "q > hidden",
            "mlp.c_fc_0": "hidden > mlp",
            "mlp.c_fc_1": "hidden > mlp",
            "mlp.c_proj": "mlp > hidden",
        },
        body="transformer",
        layers="h",
        embedding="wte",
        keys={"layers": ("num_layers", "num_hidden_layers")},
    ),
    "chatglm": Layout(
        {
            "self_attention.query_key_value": "hidden > q+2*kv",
            "self_attention.dense": "q > hidden",
            "mlp.dense_h_to_4h": "hidden > 2*mlp",
            "mlp.dense_4h_to_h": "mlp > hidden",
        },
        body="transformer",
        layers="encoder.layers",
        embedding="embedding.word_embeddings",
        heads=(),
        others={"output_layer": "hidden > vocab"},
        keys={
            "layers": ("num_layers",),
            "mlp": ("ffn_hidden_size",),
            "kv_heads": ("multi_query_group_num",),
            "head_dim": ("kv_channels",),
            "vocab": ("padded_vocab_size", "vocab_size"),
        },
    ),
    "falcon": Layout(
        {
            "self_attention.query_key_value": "hidden > ?",
            "self_attention.dense": "hidden > hidden",
            "mlp.dense_h_to_4h": "hidden > mlp",
            "mlp.dense_4h_to_h": "mlp > hidden",
        },
        body="transformer",
        layers="h",
        embedding="word_embeddings",
        keys={"mlp": ("ffn_hidden_size",)},
        mlp_of_hidden=4,
    ),
    "gpt-neox": Layout(
        {
            "attention.query_key_value": "hidden > 3*hidden",
            "attention.dense": "hidden > hidden",
            "mlp.dense_h_to_4h": "hidden > mlp",
            "mlp.dense_4h_to_h": "mlp > hidden",
        },
        body="gpt_neox",
        embedding="embed_in",
        heads=("lm_head", "embed_out"),
    ),
    "gpt2": Layout(
        {
            "attn.c_attn": "hidden > 3*hidden",
            "attn.c_proj": "hidden > hidden",
            "mlp.c_fc": "hidden > mlp",
            "mlp.c_proj": "mlp > hidden",
        },
        body="transformer",
        layers="h",
        embedding="wte",
        keys=_GPT_KEYS,
        mlp_of_hidden=4,
        others={"wpe": "? > ?"},
    ),
    "gpt-bigcode": Layout(
        {
            "attn.c_attn": "hidden > ?",
            "attn.c_proj": "hidden > hidden",
            "mlp.c_fc": "hidden > mlp",
            "mlp.c_proj": "mlp > hidden",
        },
        body="transformer",
        layers="h",
        embedding="wte",
        keys=_GPT_KEYS,
        mlp_of_hidden=4,
        others={"wpe": "? > ?"},
    ),
    "gptj": Layout(
        {
            "attn.q_proj": "hidden > hidden",
            "attn.k_proj": "hidden > hidden",
            "attn.v_proj": "hidden > hidden",
            "attn.out_proj": "hidden > hidden",
            "mlp.fc_in": "hidden > mlp",
            "mlp.fc_out": "mlp > hidden",
        },
        body="transformer",
        layers="h",
        embedding="wte",
        keys=_GPT_KEYS,
        mlp_of_hidden=4,
    ),
    "opt": Layout(
        {
            "self_attn.q_proj": "hidden > hidden",
            "self_attn.k_proj": "hidden > hidden",
            "self_attn.v_proj": "hidden > hidden",
            "self_attn.out_proj": "hidden > hidden",
            "fc1": "hidden > mlp",
            "fc2": "mlp > hidden",
        },
        body="model.decoder",
        keys={"mlp": ("ffn_dim",), "embed": ("word_embed_proj_dim", "hidden_size")},
        others={"embed_positions": "? > ?", "project_in": "embed > hidden", "project_out": "hidden > embed"},
    ),
    "bloom": Layout(
        {
            "self_attention.query_key_value": "hidden > 3*hidden",
            "self_attention.dense": "hidden > hidden",
            "mlp.dense_h_to_4h": "hidden > 4*hidden",
            "mlp.dense_4h_to_h": "4*hidden > hidden",
        },
        body="transformer",
        layers="h",
        embedding="word_embeddings",
        keys={"hidden": ("hidden_size", "n_embed"), "layers": ("n_layer", "num_hidden_layers")},
    ),
    "mpt": Layout(
        {
            "attn.Wqkv": "hidden > 3*hidden",
            "attn.out_proj": "hidden > hidden",
            "ffn.up_proj": "hidden > ?",
            "ffn.down_proj": "? > hidden",
        },
        body="transformer",
        layers="blocks",
        embedding="wte",
        keys={"hidden": ("d_model",), "layers": ("n_layers",), "heads": ("n_heads",)},
    ),
    "experts": Layout({**_ATTENTION, **_EXPERTS}),
    "experts-128": Layout({**_ATTENTION, **_EXPERTS}, head_dim=128),
    "experts-64": Layout({**_ATTENTION, **_EXPERTS}, head_dim=64),
    # transformers 5 calls mlp what 4 called block_sparse_moe.
    "mixtral": Layout({**_ATTENTION, **_EXPERTS, "block_sparse_moe.*": "? > ?"}),
    "deepseek": Layout({**_ATTENTION, **_EXPERTS}),
    "deepseek-mla": Layout(
        {
            "self_attn.q_proj": "hidden > heads*nope+heads*rope",
            "self_attn.q_a_proj": "hidden > q_rank",
            "self_attn.q_b_proj": "q_rank > heads*nope+heads*rope",
            "self_attn.kv_a_proj_with_mqa": "hidden > kv_rank+rope",
            "self_attn.kv_b_proj": "kv_rank > heads*nope+heads*value",
            "self_attn.o_proj": "heads*value > hidden",
            **_EXPERTS,
        }
    ),
}

# The embedding modules of a class in vLLM, by last part: `embedding_modules`. What is not named is refused.
_BOTH = ("embed_tokens", "lm_head")
_INPUT = ("embed_tokens",)
_NONE = ()


@dataclass(frozen=True)
class Served:
    """How vLLM serves an architecture."""

    layout: str
    """A key of `LAYOUTS`."""
    embeddings: tuple[str, ...] = _NONE
    """Embedding and output modules that take LoRA, by last part."""
    lora: bool = True
    """False: its class is no `SupportsLoRA`, and vLLM does not start with adapters."""
    refused: tuple[str, ...] = ()
    """Other modules that vLLM refuses LoRA for, by last part."""
    any_body: bool = False
    """True for the Transformers backend, whose mapper puts the body's name right or adds it."""


ARCHITECTURES: Mapping[str, Served] = {
    "ApertusForCausalLM": Served("up-down", _BOTH),
    "ArceeForCausalLM": Served("up-down", _INPUT, any_body=True),
    "BaiChuanForCausalLM": Served("baichuan"),
    "BaichuanForCausalLM": Served("baichuan"),
    "BloomForCausalLM": Served("bloom", lora=False),
    "ChatGLMForConditionalGeneration": Served("chatglm", refused=("output_layer",)),
    "ChatGLMModel": Served("chatglm", refused=("output_layer",)),
    "Cohere2ForCausalLM": Served("llama", _INPUT),
    "CohereForCausalLM": Served("llama", _INPUT),
    "DeepseekForCausalLM": Served("deepseek"),
    "DeepseekV2ForCausalLM": Served("deepseek-mla"),
    "DeepseekV3ForCausalLM": Served("deepseek-mla"),
    "Ernie4_5ForCausalLM": Served("llama-128", _BOTH),
    "Exaone4ForCausalLM": Served("llama-strict", _BOTH),
    "ExaoneForCausalLM": Served("exaone", ("wte", "lm_head")),
    "FalconForCausalLM": Served("falcon", lora=False),
    "GPT2LMHeadModel": Served("gpt2", lora=False),
    "GPTBigCodeForCausalLM": Served("gpt-bigcode", refused=("wpe",), any_body=True),
    "GPTJForCausalLM": Served("gptj", lora=False),
    "GPTNeoXForCausalLM": Served("gpt-neox", any_body=True),
    "Gemma2ForCausalLM": Served("llama-256"),
    "Gemma3ForCausalLM": Served("llama-256"),
    "GemmaForCausalLM": Served("llama-256"),
    # Its packed_modules_mapping expects gate_proj and up_proj, and the model has gate_up_proj.
    "Glm4ForCausalLM": Served("glm", refused=("gate_up_proj",)),
    "GlmForCausalLM": Served("glm", _INPUT, any_body=True),
    "GptOssForCausalLM": Served("experts-64"),
    "GraniteForCausalLM": Served("llama", _BOTH),
    "HyperCLOVAXForCausalLM": Served("llama-strict", _BOTH),
    "InternLM2ForCausalLM": Served("internlm2"),
    "InternLM3ForCausalLM": Served("llama-strict", _BOTH),
    "LLaMAForCausalLM": Served("llama", _BOTH),
    "LlamaForCausalLM": Served("llama", _BOTH),
    "MPTForCausalLM": Served("mpt"),
    "MiniCPMForCausalLM": Served("llama", _BOTH),
    "Ministral3ForCausalLM": Served("llama-128"),
    "MistralForCausalLM": Served("llama-strict"),
    "MixtralForCausalLM": Served("mixtral", _BOTH),
    "MptForCausalLM": Served("mpt"),
    "NemotronForCausalLM": Served("up-down", _BOTH),
    "OPTForCausalLM": Served("opt", refused=("embed_positions",)),
    "Olmo2ForCausalLM": Served("llama", _INPUT, any_body=True),
    "Olmo3ForCausalLM": Served("llama", _INPUT, any_body=True),
    "OlmoForCausalLM": Served("llama", _INPUT, any_body=True),
    "OlmoeForCausalLM": Served("experts"),
    "Phi3ForCausalLM": Served("phi3", _BOTH),
    "PhiForCausalLM": Served("phi", _INPUT, any_body=True),
    "Qwen2ForCausalLM": Served("llama-strict"),
    "Qwen2MoeForCausalLM": Served("experts"),
    "Qwen3ForCausalLM": Served("llama-128", _BOTH),
    "Qwen3MoeForCausalLM": Served("experts", _BOTH),
    "SeedOssForCausalLM": Served("llama-128", _INPUT, any_body=True),
    "SmolLM3ForCausalLM": Served("llama-strict", _INPUT, any_body=True),
    "SolarForCausalLM": Served("llama", _BOTH),
    "StableLmForCausalLM": Served("llama-strict", lora=False),
    "Starcoder2ForCausalLM": Served("starcoder2", _INPUT, any_body=True),
}

# The language model inside a multimodal one: its config's `model_type` to a key of `ARCHITECTURES`.
TEXT_MODELS: Mapping[str, str] = {
    "cohere2": "Cohere2ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}


@dataclass(frozen=True)
class Wrapper:
    """How vLLM finds the language model of a multimodal one by an adapter's names."""

    bodies: tuple[str, ...]
    """What may stand in place of a language model's `model`; the first is what transformers 5 writes."""
    towers: tuple[str, ...]
    """Beginnings of names outside of the language model: vLLM leaves LoRA for them out unless it is told otherwise."""
    text_model: str | None = None
    """The `model_type` of its language model where config.json has no `text_config`."""
    own_head: bool = False
    """True where vLLM's class has embedding and output of its own, which take no LoRA."""
    lora: bool = True


# The last parts of what the wrappers below have outside of their language models, as far as vLLM takes LoRA for it.
TOWER_MODULES = frozenset(
    {"0", "2", "fc1", "fc2", "linear_1", "linear_2", "linear_fc1", "linear_fc2", "out_proj", "proj", "qkv"}
)

_NEW, _OLD, _PLAIN = "model.language_model", "language_model.model", "model"
_LLAVA = Wrapper(
    (_NEW, _OLD), ("model.vision_tower", "vision_tower", "model.multi_modal_projector", "multi_modal_projector")
)
_VISUAL = ("model.visual", "visual")

WRAPPERS: Mapping[str, Wrapper] = {
    "Cohere2VisionForConditionalGeneration": Wrapper(_LLAVA.bodies, _LLAVA.towers, lora=False),
    "Gemma3ForConditionalGeneration": _LLAVA,
    "Glm4vForConditionalGeneration": Wrapper((_NEW, _OLD), _VISUAL),
    "Idefics3ForConditionalGeneration": Wrapper(
        ("model.text_model",), ("model.vision_model", "model.connector"), own_head=True
    ),
    "InternVLChatModel": Wrapper((_OLD,), ("vision_model", "mlp1")),
    "InternVLForConditionalGeneration": _LLAVA,
    "Lfm2VlForConditionalGeneration": _LLAVA,
    "LlavaForConditionalGeneration": _LLAVA,
    "LlavaNextForConditionalGeneration": _LLAVA,
    "LlavaNextVideoForConditionalGeneration": _LLAVA,
    "LlavaOnevisionForConditionalGeneration": Wrapper(_LLAVA.bodies, _LLAVA.towers, lora=False),
    "Mistral3ForConditionalGeneration": Wrapper((_NEW, _OLD, _PLAIN), _LLAVA.towers),
    "PaliGemmaForConditionalGeneration": _LLAVA,
    "Phi3VForCausalLM": Wrapper((_PLAIN, _OLD), ("model.vision_embed_tokens",), "phi3", lora=False),
    "Qwen2AudioForConditionalGeneration": Wrapper((_OLD, _NEW), ("audio_tower", "multi_modal_projector"), lora=False),
    "Qwen2VLForConditionalGeneration": Wrapper((_NEW, _OLD, _PLAIN), _VISUAL, "qwen2"),
    "Qwen2_5_VLForConditionalGeneration": Wrapper((_NEW, _OLD, _PLAIN), _VISUAL, "qwen2"),
    "Qwen3VLForConditionalGeneration": Wrapper((_NEW, _OLD), _VISUAL),
    "Qwen3VLMoeForConditionalGeneration": Wrapper((_NEW, _OLD), _VISUAL),
    "SmolVLMForConditionalGeneration": Wrapper(
        ("model.text_model",), ("model.vision_model", "model.connector"), own_head=True
    ),
}
