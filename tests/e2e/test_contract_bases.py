"""What this project believes of base models, held against transformers' own classes and vLLM's in the sandbox image.

Every architecture of the table that transformers or vLLM can build is built small, without weights. One container
answers for all.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from components.core.check.base_layouts import ARCHITECTURES, WRAPPERS
from components.core.check.base_model import BaseFacts, base_model_of, split_layer
from tests.support.machines import call

pytestmark = pytest.mark.vllm

SANDBOX_IMAGE = "localhost/lora-pods-sandbox"
PYTHON = "/opt/vllm/bin/python"
LAYERS = 2

USUAL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT: dict[str, Any] = {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 128, "vocab_size": 256}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "kv_lora_rank": 32,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def case(model_type: str, **changes: Any) -> dict[str, Any]:
    return {**USUAL, "model_type": model_type, **changes}


CONFIGS: dict[str, dict[str, Any]] = {
    "ApertusForCausalLM": case("apertus"),
    "ArceeForCausalLM": case("arcee"),
    "BloomForCausalLM": {"model_type": "bloom", "hidden_size": 64, "n_layer": LAYERS, "n_head": 4, "vocab_size": 256},
    "Cohere2ForCausalLM": case("cohere2"),
    "CohereForCausalLM": case("cohere"),
    "DeepseekV2ForCausalLM": case("deepseek_v2", **MLA, q_lora_rank=None),
    "DeepseekV3ForCausalLM": case("deepseek_v3", **MLA, q_lora_rank=24),
    "Ernie4_5ForCausalLM": case("ernie4_5", head_dim=16),
    "Exaone4ForCausalLM": case("exaone4"),
    "FalconForCausalLM": case("falcon", new_decoder_architecture=True, num_kv_heads=2),
    "GPT2LMHeadModel": {**GPT, "model_type": "gpt2"},
    "GPTBigCodeForCausalLM": {**GPT, "model_type": "gpt_bigcode", "multi_query": True},
    "GPTJForCausalLM": {**GPT, "model_type": "gptj", "rotary_dim": 8},
    "GPTNeoXForCausalLM": case("gpt_neox"),
    "Gemma2ForCausalLM": case("gemma2", head_dim=32),
    "Gemma3ForCausalLM": case("gemma3_text", head_dim=32),
    "GemmaForCausalLM": case("gemma", head_dim=32),
    "Glm4ForCausalLM": case("glm4", head_dim=32),
    "GlmForCausalLM": case("glm", head_dim=32),
    "GptOssForCausalLM": case("gpt_oss", head_dim=32, **EXPERTS),
    "GraniteForCausalLM": case("granite"),
    "HyperCLOVAXForCausalLM": case("hyperclovax"),
    "LlamaForCausalLM": case("llama"),
    "Ministral3ForCausalLM": case("ministral3"),
    "MistralForCausalLM": case("mistral", head_dim=32),
    "MixtralForCausalLM": case("mixtral", **EXPERTS),
    "MptForCausalLM": {"model_type": "mpt", "d_model": 64, "n_layers": LAYERS, "n_heads": 4, "vocab_size": 256},
    "NemotronForCausalLM": case("nemotron"),
    "OPTForCausalLM": case("opt", ffn_dim=96, word_embed_proj_dim=32),
    "Olmo2ForCausalLM": case("olmo2"),
    "Olmo3ForCausalLM": case("olmo3"),
    "OlmoForCausalLM": case("olmo"),
    "OlmoeForCausalLM": case("olmoe", **EXPERTS),
    "Phi3ForCausalLM": case("phi3"),
    "PhiForCausalLM": case("phi"),
    "Qwen2ForCausalLM": case("qwen2"),
    "Qwen2MoeForCausalLM": case("qwen2_moe", **EXPERTS),
    "Qwen3ForCausalLM": case("qwen3", head_dim=32),
    "Qwen3MoeForCausalLM": case("qwen3_moe", head_dim=32, **EXPERTS),
    "SeedOssForCausalLM": case("seed_oss", head_dim=32),
    "SmolLM3ForCausalLM": case("smollm3"),
    "StableLmForCausalLM": case("stablelm"),
    "Starcoder2ForCausalLM": case("starcoder2"),
}
# The code of these comes with their weights, so that only vLLM builds them.
ONLY_VLLM: dict[str, dict[str, Any]] = {
    "ChatGLMModel": {
        "model_type": "chatglm",
        "hidden_size": 64,
        "num_layers": LAYERS,
        "num_attention_heads": 4,
        "kv_channels": 16,
        "ffn_hidden_size": 96,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "padded_vocab_size": 256,
        "original_rope": True,
        "layernorm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "rmsnorm": True,
        "add_qkv_bias": True,
        "add_bias_linear": False,
        "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False,
        "seq_length": 128,
    },
}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {
        "model_type": "gemma3",
        "text_config": case("gemma3_text", head_dim=32),
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 1,
        "image_token_index": 5,
    },
    "Idefics3ForConditionalGeneration": {
        "model_type": "idefics3",
        "text_config": case("llama"),
        "vision_config": {**VISION, "model_type": "idefics3_vision"},
        "scale_factor": 2,
    },
    "LlavaForConditionalGeneration": {
        "model_type": "llava",
        "text_config": case("llama"),
        "vision_config": {**VISION, "model_type": "clip_vision_model"},
    },
    "Mistral3ForConditionalGeneration": {
        "model_type": "mistral3",
        "text_config": case("mistral", head_dim=32),
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16},
    },
    "PaliGemmaForConditionalGeneration": {
        "model_type": "paligemma",
        "text_config": case("gemma", head_dim=32),
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        "projection_dim": 64,
    },
    "Qwen2VLForConditionalGeneration": case(
        "qwen2_vl",
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
    ),
    "Qwen2_5_VLForConditionalGeneration": case(
        "qwen2_5_vl",
        vision_config={"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48},
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
    ),
    "Qwen3VLForConditionalGeneration": {
        "model_type": "qwen3_vl",
        "text_config": case(
            "qwen3_vl_text", head_dim=16, rope_scaling={"rope_type": "default", "mrope_section": [2, 3, 3]}
        ),
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "num_heads": 2,
            "intermediate_size": 48,
            "deepstack_visual_indexes": [0],
        },
    },
}
# Keys that a config.json may lack: what is assumed then has to be what transformers assumes, or nothing.
LACKING = ("head_dim", "num_key_value_heads", "intermediate_size", "n_inner", "ffn_dim")

QUESTIONS = """
import importlib.abc, importlib.machinery, json, os, sys, tempfile, types
import torch, transformers
from transformers.pytorch_utils import Conv1D

