"""The bytes that this project counts, held against what vLLM allocates in the sandbox image.

Small models without weights get their LoRA layers from vLLM's own manager: on one GPU's terms, and as the first of two
that share a model. One container answers for each.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from components.core.capacity import BaseSizes, Slots, Unknown, slot_bytes, token_bytes, weight_bytes
from components.core.check.base_model import base_model_of
from components.core.check.base_sizes import sizes_of
from tests.e2e.test_contract_bases import BASES, CONFIGS, ONLY_VLLM, PYTHON, SANDBOX_IMAGE, case
from tests.support.machines import call

pytestmark = pytest.mark.vllm

# GPT-NeoX has as many heads of keys as of queries, and vLLM believes a config.json that says otherwise.
COUNTED = {
    name: {key: value for key, value in config.items() if name != "GPTNeoXForCausalLM" or "key_value" not in key}
    for name, config in {**CONFIGS, **ONLY_VLLM}.items()
    if BASES[name].takes_lora and not isinstance(sizes_of(config, BASES[name]), Unknown)
}
LLAMA, QWEN, PHI, GEMMA = "LlamaForCausalLM", "Qwen2ForCausalLM", "Phi3ForCausalLM", "GemmaForCausalLM"
STARCODER = "Starcoder2ForCausalLM"
QUANTIZED = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}

QUESTIONS = """
import json, os, sys, tempfile
asked = json.load(sys.stdin)
together, number = asked["together"], 0
meeting = tempfile.mktemp()
for other in range(1, together):
    if os.fork() == 0:
        number, sys.stdout = other, open(os.devnull, "w")
        break
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.model_manager import LoRAModelManager
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

def size(tensors):
    return sum({each.data_ptr(): each.numel() * each.element_size() for each in tensors}.values())

answers, started = {}, False
for name, question in asked["cases"].items():
    with tempfile.TemporaryDirectory() as directory:
        with open(os.path.join(directory, "config.json"), "w") as stream:
            json.dump(question["config"], stream)
        try:
            engine = EngineArgs(
                model=directory, skip_tokenizer_init=True, load_format="dummy", enforce_eager=True,
                max_model_len=64, enable_lora=True, **{"dtype": "bfloat16", **question["args"]},
            ).create_engine_config()
            engine.parallel_config.tensor_parallel_size = together
            with set_current_vllm_config(engine):
                if not started:
                    init_distributed_environment(together, number, "file://" + meeting, number, backend="gloo")
                    ensure_model_parallel_initialized(together, 1)
                    started = True
                with set_default_torch_dtype(engine.model_config.dtype), torch.device("cpu"):
                    model = initialize_model(engine)
                specs = [
                    layer.get_kv_cache_spec(engine)
                    for layer in engine.compilation_config.static_forward_context.values()
                    if isinstance(layer, AttentionLayerBase)
                ]
                weights = size(each for each in model.parameters() if each.dim() > 1)
                LoRAModelManager(model, 4, 64, 256, engine.lora_config, torch.device("cpu"), engine)
                stacked = []
                for module in model.modules():
                    if isinstance(module, BaseLayerWithLoRA):
                        for tensors in (module.lora_a_stacked, module.lora_b_stacked):
                            stacked += [tensors] if isinstance(tensors, torch.Tensor) else tensors
            answers[name] = {
                "weights": weights,
                "token": sum(spec.page_size_bytes for spec in specs) // specs[0].block_size,
                "slots": size(stacked),
            }
        except Exception as error:
            answers[name] = {"error": repr(error)[:500]}
