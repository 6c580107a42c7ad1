"""What is found in an adapter's tensors: nothing in a sound one, and the right rule for each fault."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from components.core.check.base_layouts import ARCHITECTURES, WRAPPERS
from components.core.check.base_model import BaseFacts, base_model_of
from components.core.check.tensor_pairs import endings
from components.core.check.tensor_rules import tensor_findings
from components.core.findings import Finding
from components.core.safetensors_header import DTYPE_BITS, Tensor
from components.core.vllm_loader import loader_rules

PEFT = "base_model.model."
PLACE = "adapters/acme/adapter_model.safetensors"

Tensors = dict[str, Tensor]


def matrix(*shape: int, dtype: str = "F32") -> Tensor:
    elements = 1
    for size in shape:
        elements *= size
    return Tensor(shape, elements, dtype)


def llama(**changes: object) -> BaseFacts:
    return base_of("LlamaForCausalLM", **changes)


def base_of(architecture: str, **changes: object) -> BaseFacts:
    sizes: dict[str, object] = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": 256,
    }
    return base_model_of({**sizes, **changes}, architecture, "0" * 64)


def adapter_for(base: BaseFacts, rank: int = 4, layers: int = 2) -> Tensors:
    """A matrix pair for every module of the base that vLLM adapts and whose widths are known, in its first spelling."""
    tensors: Tensors = {}
    seen = set()
    for template, module in base.modules.items():
        tail = template.rpartition("{}")[2] if "{}" in template else template.rpartition(".")[2]
        if tail in seen or not module.served or module.inputs is None or module.outputs is None:
            continue
        seen.add(tail)
        a, b = (
            (".lora_embedding_A", ".lora_embedding_B")
            if module.kind == "embedding"
            else (".lora_A.weight", ".lora_B.weight")
        )
        for layer in range(layers) if "{}" in template else [0]:
            name = PEFT + template.replace("{}", str(layer))
            tensors[name + a] = matrix(rank, module.inputs)
            tensors[name + b] = matrix(module.outputs, rank)
    return tensors


def pair(module: str, rank: int = 4, inputs: int = 64, outputs: int = 64) -> Tensors:
    return {
        f"{PEFT}{module}.lora_A.weight": matrix(rank, inputs),
        f"{PEFT}{module}.lora_B.weight": matrix(outputs, rank),
    }


Q = "model.layers.0.self_attn.q_proj"
CONFIG: Mapping[str, object] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def found(
    tensors: Tensors,
    base: BaseFacts | None = None,
    config: Mapping[str, object] = CONFIG,
    vllm: str | None = None,
    lora_target_modules: tuple[str, ...] | None = None,
) -> list[Finding]:
    findings = list(tensor_findings(config, tensors, PLACE, loader_rules(vllm), base, lora_target_modules))
    for finding in findings:
        assert finding.path == PLACE
        assert str(finding).isprintable()
        assert len(finding.message) < 1200
    rules = [(finding.severity, finding.rule) for finding in findings]
    assert len(set(rules)) == len(rules), "one finding for each kind"
    return findings


def verdicts(findings: list[Finding]) -> set[tuple[str, str]]:
    return {(finding.severity, finding.rule) for finding in findings}


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


# --- sound adapters ---------------------------------------------------------------------------------------

SIZES = st.fixed_dictionaries(
    {
        "num_attention_heads": st.integers(1, 4).map(lambda n: 2 * n),
        "head_dim": st.sampled_from([8, 16]),
        "intermediate_size": st.integers(1, 9).map(lambda n: 16 * n),
        "num_hidden_layers": st.integers(1, 12),
        "vocab_size": st.integers(100, 300),
    }
)
GENERATING = sorted(name for name, served in ARCHITECTURES.items() if served.lora)
MULTIMODAL = sorted(name for name, wrapper in WRAPPERS.items() if wrapper.lora)


def some_base(architecture: str, sizes: Mapping[str, int]) -> BaseFacts:
    hidden = sizes["num_attention_heads"] * sizes["head_dim"]
    others = {
        "num_layers": sizes["num_hidden_layers"],
        "n_layer": sizes["num_hidden_layers"],
        "n_layers": sizes["num_hidden_layers"],
        "hidden_size": hidden,
        "n_embd": hidden,
        "d_model": hidden,
        "ffn_dim": 48,
        "num_key_value_heads": 2,
        "model_type": "qwen3",
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    }
    config: dict[str, object] = {**sizes, **others}
    return base_model_of({"text_config": config} if architecture in WRAPPERS else config, architecture, "0" * 64)


@settings(deadline=None)
@given(st.sampled_from([*GENERATING, *MULTIMODAL]), SIZES, st.integers(1, 256))
def test_an_adapter_made_for_its_base_has_no_findings(architecture: str, sizes: dict[str, int], rank: int) -> None:
    base = some_base(architecture, sizes)
    tensors = adapter_for(base, rank, sizes["num_hidden_layers"])
    assert tensors
    assert found(tensors, base, {**CONFIG, "r": rank}) == []
    assert found(tensors, None, {**CONFIG, "r": rank}) == []


def test_names_without_the_prefix_are_as_good() -> None:
    tensors = {name.removeprefix(PEFT): tensor for name, tensor in adapter_for(llama()).items()}
    assert found(tensors, llama()) == []


def test_the_untouched_embeddings_that_peft_saves_depend_on_the_version() -> None:
    tensors = {
        **adapter_for(llama()),
        f"{PEFT}lm_head.base_layer.weight": matrix(256, 64),
        f"{PEFT}model.embed_tokens.base_layer.weight": matrix(256, 64),
    }
    assert found(tensors, llama(), vllm="0.12.0") == []
    refused = only(found(tensors, llama(), vllm="0.11.2"))
    assert (refused.severity, refused.rule) == ("error", "base-embeddings")
    assert "2 of 34 tensors" in refused.message
    assert "0.11.2" in refused.message


# --- one fault, one rule ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    make: Callable[[Tensors, str], Tensors]
    """What happens to the tensors, and to the module whose name is given."""
    rule: str
    needs_base: bool = False


def halves(module: str) -> tuple[str, str]:
    return f"{PEFT}{module}.lora_A.weight", f"{PEFT}{module}.lora_B.weight"


def changed(tensors: Tensors, module: str, side: int, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Tensors:
    name = halves(module)[side]
    return {**tensors, name: matrix(*change(tensors[name].shape))}


def renamed(tensors: Tensors, module: str, new: str) -> Tensors:
    old = f"{PEFT}{module}."
    return {
        f"{PEFT}{new}.{name.removeprefix(old)}" if name.startswith(old) else name: tensor
        for name, tensor in tensors.items()
    }


def other_rank(tensors: Tensors, module: str) -> Tensors:
    once = changed(tensors, module, 0, lambda shape: (shape[0] + 1, shape[1]))
    return changed(once, module, 1, lambda shape: (shape[0], shape[1] + 1))


FAULTS = {
    "a dropped half": Fault(lambda t, m: {n: x for n, x in t.items() if n != halves(m)[1]}, "half-a-pair"),
    "the other half dropped": Fault(lambda t, m: {n: x for n, x in t.items() if n != halves(m)[0]}, "half-a-pair"),
    "an empty A": Fault(lambda t, m: changed(t, m, 0, lambda shape: (0, shape[1])), "empty-tensor"),
    "an empty B": Fault(lambda t, m: changed(t, m, 1, lambda shape: (0,)), "empty-tensor"),
    "one dimension": Fault(lambda t, m: changed(t, m, 0, lambda shape: (shape[0] * shape[1],)), "dimensions"),
    "three dimensions": Fault(lambda t, m: changed(t, m, 1, lambda shape: (1, *shape)), "dimensions"),
    "no dimension": Fault(lambda t, m: changed(t, m, 0, lambda shape: ()), "dimensions"),
    "another rank of A": Fault(lambda t, m: changed(t, m, 0, lambda shape: (shape[0] + 1, shape[1])), "ranks-differ"),
    "another rank of both": Fault(other_rank, "rank"),
    "a name of a trainer": Fault(lambda t, m: renamed(t, m, f"module.{m}"), "training-wrapper"),
    "a compiled model": Fault(lambda t, m: renamed(t, m, f"_orig_mod.{m}"), "training-wrapper"),
    "an empty part": Fault(lambda t, m: renamed(t, m, f"{m}."), "module-name"),
    "a newline": Fault(lambda t, m: renamed(t, m, f"\n{m}"), "module-name"),
    "wider": Fault(lambda t, m: changed(t, m, 0, lambda shape: (shape[0], shape[1] + 8)), "width", True),
    "narrower": Fault(lambda t, m: changed(t, m, 1, lambda shape: (shape[0] // 2, shape[1])), "width", True),
    "an extra model.": Fault(lambda t, m: renamed(t, m, f"model.{m}"), "not-in-base", True),
    "a missing model.": Fault(lambda t, m: renamed(t, m, m.removeprefix("model.")), "not-in-base", True),
    "names of a multimodal base": Fault(lambda t, m: renamed(t, m, f"language_{m}"), "not-in-base", True),
    "a layer too many": Fault(lambda t, m: renamed(t, m, m.replace(".layers.", ".layers.7")), "layer-beyond", True),
    "an unknown last part": Fault(lambda t, m: renamed(t, m, f"{m}_x"), "unknown-module", True),
    "a fused module": Fault(lambda t, m: renamed(t, m, m.rpartition(".")[0] + ".qkv_proj"), "unknown-module", True),
    "a number for a name": Fault(lambda t, m: renamed(t, m, f"{m}.0"), "unknown-module", True),
}
LINEAR = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.up_proj",
    "mlp.down_proj",
]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@settings(deadline=None)
@given(
    st.sampled_from(["LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"]),
    SIZES,
    st.integers(1, 64),
    st.data(),
)
def test_a_single_fault_is_an_error_of_its_rule(
    fault: Fault, architecture: str, sizes: dict[str, int], rank: int, data: st.DataObject
) -> None:
    base = some_base(architecture, sizes)
    layer = data.draw(st.integers(0, sizes["num_hidden_layers"] - 1))
    module = f"model.layers.{layer}.{data.draw(st.sampled_from(LINEAR))}"
    tensors = fault.make(adapter_for(base, rank, sizes["num_hidden_layers"]), module)
    rules = {rule for severity, rule in verdicts(found(tensors, base, {**CONFIG, "r": rank})) if severity == "error"}
    if fault.needs_base:
        assert rules == {fault.rule}
    else:
        assert fault.rule in rules
        bare = verdicts(found(tensors, None, {**CONFIG, "r": rank}))
        assert ("error", fault.rule) in bare


REFUSED = {
    f"{PEFT}{Q}.lora_magnitude_vector": "dora",
    f"{PEFT}{Q}.lora_magnitude_vector.weight": "dora",
    f"{PEFT}{Q}.lora_B.bias": "bias-tensor",
    f"{PEFT}{Q}.base_layer.bias": "bias-tensor",
    f"{PEFT}lm_head.weight": "full-weights",
    f"{PEFT}model.layers.0.input_layernorm.weight": "full-weights",
    f"{PEFT}model.embed_tokens.trainable_tokens_delta": "trainable-tokens",
    f"{PEFT}model.embed_tokens.token_adapter.trainable_tokens_delta": "trainable-tokens",
    f"{PEFT}{Q}.lora_A.default.weight": "adapter-name",
    f"{PEFT}{Q}.lora_A.weight.absmax": "unsupported-tensor",
    f"{PEFT}{Q}.lora_A": "unsupported-tensor",
    "prompt_embeddings": "not-lora",
    f"{PEFT}{Q}.ia3_l": "not-lora",
    f"{PEFT}{Q}.vera_lambda_b": "not-lora",
    f"{PEFT}{Q}.lora_E": "not-lora",
    f"{PEFT}score.weight": "classification-head",
}


@pytest.mark.parametrize(("name", "rule"), REFUSED.items())
def test_a_tensor_that_vllm_refuses(name: str, rule: str) -> None:
    findings = found({**pair(Q), name: matrix(64, 64)}, llama(), {**CONFIG, "use_dora": False, "bias": "none"})
    assert verdicts(findings) == {("error", rule)}
    assert findings[0].subject == name
    assert "1 of 3 tensors" in findings[0].message


def test_a_head_may_be_loaded_for_a_base_that_classifies() -> None:
    tensors = {**pair(Q), f"{PEFT}score.weight": matrix(3, 64)}
    listed = {**CONFIG, "modules_to_save": ["score"]}
    assert verdicts(found(tensors, None, listed, "0.31.0")) == {("warning", "classification-head")}
    assert verdicts(found(tensors, None, listed, "0.30.0")) == {("error", "classification-head")}
    assert verdicts(found(tensors, llama(), listed)) == {("error", "classification-head")}
    assert verdicts(found(tensors, None)) == {("error", "classification-head")}


def test_merging_is_the_advice_for_whole_modules() -> None:
    finding = only(found({**pair(Q), f"{PEFT}lm_head.weight": matrix(256, 64)}, llama()))
    assert "merge the adapter" in finding.message


def test_nothing_to_serve() -> None:
    assert verdicts(found({})) == {("error", "no-lora-tensors")}
    assert verdicts(found({f"{PEFT}lm_head.base_layer.weight": matrix(2, 2)})) == {("error", "no-lora-tensors")}
    assert verdicts(found({"prompt_embeddings": matrix(2, 2)})) == {("error", "not-lora")}


def test_the_same_matrix_under_two_names() -> None:
    tensors = {**pair(Q), f"{Q}.lora_A.weight": matrix(4, 64)}
    finding = only(found(tensors, llama()))
    assert (finding.severity, finding.rule) == ("error", "twice")
    assert finding.message.count(Q) == 2


def test_a_repeated_prefix_is_what_vllm_cuts_off() -> None:
    tensors = {PEFT + name: tensor for name, tensor in pair(Q).items()}
    assert verdicts(found(tensors, llama())) == {("warning", "repeated-prefix")}


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_types(dtype: str) -> None:
    tensors = {name: Tensor(tensor.shape, tensor.elements, dtype) for name, tensor in pair(Q).items()}
    severity = (
        "none" if dtype in ("F64", "F32", "F16", "BF16") else "warning" if dtype.startswith("F8_E4M3") else "error"
    )
    if dtype.startswith("F8_E5M2"):
        severity = "warning"
    assert verdicts(found(tensors, llama())) == ({(severity, "dtype")} if severity != "none" else set())


# --- ranks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "rank", "sound"),
    [
        ({"q_proj": 8}, 8, True),
        ({"q_proj": 8}, 4, False),
        ({"self_attn.q_proj": 8}, 8, True),
        ({"proj": 8}, 4, True),
        ({"proj": 8}, 8, False),
        ({Q: 8}, 8, True),
        ({r"layers\.0\.self_attn\.q_proj": 8}, 8, True),
        ({"q_proj": 8, Q: 16}, 8, True),
        ({"q_proj": 8, Q: 16}, 16, False),
        # An expression is not run; any rank of the pattern may be meant from there on.
        ({r".*\.q_proj": 8}, 8, None),
        ({"nothing[0-9]": 8}, 8, None),
        ({r".*\.q_proj": 8}, 4, True),
        ({r".*\.q_proj": 8}, 5, False),
        ({"q_proj": 8, r".*": 16}, 16, False),
        ({r"(a+)+$": 8, "k_proj": 2}, 4, True),
        (None, 4, True),
        ({}, 8, False),
        (["q_proj"], 4, True),
    ],
)
def test_the_rank_that_the_config_says(pattern: object, rank: int, sound: bool | None) -> None:
    findings = found(pair(Q, rank), llama(), {**CONFIG, "rank_pattern": pattern})
    assert verdicts(findings) == {True: set(), False: {("error", "rank")}, None: {("warning", "rank-unsure")}}[sound]
    if sound is False:
        assert f"has rank {rank}" in findings[0].message


@pytest.mark.parametrize("rank", [None, 0, -1, True, "4", 4.0])
def test_without_a_usable_rank_none_is_compared(rank: object) -> None:
    assert found(pair(Q, 7), llama(), {**CONFIG, "r": rank}) == []


# --- the base ---------------------------------------------------------------------------------------------


def test_an_adapter_for_a_base_of_another_size() -> None:
    tensors = adapter_for(llama(hidden_size=128, num_attention_heads=8))
    finding = only([f for f in found(tensors, llama()) if f.rule == "width"])
    assert "modules are for a base of another size" in finding.message
    assert "has 128 inputs, and the base 64" in finding.message


@pytest.mark.parametrize(("layer", "verdict"), [(1, set()), (2, {("error", "layer-beyond")})])
def test_the_last_layer_and_the_one_after(layer: int, verdict: set[tuple[str, str]]) -> None:
    assert verdicts(found(pair(f"model.layers.{layer}.self_attn.q_proj"), llama())) == verdict


def test_the_names_that_would_fit_are_told() -> None:
    wrong = {name.replace(".model.layers.", ".transformer.layers."): x for name, x in adapter_for(llama()).items()}
    finding = only([f for f in found(wrong, llama()) if f.rule == "not-in-base"])
    assert finding.severity == "error"
    assert "14 of 16 modules" in finding.message
    assert "the base has is called model.layers.0.self_attn.q_proj" in finding.message


def test_what_a_base_has_instead_of_a_fused_module() -> None:
    finding = only(found(pair("model.layers.0.self_attn.qkv_proj"), llama()))
    assert "q_proj" in finding.message
    assert finding.rule == "unknown-module"
    fused = pair("model.layers.0.self_attn.qkv_proj", 4, 64, 128)
    assert found(fused, base_of("Phi3ForCausalLM")) == []


def test_embeddings() -> None:
    def embedding(vocabulary: int) -> Tensors:
        name = f"{PEFT}model.embed_tokens.lora_embedding_"
        return {name + "A": matrix(4, vocabulary), name + "B": matrix(64, 4)}

    assert found(embedding(256), llama()) == []
    assert verdicts(found(embedding(258), llama())) == {("error", "vocabulary")}
    assert verdicts(found(embedding(256), base_of("Qwen2ForCausalLM"))) == {("error", "unknown-module")}
    assert found(embedding(258)) == []


def test_a_base_that_vllm_does_not_adapt() -> None:
    tensors = pair("transformer.h.0.attn.c_attn", 4, 64, 192)
    base = base_model_of({"n_embd": 64, "n_layer": 2}, "GPT2LMHeadModel", "0")
    assert verdicts(found(tensors, base)) == {("error", "base-without-lora")}


@pytest.mark.parametrize("vllm", ["0.31.1", "0.34.0", "1.0"])
def test_what_a_vllm_adapts_that_was_not_read_is_a_warning(vllm: str) -> None:
    gpt2 = base_model_of({"n_embd": 64, "n_layer": 2}, "GPT2LMHeadModel", "0")
    no_lora = only(found(pair("transformer.h.0.attn.c_attn", 4, 64, 192), gpt2, vllm=vllm))
    head = only(found(pair("lm_head", 4, 64, 256), base_of("Qwen2ForCausalLM"), vllm=vllm))
    for finding, rule in ((no_lora, "base-without-lora"), (head, "unknown-module")):
        assert (finding.severity, finding.rule) == ("warning", rule)
        assert f"what vLLM {vllm} adapts is not known here; vLLM 0.32 and 0.33" in finding.message


@pytest.mark.parametrize("vllm", ["0.32.0", "0.32.1", "0.33.0rc1", None])
def test_what_a_vllm_adapts_that_was_read_is_certain(vllm: str | None) -> None:
    assert verdicts(found(pair("lm_head", 4, 64, 256), base_of("Qwen2ForCausalLM"), vllm=vllm)) == {
        ("error", "unknown-module")
    }


@pytest.mark.parametrize(
    ("tensors", "rule"),
    [
        (pair("model.layers.0.self_attn.qkv_proj"), "not-in-base"),
        (pair("model.layers.0.attn.q_proj"), "not-in-base"),
        (pair(Q, 4, 128, 64), "width"),
        (pair("model.layers.2.self_attn.q_proj"), "layer-beyond"),
    ],
)
def test_what_the_base_is_does_not_change_with_the_vllm(tensors: Tensors, rule: str) -> None:
    assert verdicts(found(tensors, llama(), vllm="0.31.0")) == {("error", rule)}


def test_a_module_that_may_be_adapted_has_to_be_as_wide_as_the_bases() -> None:
    head = pair("lm_head", 4, 32, 256)
    assert verdicts(found(head, base_of("Qwen2ForCausalLM"), vllm="0.31.0")) == {
        ("error", "width"),
        ("warning", "unknown-module"),
    }


def test_an_unknown_base_is_one_warning() -> None:
    base = base_model_of({"vision_config": {}}, "Future\x1b[2JModel", "0")
    finding = only(found(pair("a.b.0.c", 4, 1, 1), base))
    assert (finding.severity, finding.rule) == ("warning", "unknown-base")
    assert "multimodal" in finding.message


def multimodal(architecture: str) -> BaseFacts:
    text = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    return base_model_of({"text_config": text}, architecture, "0")


def test_names_of_the_text_model_alone_for_a_multimodal_base() -> None:
    finding = only(found(pair(Q), multimodal("LlavaForConditionalGeneration")))
    assert (finding.severity, finding.rule) == ("warning", "not-in-base")
    assert "model.language_model.layers.0.self_attn.q_proj" in finding.message
    assert found(pair(Q), multimodal("Mistral3ForConditionalGeneration")) == []


@pytest.mark.parametrize("name", ["visual.blocks.0.attn.qkv", "model.vision_tower.encoder.layers.0.mlp.fc1"])
def test_what_is_outside_of_the_language_model(name: str) -> None:
    both = {**pair("model.language_model.layers.0.self_attn.q_proj"), **pair(name, 4, 32, 32)}
    base = multimodal("Qwen2_5_VLForConditionalGeneration" if "visual" in name else "LlavaForConditionalGeneration")
    for findings in (found(both, base), found(both)):
        assert verdicts(findings) == {("warning", "outside-language-model")}
        assert "1 of 2 modules" in findings[0].message


def test_what_vllm_refuses_of_a_multimodal_base_is_an_error() -> None:
    findings = found(pair("model.layers.0.self_attn.W_pack"), multimodal("LlavaForConditionalGeneration"))
    assert verdicts(findings) == {("error", "unknown-module")}


def test_experts_are_a_warning_and_their_shapes_are_their_own() -> None:
    fused = "model.layers.0.mlp.experts"
    tensors = {
        **pair(Q),
        f"{PEFT}{fused}.base_layer.lora_A.weight": matrix(32, 64),
        f"{PEFT}{fused}.base_layer.lora_B.weight": matrix(192, 32),
        f"{PEFT}{fused}.lora_A.weight": matrix(8, 4, 96),
        f"{PEFT}{fused}.lora_B.weight": matrix(64, 32),
    }
    for base in (None, base_of("Qwen3MoeForCausalLM", head_dim=16)):
        assert verdicts(found(tensors, base)) == {("warning", "experts")}
        assert verdicts(found(tensors, base, vllm="0.11.0")) == {("error", "experts")}
    # A base without experts does not have them, and vLLM knows no module of that name there.
    assert verdicts(found(tensors, llama())) == {("error", "unknown-module")}


@pytest.mark.parametrize(
    "name", ["q_proj", "model.q_proj", "model.model.layers.0.self_attn.q_proj", "model.layers.0.attn.q", "x.0.y"]
)
def test_without_a_base_a_name_that_no_usual_base_has_is_a_warning(name: str) -> None:
    assert verdicts(found(pair(name))) == {("warning", "unusual-name")}


# --- what vLLM and PEFT leave out -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allowed", "verdict"),
    [
        (("q_proj", "v_proj"), set()),
        (("qkv_proj",), set()),
        # Whole names are the engine's.
        (("model.layers.0.self_attn.qkv_proj",), set()),
        ((Q,), {("error", "target-modules-limit")}),
        ((Q, "v_proj"), set()),
        (("model.layers.1.self_attn.qkv_proj",), {("error", "target-modules-limit")}),
        (("layers.0.self_attn.qkv_proj",), {("error", "target-modules-limit")}),
        # One module in vLLM: what lets k_proj pass lets q_proj pass.
        (("k_proj",), set()),
        (("gate_up_proj",), {("error", "target-modules-limit")}),
        (("o_proj",), {("error", "target-modules-limit")}),
        ((), {("error", "target-modules-limit")}),
    ],
)
def test_a_limit_of_the_engine(allowed: tuple[str, ...], verdict: set[tuple[str, str]]) -> None:
    tensors = {**pair(Q), **pair("model.layers.0.self_attn.v_proj", 4, 64, 32)}
    assert verdicts(found(tensors, llama(), lora_target_modules=allowed)) == verdict


def test_a_whole_name_is_the_engines() -> None:
    finding = only(found(pair(Q), llama(), lora_target_modules=(Q,)))
    assert finding.message == (
        f"the adapter changes q_proj only, and --lora-target-modules lets vLLM adapt {Q} (a whole name is the "
        "engine's, which has model.layers.0.self_attn.qkv_proj for this part): the base would answer in its name. "
        "Widen or drop lora-target-modules."
    )
    o = "model.layers.0.self_attn.o_proj"
    assert found(pair(o), llama(), lora_target_modules=(o,)) == []
    up = "model.layers.0.mlp.up_proj"
    gated = found(pair(up, 4, 64, 96), llama(), lora_target_modules=(up,))
    assert verdicts(gated) == {("error", "target-modules-limit")}
    # Without a gate beside it, it is packed with nothing.
    assert found(pair(up, 4, 64, 96), base_of("NemotronForCausalLM"), lora_target_modules=(up,)) == []


@pytest.mark.parametrize("name", ["model.layers.0.feed_forward.w1", "transformer.h.0.mlp.c_fc_0"])
def test_other_names_of_what_is_packed(name: str) -> None:
    other = {"w1": "w3", "c_fc_0": "c_fc_1"}[name.rpartition(".")[2]]
    for target in ("gate_up_proj", other):
        rules = {finding.rule for finding in found(pair(name), lora_target_modules=(target,))}
        assert "target-modules-limit" not in rules, target


@pytest.mark.parametrize("base", [None, base_of("UnknownForCausalLM"), base_of("Olmo2ForCausalLM")])
def test_where_a_part_may_be_a_module_of_its_own_its_whole_name_is_a_warning(base: BaseFacts | None) -> None:
    of_parts = found(pair(Q), base, lora_target_modules=(Q,))
    assert ("warning", "target-modules-limit") in verdicts(of_parts)
    assert "which usually has model.layers.0.self_attn.qkv_proj" in of_parts[-1].message
    for name in ("model.layers.0.self_attn.qkv_proj", "language_model.model.layers.0.self_attn.qkv_proj"):
        of_whole = found(pair(Q), base, lora_target_modules=(name,))
        assert "target-modules-limit" not in {finding.rule for finding in of_whole}


def test_a_whole_name_in_a_multimodal_engine() -> None:
    base = base_of("Qwen2_5_VLForConditionalGeneration")
    name = "model.language_model.layers.1.self_attn.q_proj"
    allowed = ("language_model.model.layers.1.self_attn.qkv_proj",)
    assert found(pair(name), base, lora_target_modules=allowed) == []
    other = ("language_model.model.layers.0.self_attn.qkv_proj",)
    assert verdicts(found(pair(name), base, lora_target_modules=other)) == {("error", "target-modules-limit")}


def test_a_limit_that_leaves_out_a_part() -> None:
    tensors = {**pair(Q), **pair("model.layers.0.self_attn.o_proj")}
    finding = only(found(tensors, llama(), lora_target_modules=("o_proj",)))
    assert (finding.severity, finding.subject) == ("warning", Q)
    assert "1 of 2 modules (q_proj)" in finding.message


@pytest.mark.parametrize(
    ("targets", "warned"),
    [
        (["q_proj"], False),
        (["q_proj", "not_there"], False),
        ([Q], False),
        (["k_proj"], True),
        (["proj"], True),
        (["all-linear"], False),
        ([], False),
        (None, False),
        ("k_proj", False),
        ([7], True),
    ],
)
def test_modules_that_the_config_does_not_list(targets: object, warned: bool) -> None:
    findings = found(pair(Q), llama(), {**CONFIG, "target_modules": targets})
    assert verdicts(findings) == ({("warning", "not-in-target-modules")} if warned else set())


# --- whatever comes ---------------------------------------------------------------------------------------

PARTS = st.sampled_from(
    [
        *("base_model", "model", "layers", "0", "99999999999", "self_attn", "q_proj", "experts", "lora_A", "lora_B"),
        *("weight", "lora_embedding_A", "lm_head", "base_layer", "bias", "", "\n", "visual", "score", "{}", "*"),
    ]
)
NAMES = st.lists(PARTS, min_size=1, max_size=9).map(".".join) | st.text(max_size=20)
SHAPES = st.lists(st.sampled_from([0, 1, 4, 64, 2**63]), max_size=4).map(tuple)
TENSORS = st.dictionaries(NAMES, st.builds(Tensor, SHAPES, st.just(0), st.sampled_from(sorted(DTYPE_BITS))), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | PARTS, inner, max_size=3),
    max_leaves=5,
)
CONFIGS = st.dictionaries(
    st.sampled_from(["r", "rank_pattern", "target_modules", "target_parameters", "modules_to_save"]), JSON
)


@settings(deadline=None)
@given(
    TENSORS,
    CONFIGS,
    st.none() | st.sampled_from(["LlamaForCausalLM", "MixtralForCausalLM", "LlavaForConditionalGeneration", "X"]),
    st.none() | st.lists(PARTS, max_size=3).map(tuple),
    st.sampled_from([None, "0.6.5", "0.32.0", "99"]),
)
def test_nothing_raises(
    tensors: Tensors,
    config: dict[str, object],
    architecture: str | None,
    allowed: tuple[str, ...] | None,
    vllm: str | None,
) -> None:
    base = (
        None if architecture is None else multimodal(architecture) if "Llava" in architecture else base_of(architecture)
    )
    found(tensors, base, config, vllm, allowed)


@settings(deadline=None)
@given(NAMES)
def test_no_name_is_passed_that_vllm_refuses(name: str) -> None:
    """vllm/lora/utils.py 0.32.0, parse_fine_tuned_lora_name, in other words."""
    parts = name.split(".")
    lora = len(parts) >= 2 and parts[-2] in ("lora_A", "lora_B") and parts[-1] == "weight"
    lora = lora or parts[-1] in ("lora_embedding_A", "lora_embedding_B")
    passed_over = name.endswith((".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight"))
    assume(not lora and not passed_over)
    findings = found({**pair(Q), name: matrix(4, 64)}, llama())
    assert any(finding.severity == "error" for finding in findings)


def test_a_large_adapter_takes_milliseconds() -> None:
    base = llama(num_hidden_layers=64)
    tensors = {name: tensor for name, tensor in adapter_for(base, 4, 64).items() if ".layers." in name}
    assert len(tensors) == 896
    best = min(_seconds(tensors, base) for _ in range(10))
    # 448 tensors in 1.2 ms on the machine this was written on.
    assert best < 0.02


def _seconds(tensors: Tensors, base: BaseFacts) -> float:
    started = time.perf_counter()
    list(tensor_findings(CONFIG, tensors, PLACE, loader_rules(None), base, ("q_proj",)))
    return time.perf_counter() - started


def test_a_rank_pattern_from_outside_cannot_keep_us_busy() -> None:
    evil = {f"({'a' * 10}+)+{number}$": 8 for number in range(2000)}
    module = "model.layers.0." + "a" * 5000 + ".q_proj"
    started = time.perf_counter()
    found(pair(module), llama(), {**CONFIG, "rank_pattern": evil})
    assert time.perf_counter() - started < 1


def test_a_name_from_outside_cannot_keep_us_busy() -> None:
    assert sorted(endings("a.b.c")) == ["a.b.c", "b.c", "c"]
    assert list(endings("")) == [""]
    assert sorted(endings(".a")) == [".a", "a"]
    # All of them are half a terabyte.
    assert sum(map(len, endings("." * 1_000_000))) < 1000
    dots = found(pair("." * 1_000_000, 8), config={**CONFIG, "target_modules": ["a"], "rank_pattern": {"a": 8}})
    assert ("error", "rank") in verdicts(dots)


def test_long_lists_from_outside_cannot_keep_us_busy() -> None:
    count = 20_000
    tensors: Tensors = {}
    for number in range(count):
        tensors.update(pair(f"model.layers.{number}.self_attn.q_proj"))
    # Each of these numbers has the same hash.
    numbers = [number * (2**61 - 1) for number in range(2, count)]
    patterns = {f"(odd){number}": number for number in [*numbers, *range(5, count)]}
    config = {**CONFIG, "r": 5, "rank_pattern": patterns, "layers_to_transform": [*numbers, *range(1, count)]}
    findings = {finding.rule: finding.message for finding in found(tensors, config=config)}
    assert set(findings) == {"rank", "layers-to-transform"}
    assert "has rank 4, and the config says 5 or 6 or 7)" in findings["rank"]
    assert findings["layers-to-transform"].startswith(f"1 of {count} modules (model.layers.0.self_attn.q_proj) ")


@given(
    given_layers=st.one_of(
        st.lists(st.integers(0, 3) | st.booleans(), max_size=3), st.integers(0, 3), st.booleans(), st.none()
    )
)
def test_layers_are_told_only_where_they_are_left_out(given_layers: object) -> None:
    tensors = {**pair(Q), **pair(Q.replace("0", "1"))}
    findings = found(tensors, config={**CONFIG, "layers_to_transform": given_layers})
    wanted = given_layers if isinstance(given_layers, list) else [given_layers]
    numbers = wanted != [] and all(type(layer) is int for layer in wanted)
    left_out = numbers and not {0, 1} <= set(wanted)
    assert verdicts(findings) == ({("warning", "layers-to-transform")} if left_out else set())