asked = json.load(sys.stdin)
def shapes(architecture, config):
    cls = getattr(transformers, architecture, None)
    if cls is None:
        return None
    with torch.device("meta"):
        model = cls(transformers.AutoConfig.for_model(**config))
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            found[name] = ["linear", module.in_features, module.out_features]
        elif isinstance(module, Conv1D):
            found[name] = ["linear", *module.weight.shape]
        elif isinstance(module, torch.nn.Embedding):
            found[name] = ["embedding", module.num_embeddings, module.embedding_dim]
    return found

answers = {"shapes": {}, "lacking": {}, "vllm": {}}
for architecture, config in asked["configs"].items():
    answers["shapes"][architecture] = shapes(architecture, config)
for architecture, key, config in asked["lacking"]:
    try:
        found = shapes(architecture, config)
    except Exception as error:
        found = None
    answers["lacking"][architecture + " " + key] = found

from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.utils import get_supported_lora_modules, parse_fine_tuned_lora_name, process_packed_modules_mapping
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.interfaces import supports_lora
from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel, _ModelInfo
from vllm.utils.torch_utils import set_default_torch_dtype

# The multimodal classes import torchvision, which the image has not; nothing of it is called when they are built.
class Torchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        def attribute(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})
        module.__path__, module.__getattr__ = [], attribute
        return module
    def exec_module(self, module):
        pass

sys.meta_path.append(Torchvision())
# It would look at each class in a process of its own, where torchvision is missing again.
_LazyRegisteredModel.inspect_model_cls = lambda self: _ModelInfo.from_model_cls(self.load_model_cls())

def state(name, modules, expected, packed, mapper):
    mapped, _ = parse_fine_tuned_lora_name("base_model.model." + name + ".lora_A.weight", mapper)
    last = mapped.rpartition(".")[2]
    if last not in expected:
        return "refused"
    parents = [parent for parent, children in packed.items() if last in children]
    prefix = mapped.rpartition(".")[0]
    reached = [".".join(filter(None, (prefix, parent))) for parent in parents] or [mapped]
    return "served" if any(module in modules for module in reached) else "ignored"

started = False
for architecture, question in asked["vllm"].items():
    cls = ModelRegistry.models[architecture].load_model_cls() if architecture in ModelRegistry.models else None
    answer = {"known": cls is not None, "lora": cls is not None and supports_lora(cls), "states": None}
    answers["vllm"][architecture] = answer
    if not answer["lora"] or question["config"] is None:
        continue
    with tempfile.TemporaryDirectory() as directory:
        with open(os.path.join(directory, "config.json"), "w") as stream:
            json.dump(question["config"], stream)
        try:
            engine = EngineArgs(
                model=directory, skip_tokenizer_init=True, load_format="dummy", dtype="float32", enforce_eager=True,
                max_model_len=64, enable_lora=True,
            ).create_engine_config()
            with set_current_vllm_config(engine):
                if not started:
                    init_distributed_environment(1, 0, "file://" + tempfile.mktemp(), 0, backend="gloo")
                    ensure_model_parallel_initialized(1, 1)
                    started = True
                with set_default_torch_dtype(torch.float32), torch.device("cpu"):
                    model = initialize_model(engine)
        except Exception as error:
            answer["error"] = str(error)[:500]
            continue
    packed = process_packed_modules_mapping(model)
    expected = set()
    for name in get_supported_lora_modules(model):
        expected.update(packed.get(name, [name]))
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    mapper = mapper.get_rename_mapper() if mapper is not None else None
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    answer["adapted"] = sorted(expected)
    answer["states"] = {name: state(name, modules, expected, packed, mapper) for name in question["names"]}