print("ANSWERS " + json.dumps(answers), flush=True)
os._exit(0)
"""


def question(name: str, loras: int, rank: int, config: dict[str, Any] | None = None, **args: Any) -> dict[str, Any]:
    return {
        "config": {**(config or COUNTED[name]), "architectures": [name]},
        "args": {"max_loras": loras, "max_cpu_loras": loras, "max_lora_rank": rank, **args},
    }


ALONE = {
    **{name: question(name, 2, 8) for name in COUNTED},
    "llama, 1 of 1": question(LLAMA, 1, 1),
    "llama, 5 of 64": question(LLAMA, 5, 64),
    "llama, tied": question(LLAMA, 3, 16, case("llama", tie_word_embeddings=True)),
    "llama, odd vocabulary": question(LLAMA, 3, 16, case("llama", vocab_size=300)),
    "llama, in 4 bytes": question(LLAMA, 2, 16, dtype="float32"),
    "llama, adapters in 2 of 4 bytes": question(LLAMA, 2, 16, dtype="float32", lora_dtype="float16"),
    "llama, some modules": question(LLAMA, 3, 32, lora_target_modules=["q_proj", "down_proj"]),
    "llama, a packed module": question(LLAMA, 3, 32, lora_target_modules=["gate_up_proj", "lm_head"]),
    "qwen, some modules": question(QWEN, 2, 16, lora_target_modules=["o_proj", "up_proj"]),
    "phi, some modules": question(PHI, 2, 320, lora_target_modules=["qkv_proj", "embed_tokens"]),
    "starcoder, some modules": question(STARCODER, 2, 8, lora_target_modules=["v_proj", "c_fc"]),
    "gemma, 7 of 128": question(GEMMA, 7, 128),
    **{
        f"llama, {name}": question(LLAMA, 2, 8, case("llama", quantization_config=QUANTIZED[name]))
        for name in QUANTIZED
    },
}
TOGETHER = {
    **{
        name: question(name, 2, 8)
        for name in (LLAMA, QWEN, PHI, GEMMA, STARCODER, "Qwen3ForCausalLM", "PhiForCausalLM")
    },
    "llama, sharded": question(LLAMA, 3, 16, fully_sharded_loras=True),
    "phi, sharded": question(PHI, 3, 16, fully_sharded_loras=True),
    "llama, one head of keys": question(LLAMA, 2, 8, case("llama", num_key_value_heads=1)),
    "phi, one head of keys": question(PHI, 2, 8, case("phi3", num_key_value_heads=1)),
}


def asked(cases: dict[str, dict[str, Any]], together: int) -> dict[str, Any]:
    said = call(
        *("run", "--rm", "--interactive", "--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=8192:8192"),
        *("--env=HF_HUB_OFFLINE=1", "--env=VLLM_CPU_KVCACHE_SPACE=1", "--env=VLLM_NO_USAGE_STATS=1"),
        # What its processes find each other's memory by; its own launcher sets it.
        *("--env=VLLM_DIST_IDENT=together", "--shm-size=512m"),
        *(SANDBOX_IMAGE, PYTHON, "-c", QUESTIONS),
        stdin=json.dumps({"together": together, "cases": cases}),
    )
    (line,) = [line for line in said.splitlines() if line.startswith("ANSWERS ")]
    found: dict[str, Any] = json.loads(line.removeprefix("ANSWERS "))
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return asked(ALONE, 1)


@pytest.fixture(scope="module")
def together() -> dict[str, Any]:
    return asked(TOGETHER, 2)


def counted(case: dict[str, Any], split: int) -> dict[str, Any]:
    """What vLLM is expected to answer; the KV cache only where it is counted."""
    config, args = case["config"], case["args"]
    base = sizes_of(config, base_model_of(config, config["architectures"][0], "0" * 64))
    assert isinstance(base, BaseSizes)
    wide = 4 if args.get("dtype") == "float32" else 2
    slots = Slots(
        rank=args["max_lora_rank"],
        number_bytes=2 if "lora_dtype" in args else wide,
        tensor_parallel=split,
        fully_sharded=args.get("fully_sharded_loras", False),
        targets=args.get("lora_target_modules"),
    )
    slot, token = slot_bytes(base, slots), token_bytes(base, wide, split)
    assert isinstance(slot, int)
    expected = {"weights": weight_bytes(base, wide, split), "slots": args["max_loras"] * slot}
    return expected if isinstance(token, Unknown) else {**expected, "token": token}


def without_token(answer: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key in expected or key == "error"}


@pytest.mark.parametrize("name", ALONE)
def test_the_bytes_are_those_that_vllm_allocates(alone: dict[str, Any], name: str) -> None:
    expected = counted(ALONE[name], 1)
    assert without_token(alone[name], expected) == expected


@pytest.mark.parametrize("name", TOGETHER)
def test_the_bytes_of_one_of_two_are_those_that_vllm_allocates(together: dict[str, Any], name: str) -> None:
    expected = counted(TOGETHER[name], 2)
    assert without_token(together[name], expected) == expected
