"""What people reported in public about adapters, by the thread's name, and the check's verdict on each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from components.core.check.adapter_check import Against, check_adapter
from tests.support.adapter_cases import (
    BASE_CONFIG,
    BODY,
    CONFIG,
    FUTURE,
    HEAD,
    MAGNITUDE,
    Q0,
    Outcome,
    Write,
    beside,
    files,
    holding,
    keys,
    pair,
    raw,
    tensors,
    text,
    with_config,
    without,
)
from tests.support.adapters import Json
from tests.support.verdicts import HERE, against, outcome

IMAGES: Mapping[str, Json] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {**BASE_CONFIG, "architectures": None, "model_type": "gemma3_text"},
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 32},
}
MIXTURE: Mapping[str, Json] = {
    **BASE_CONFIG,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
}
LARGER: Mapping[str, Json] = {**BASE_CONFIG, "hidden_size": 256, "head_dim": 64, "vocab_size": 1024}
OLD, OLDEST = against(vllm="0.11.0"), against(vllm="0.6.5")
QWEN = replace(HERE, base="Qwen/Qwen2.5-7B-Instruct")
LIMITED = replace(HERE, lora_target_modules=("o_proj",))
LOCAL = "/home/alice/checkpoint-75"
EMBEDDINGS = keys(
    {"target_modules": ["q_proj", "v_proj", "lm_head"]},
    {**tensors(), **HEAD, "base_model.model.lm_head.base_layer.weight": [512, 128]},
)
WHOLE_HEAD = keys({"modules_to_save": ["lm_head"]}, {**tensors(), "base_model.model.lm_head.weight": [512, 128]})
TOWER = with_config(CONFIG, pair("base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj"))
CHECKPOINT = files({"adapter_model.safetensors": None, "pytorch_model.bin": b"", "optimizer.pt": b""})
TRAINING_STATE = files({"optimizer.pt": b"", "scheduler.pt": b"", "trainer_state.json": b""})
FOLDERS = files({f"{name}/adapter_config.json": text() for name in ("default", "reward")}, sound=False)
EXPERT = with_config(
    {**CONFIG, "target_modules": ["w1"]}, pair(f"{BODY}layers.0.block_sparse_moe.experts.0.w1", 128, 256)
)


def report(
    thread: str, what: str, write: Write, expected: Outcome, rules: str = "", serving: Against = HERE
) -> ParameterSet:
    return pytest.param(write, serving, expected, set(rules.split()), id=f"{thread} {what}")


def base(name: str) -> Write:
    return keys({"base_model_name_or_path": name})


REPORTS = [
    report("vllm#2847", "rank 48", keys({"r": 48}, tensors(rank=48)), "accept"),
    report("vllm#2847", "rank 600", keys({"r": 600}, tensors(rank=600)), "refuse", "rank-too-large"),
    report("vllm#9280", "lm_head trained as a whole", WHOLE_HEAD, "refuse", "modules-to-save full-weights"),
    report("LlamaFactory#9545", "an empty list", keys({"modules_to_save": []}), "accept"),
    report("LlamaFactory#9545", "null", keys({"modules_to_save": None}), "accept"),
    report("vllm#32599", "the base's lm_head, saved too", EMBEDDINGS, "accept"),
    report("vllm#32599", "the same on an older vLLM", EMBEDDINGS, "refuse", "base-embeddings", OLD),
    report("vllm#6983", "use_dora", keys({"use_dora": True}), "refuse", "dora"),
    report("vllm#10849", "a magnitude without the flag", beside(MAGNITUDE), "refuse", "dora"),
    report("vllm#25807", "bias all", keys({"bias": "all"}), "refuse", "bias"),
    report("vllm#25807", "bias lora_only", keys({"bias": "lora_only"}), "refuse", "bias"),
    report("vllm#25807", "a bias without the key", beside({f"{Q0}.lora_B.bias": [128]}), "refuse", "bias-tensor"),
    report("vllm#9275", "targets as a pattern", keys({"target_modules": "model.*(q_proj|v_proj)$"}), "accept"),
    report("vllm#9275", "targets as a word", keys({"target_modules": "all-linear"}), "accept"),
    report("vllm#55193", "an engine that adapts others", keys({}), "refuse", "target-modules-limit", LIMITED),
    report("vllm#34186", "trained on text, served with images", keys({}), "warn", "not-in-base", against(IMAGES)),
    report("vllm#41754", "keys of the vision tower", TOWER, "warn", "outside-language-model", against(IMAGES)),
    report("peft#2275", "keys of a later PEFT", keys(FUTURE), "accept"),
    report("textgen#6819", "a key that nobody knows", keys({"invented": {"deep": [1]}}), "accept"),
    report("functionary#309", "r missing", without("r"), "refuse", "missing-key"),
    report("functionary#309", "lora_alpha missing", without("lora_alpha"), "refuse", "missing-key"),
    report("functionary#309", "target_modules missing", without("target_modules"), "refuse", "missing-key"),
    report("functionary#309", "r 0", keys({"r": 0}), "refuse", "rank"),
    report("functionary#309", "r -8", keys({"r": -8}), "refuse", "rank"),
    report("functionary#309", "r a text", keys({"r": "16"}), "refuse", "rank"),
    report("functionary#309", "r true", keys({"r": True}), "refuse", "rank"),
    report("functionary#309", "no LoRA", with_config({"peft_type": "PREFIX_TUNING"}), "refuse", "peft-type"),
    report("functionary#309", "not JSON", raw(b"r: 16"), "refuse", "not-json"),
    report("functionary#309", "a byte order mark", raw(b"\xef\xbb\xbf" + text()), "refuse", "byte-order-mark"),
    report(
        "unsloth#1089",
        "a quantised sibling of the base",
        base("unsloth/Qwen2.5-7B-Instruct-bnb-4bit"),
        "warn",
        "quantised-sibling",
        QWEN,
    ),
    report("GLiNER2#108", "no base", base(""), "accept"),
    report("GLiNER2#108", "a local base", base(LOCAL), "warn", "local-base"),
    report("vllm#12106", "for a smaller base", keys({}), "refuse", "width", against(LARGER)),
    report("vllm#12106", "for another, by its name", base("a/7b"), "warn", "wrong-base", Against("b/70b")),
    report("h2ogpt#195", "a checkpoint of the whole model", CHECKPOINT, "refuse", "no-weights"),
    report("h2ogpt#195", "training state beside the weights", TRAINING_STATE, "accept"),
    report("TuFT#134", "a new .bin beside", files({"adapter_model.bin": b""}), "refuse", "two-weights"),
    report("peft#1059", "adapters in folders below", FOLDERS, "refuse", "no-config"),
    report("vllm#11702", "malformed", holding(b"\xff" * 100), "refuse", "damaged"),
    report("kubeai#347", "a chat template", files({"chat_template.jinja": b""}), "warn", "chat-template"),
    report(
        "vllm#40005", "parameters targeted", keys({"target_parameters": ["experts.x"]}), "warn", "target-parameters"
    ),
    report("vllm#40005", "experts", EXPERT, "warn", "experts", against(MIXTURE)),
    report("vllm#10798", "rank-stabilised", keys({"use_rslora": True}), "accept"),
    report("vllm#10798", "the same before vLLM read it", keys({"use_rslora": True}), "refuse", "rslora", OLDEST),
]


@pytest.mark.parametrize(("write", "serving", "expected", "rules"), REPORTS)
def test_a_report(tmp_path: Path, write: Write, serving: Against, expected: Outcome, rules: set[str]) -> None:
    found = check_adapter(write(tmp_path / "adapter"), serving)
    assert (outcome(found), {finding.rule for finding in found}) == (expected, rules)


def told(directory: Path) -> str:
    (found,) = check_adapter(directory, HERE)
    return str(found).replace(str(directory), "DIR")


def test_a_private_path_stays_private(tmp_path: Path) -> None:
    """fastino-ai/GLiNER2#108: what the check says may stand in a pull request's comment."""
    assert "alice" not in told(base(LOCAL)(tmp_path / "a"))


def test_the_ceiling_is_named(tmp_path: Path) -> None:
    """vllm-project/vllm#2847"""
    assert told(keys({"r": 600}, tensors(rank=600))(tmp_path / "a")).startswith(
        "DIR/adapter_config.json: r: is 600, and vLLM 0.32.0 serves ranks up to 512;"
    )


def test_the_folders_below_are_named(tmp_path: Path) -> None:
    """huggingface/peft#1059"""
    assert "default, reward" in told(FOLDERS(tmp_path / "run"))


def test_both_weight_files_are_named(tmp_path: Path) -> None:
    """agentscope-ai/TuFT#134"""
    assert "vLLM loads adapter_model.safetensors and never looks at adapter_model.bin" in told(
        files({"adapter_model.bin": b""})(tmp_path / "a")
    )


def test_what_vllm_reads_and_what_is_there_are_named(tmp_path: Path) -> None:
    """h2oai/h2ogpt#195"""
    message = told(CHECKPOINT(tmp_path / "checkpoint-75"))
    assert "adapter_model.safetensors" in message
    assert "pytorch_model.bin" in message