print("ANSWERS " + json.dumps(answers))
"""


def base_of(architecture: str, config: dict[str, Any]) -> BaseFacts:
    return base_model_of(config, architecture, "0" * 64)


def names_of(base: BaseFacts) -> list[str]:
    return [name.replace("{}", "1") for name in base.modules]


BASES = {name: base_of(name, config) for name, config in {**CONFIGS, **ONLY_VLLM, **MULTIMODAL}.items()}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    configs = {**CONFIGS, **ONLY_VLLM, **MULTIMODAL}
    # The first one decides whether vLLM makes a group for experts.
    configs = dict(sorted(configs.items(), key=lambda item: "num_experts_per_tok" not in item[1]))
    no_vllm = {name: None for name in (*ARCHITECTURES, *WRAPPERS) if name not in configs}
    asked = {
        "configs": {**CONFIGS, **MULTIMODAL},
        "lacking": [
            [architecture, key, {name: value for name, value in config.items() if name != key}]
            for architecture, config in CONFIGS.items()
            for key in LACKING
            if key in config or key in ("head_dim", "n_inner")
        ],
        "vllm": {
            name: {
                "config": {**config, "architectures": [name]} if config else None,
                "names": names_of(BASES[name]) if config else [],
            }
            for name, config in {**configs, **no_vllm}.items()
        },
    }
    said = call(
        *("run", "--rm", "--interactive", "--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=8192:8192"),
        *("--env=HF_HUB_OFFLINE=1", "--env=VLLM_CPU_KVCACHE_SPACE=1", "--env=VLLM_NO_USAGE_STATS=1"),
        *(SANDBOX_IMAGE, PYTHON, "-c", QUESTIONS),
        stdin=json.dumps(asked),
    )
    (line,) = [line for line in said.splitlines() if line.startswith("ANSWERS ")]
    found: dict[str, Any] = json.loads(line.removeprefix("ANSWERS "))
    return found


def disagreements(base: BaseFacts, shapes: dict[str, list[Any]]) -> list[str]:
    """Where the table's widths differ from a real model's, or a module of it is missing in the table."""
    wrong = []
    for name, (kind, inputs, outputs) in shapes.items():
        module = base.find(split_layer(name)[0])
        if module is None:
            wrong.append(f"{name} is missing")
        elif module.kind in ("linear", "embedding", "output"):
            if (module.inputs or inputs, module.outputs or outputs) != (inputs, outputs):
                wrong.append(f"{name}: {module.inputs} > {module.outputs} is {inputs} > {outputs}")
            if (module.kind == "embedding") != (kind == "embedding") and module.inputs is not None:
                wrong.append(f"{name} is of kind {kind}")
    return wrong


@pytest.mark.parametrize("architecture", [*CONFIGS, *MULTIMODAL])
def test_names_and_widths_are_those_of_transformers(answers: dict[str, Any], architecture: str) -> None:
    shapes = answers["shapes"][architecture]
    base = BASES[architecture]
    assert base.known
    assert disagreements(base, shapes) == []
    # And the other way round: the first spelling of every module exists.
    templates = {split_layer(name)[0] for name in shapes}
    first: dict[str, str] = {}
    for template, module in base.modules.items():
        tail = module.kind if module.kind in ("embedding", "output") else re.sub(r".*\{\}|.*\.(?=[^.]*$)", "", template)
        first.setdefault(tail, template)
    assert {name for name, template in first.items() if template not in templates} == set()


def test_nothing_wrong_is_assumed_where_a_config_says_nothing(answers: dict[str, Any]) -> None:
    wrong = {}
    for case_name, shapes in answers["lacking"].items():
        architecture, key = case_name.split()
        if shapes is not None:
            config = {name: value for name, value in CONFIGS[architecture].items() if name != key}
            wrong[case_name] = disagreements(base_of(architecture, config), shapes)
    assert {name: found for name, found in wrong.items() if found} == {}


def test_which_architectures_vllm_adapts(answers: dict[str, Any]) -> None:
    table = {name: served.lora for name, served in ARCHITECTURES.items()}
    table.update({name: wrapper.lora for name, wrapper in WRAPPERS.items()})
    asked = {name: answer["lora"] for name, answer in answers["vllm"].items() if answer["known"]}
    assert asked == {name: lora for name, lora in table.items() if name in asked}


@pytest.mark.parametrize("architecture", [*CONFIGS, *ONLY_VLLM, *MULTIMODAL])
def test_vllm_reaches_every_name_of_the_table(answers: dict[str, Any], architecture: str) -> None:
    answer = answers["vllm"][architecture]
    if not answer["lora"] or "error" in answer:
        pytest.skip(answer.get("error", "vLLM has no LoRA for it"))
    base = BASES[architecture]
    expected = {}
    for template, module in base.modules.items():
        name = template.replace("{}", "1")
        expected[name] = "served" if module.served else "refused"
    assert {name: answer["states"][name] for name in expected} == expected
    if base.multimodal and base.adapted is not None:
        assert set(answer["adapted"]) <= base.adapted
