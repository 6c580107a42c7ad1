"""How large a base is, from its config.json: the matrices that `components.core.capacity` adds up.

For an architecture whose modules are not known here, or not with their widths, nothing is claimed. What is assumed
where config.json says nothing is what transformers 5.19 assumes; tests/e2e/test_contract_capacity.py holds it.
"""

from __future__ import annotations

from collections.abc import Mapping

from components.core.capacity import BaseSizes, Kind, Matrix, Quantization, Unknown
from components.core.check.base_model import BaseFacts, Module
from components.core.errors import printable

# The second matrix of a pair is split by its inputs: RowParallelLinear in vllm/model_executor/models/.
_ROWS = frozenset({"o_proj", "out_proj", "wo", "dense", "down_proj", "w2", "fc2", "fc_out", "c_proj", "dense_4h_to_h"})
_WHOLE = frozenset({"project_in", "project_out"})
# Queries, keys and values in one matrix.
_FUSED = frozenset({"qkv_proj", "wqkv", "query_key_value", "W_pack", "c_attn"})
_ATTENTION_OUT = frozenset({"o_proj", "wo", "dense"})

# Whose classes in transformers use the embedding for logits, and only a part of the context in some layers, unless
# config.json says otherwise.
_TIED = frozenset(
    {
        "CohereForCausalLM",
        "Cohere2ForCausalLM",
        "Ernie4_5ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "OPTForCausalLM",
        "SmolLM3ForCausalLM",
        "Starcoder2ForCausalLM",
    }
)
_WINDOWED = frozenset(
    {
        "Cohere2ForCausalLM",
        "Exaone4ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "MistralForCausalLM",
        "Olmo3ForCausalLM",
    }
)
# Adapters are held against the names of one fused matrix, and slots made for two: base_layouts.py says why.
_MISNAMED = frozenset({"Glm4ForCausalLM"})


def sizes_of(config: Mapping[str, object], base: BaseFacts) -> BaseSizes | Unknown:
    """The sizes of the base that a parsed config.json describes; whatever is in it, nothing is raised."""
    if base.multimodal:
        return Unknown(f"what {base.architecture} has beside its language model is not counted")
    if not base.known or base.architecture in _MISNAMED:
        return Unknown(f"the modules of {base.architecture} are not known here")
    if base.has_experts:
        return Unknown(f"the experts of {base.architecture} are not counted")
    if base.layers is None:
        return Unknown("config.json does not say how many layers the base has")
    matrices: dict[str, Matrix] = {}
    key_width: int | Unknown = Unknown(f"the KV cache of {base.architecture} is not that of keys and values alone")
    out = next((m.inputs for name, m in base.modules.items() if _last(name) in _ATTENTION_OUT), None)
    for template, module in base.modules.items():
        # Other spellings of the same module follow the first.
        name = module.kind if module.kind == "output" else _last(template)
        if name in matrices:
            continue
        if module.inputs is None or module.outputs is None:
            return Unknown(f"config.json does not say how wide {_last(template)} is")
        keys = 0
        if name in _FUSED and out is not None:
            keys = module.outputs - out
            key_width = keys // 2
        elif name in ("k_proj", "v_proj"):
            keys = key_width = module.outputs
        matrices[name] = Matrix(
            _last(template),
            module.inputs,
            module.outputs,
            _kind(template, module),
            base.layers if "{}" in template else 1,
            keys,
            module.served,
        )
    return BaseSizes(
        tuple(matrices.values()),
        base.layers,
        _is_tied(config, base.architecture),
        _size(config, "num_attention_heads"),
        _size(config, "num_key_value_heads"),
        _window(config, base.architecture) or key_width,
        quantization_of(config),
    )


def quantization_of(config: Mapping[str, object]) -> Quantization | Unknown | None:
    """What a config.json says of the weights' bits; None where it says nothing.

    A scale has 16 bits, a zero point as many as a weight: vllm/model_executor/layers/quantization/ of vLLM 0.32.0. One
    scale for a whole matrix or a row of it counts for nothing.
    """
    if config.get("compression_config") is not None:
        return Unknown("what a weight takes by its compression_config is not known here")
    given = config.get("quantization_config")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        return Unknown("its quantization_config is no mapping")
    method = given.get("quant_method")
    unknown = Unknown(f"what a weight quantised by {printable(str(method))} takes is not known here")
    if given.get("modules_to_not_convert") or given.get("lm_head") or given.get("dynamic"):
        return unknown
    if method == "fp8" and not given.get("ignored_layers") and not given.get("weight_block_size"):
        return Quantization(8)
    bits, group = _size(given, "bits"), _size(given, "group_size")
    if method in ("awq", "gptq") and bits in (4, 8) and group:
        return Quantization(bits, 16 + bits, group)
    return unknown


def _kind(template: str, module: Module) -> Kind:
    if module.kind in ("embedding", "output"):
        return "embedding" if module.kind == "embedding" else "output"
    name = _last(template)
    return "row" if name in _ROWS else "whole" if name in _WHOLE else "column"


def _is_tied(config: Mapping[str, object], architecture: str) -> bool:
    said = config.get("tie_word_embeddings")
    return said if isinstance(said, bool) else architecture in _TIED


def _window(config: Mapping[str, object], architecture: str) -> Unknown | None:
    """Set where some layers keep less than the whole context: what that saves depends on how vLLM groups them."""
    layers = config.get("layer_types")
    if isinstance(layers, list) and any(layer != "full_attention" for layer in layers):
        return Unknown("some of its layers have no full attention")
    if "sliding_window" not in config:
        windowed = architecture in _WINDOWED
    else:
        windowed = config["sliding_window"] is not None and config.get("use_sliding_window") is not False
    return Unknown("its layers attend to a sliding window") if windowed else None


def _size(config: Mapping[str, object], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _last(name: str) -> str:
    return name.rpartition(".")[2]
