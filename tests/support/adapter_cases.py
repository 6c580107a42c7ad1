"""Adapters of every kind that vLLM's loader, PEFT and this project tell apart: one line each, written on demand.

All are meant for one small base, `BASE_CONFIG`. What is expected is this project's verdict; `stricter` says why it
refuses where vLLM takes the adapter. tests/e2e/test_contract_adapters.py asks vLLM and PEFT about the same directories.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from tests.support.adapters import Json, safetensors_bytes, with_header, write_adapter

BASE_NAME = "example/base"
BASE_CONFIG: Mapping[str, Json] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
# Of one layer of the base: inputs and outputs of every module.
MODULES: Mapping[str, tuple[int, int]] = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (128, 64),
    "self_attn.v_proj": (128, 64),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (128, 256),
    "mlp.up_proj": (128, 256),
    "mlp.down_proj": (256, 128),
}
Q, V = "self_attn.q_proj", "self_attn.v_proj"
BODY = "base_model.model.model."
Q0 = f"{BODY}layers.0.{Q}"
# What PEFT writes today, with every key that stays at its default left out.
CONFIG: Mapping[str, Json] = {
    "base_model_name_or_path": BASE_NAME,
    "bias": "none",
    "init_lora_weights": True,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 4,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "use_rslora": False,
}
CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "adapter-configs"
"""Real configs, which are not this project's to copy; they may be absent."""
# 0.0115 as F32 and as BF16, 1.06 as F16: no zero, so that a matrix that was used can be told from one that was not.
FILL = 0x3C

Outcome: TypeAlias = Literal["accept", "warn", "refuse"]
Write: TypeAlias = Callable[[Path], Path]
Shapes: TypeAlias = Mapping[str, Sequence[int]]
NAN, INFINITY = float("nan"), float("inf")


@dataclass(frozen=True)
class Case:
    name: str
    write: Write
    outcome: Outcome
    stricter: str = ""
    """Why it is refused here although vLLM takes it; empty where vLLM refuses it too."""

    def make(self, root: Path) -> Path:
        """Write it somewhere in `root`; return the adapter's directory."""
        root.mkdir(parents=True, exist_ok=True)
        return self.write(root / (re.sub(r"[^A-Za-z0-9.-]+", "-", self.name).strip("-.") or "x"))


def tensors(
    modules: Sequence[str] = (Q, V), rank: int = 4, layers: Sequence[int] = (0, 1), body: str = BODY
) -> dict[str, list[int]]:
    """The A and B matrix of every module named, as wide as the base has it."""
    shapes: dict[str, list[int]] = {}
    for layer in layers:
        for module in modules:
            inputs, outputs = MODULES[module]
            shapes[f"{body}layers.{layer}.{module}.lora_A.weight"] = [rank, inputs]
            shapes[f"{body}layers.{layer}.{module}.lora_B.weight"] = [outputs, rank]
    return shapes


def pair(name: str, inputs: int = 128, outputs: int = 128, rank: int = 4) -> dict[str, list[int]]:
    return {f"{name}.lora_A.weight": [rank, inputs], f"{name}.lora_B.weight": [outputs, rank]}


def weights(shapes: Shapes | bytes | None = None, dtype: str = "F32") -> bytes:
    if isinstance(shapes, bytes):
        return shapes
    return safetensors_bytes(tensors() if shapes is None else shapes, dtype, FILL)


def with_config(config: Mapping[str, Json] | bytes, shapes: Shapes | bytes | None = None) -> Write:
    return lambda directory: write_adapter(directory, config, weights(shapes))


def keys(changes: Mapping[str, Json], shapes: Shapes | bytes | None = None) -> Write:
    return with_config({**CONFIG, **changes}, shapes)


def without(key: str) -> Write:
    return with_config({name: value for name, value in CONFIG.items() if name != key})


def raw(text: bytes) -> Write:
    return with_config(text)


def holding(shapes: Shapes | bytes) -> Write:
    return with_config(CONFIG, shapes)


def beside(shapes: Shapes) -> Write:
    """Sound tensors and these."""
    return holding({**tensors(), **shapes})


def instead(name: str, shape: Sequence[int], side: str = "A") -> Write:
    """Sound tensors, and layer 0's q_proj with a matrix of this shape."""
    return beside({f"{name}.lora_{side}.weight": shape})


def lacking(*names: str) -> Write:
    return holding({name: shape for name, shape in tensors().items() if name not in names})


def files(named: Mapping[str, bytes | Path | None], sound: bool = True) -> Write:
    """An adapter, sound unless said otherwise, with other files: bytes, a link to a path, or None to take one away."""

    def write(directory: Path) -> Path:
        if sound:
            write_adapter(directory, CONFIG, weights())
        directory.mkdir(exist_ok=True)
        for name, content in named.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            if isinstance(content, Path):
                path.symlink_to(content)
            elif content is not None:
                path.write_bytes(content)
        return directory

    return write


def with_real_config(path: Path) -> Write:
    """One of `CONFIGS` as it is, with small tensors of its rank for the modules it names."""
    config = json.loads(path.read_bytes())
    rank, targets = config.get("r", 4), config.get("target_modules")
    modules = targets if isinstance(targets, list) else ["q_proj", "v_proj"]
    places = {name.rpartition(".")[2]: f"model.layers.0.{name}" for name in (*MODULES, "self_attn.W_pack")}
    places["query_key_value"] = "transformer.encoder.layers.0.self_attention.query_key_value"
    shapes: dict[str, list[int]] = {}
    for module in modules:
        shapes.update(pair(f"base_model.model.{places.get(module, module)}", rank=rank))
    return with_config(path.read_bytes(), shapes)


def text(**changes: Json) -> bytes:
    return json.dumps({**CONFIG, **changes}, indent=2).encode()


def pickled() -> bytes:
    """What torch.save of an empty dictionary was before zip files: vLLM loads it, as it does any .bin."""
    sizes = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    parts: list[object] = [0x1950A86A20F9469CFC6C, 1001, sizes, {}, []]
    return b"".join(pickle.dumps(part, protocol=2) for part in parts)


def header(entries: Mapping[str, Json], data: bytes = b"") -> bytes:
    return with_header(json.dumps(entries).encode(), data)


def entry(**changes: Json) -> dict[str, Json]:
    """A header of one tensor of 4 bytes with something wrong in it."""
    return {f"{Q0}.lora_A.weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4], **changes}}


def annotated(sound: bytes) -> bytes:
    """The same tensors, one with a key that safetensors does not know and passes over."""
    length = int.from_bytes(sound[:8], "little")
    entries = json.loads(sound[8 : 8 + length])
    entries[f"{Q0}.lora_A.weight"]["note"] = 1
    return with_header(json.dumps(entries).encode(), sound[8 + length :])


def padded(sound: bytes) -> bytes:
    length = 8 + int.from_bytes(sound[:8], "little")
    return with_header(sound[8:length] + b"   ", sound[length:])


def twice(sound: bytes) -> bytes:
    """The same with its first tensor named twice."""
    length = 8 + int.from_bytes(sound[:8], "little")
    named = [item for item in json.loads(sound[8:length]).items() if item[0] != "__metadata__"]
    entries = json.dumps(dict(named))[1:-1]
    again = json.dumps(dict(named[:1]))[1:-1]
    return with_header(f"{{{entries}, {again}}}".encode(), sound[length:])


def numbers(dtype: str, size: int) -> bytes:
    """Sound tensors of a type that no LoRA is trained in; `size` is a number's bytes."""
    entries: dict[str, Json] = {}
    position = 0
    for name, (rows, columns) in tensors().items():
        end = position + rows * columns * size
        entries[name] = {"dtype": dtype, "shape": [rows, columns], "data_offsets": [position, end]}
        position = end
    return header(entries, bytes([FILL]) * position)


def in_the_hubs_cache(directory: Path) -> Path:
    """As huggingface_hub keeps a download: the files are links into the model's own blobs."""
    snapshot = directory / "models--x--y" / "snapshots" / "1"
    blobs = write_adapter(directory / "models--x--y" / "blobs", CONFIG, weights())
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    return snapshot


def pipe_for_weights(directory: Path) -> Path:
    files({"adapter_model.safetensors": None})(directory)
    os.mkfifo(directory / "adapter_model.safetensors")
    return directory


def folder_for_weights(directory: Path) -> Path:
    files({"adapter_model.safetensors": None})(directory)
    (directory / "adapter_model.safetensors").mkdir()
    return directory


def link_out(directory: Path) -> Path:
    outside = directory.with_suffix(".elsewhere")
    outside.write_bytes(weights())
    return files({"adapter_model.safetensors": Path("..") / outside.name})(directory)


ALL = tuple(MODULES)
HEAD = {"base_model.model.lm_head.lora_A.weight": [4, 128], "base_model.model.lm_head.lora_B.weight": [512, 4]}
EMBEDDING = {f"{BODY}embed_tokens.lora_embedding_A": [4, 512], f"{BODY}embed_tokens.lora_embedding_B": [128, 4]}
UNTRAINED = {"base_model.model.lm_head.base_layer.weight": [512, 128], f"{BODY}embed_tokens.base_layer.weight": [8, 8]}
MAGNITUDE = {f"{Q0}.lora_magnitude_vector": [128]}
# A null or a default for everything PEFT has learnt since, and something it has not.
FUTURE: Mapping[str, Json] = {
    **{"alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None},
    **{"corda_config": None, "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None},
    **{"fan_in_fan_out": False, "inference_mode": True, "layer_replication": None, "layers_pattern": None},
    **{"layers_to_transform": None, "loftq_config": {}, "lora_bias": False, "lora_ga_config": None},
    **{"megatron_config": None, "megatron_core": "megatron.core", "peft_version": "0.31.0", "qalora_group_size": 16},
    **{"rank_pattern": {}, "revision": None, "target_parameters": None, "trainable_token_indices": None},
    **{"use_bdlora": None, "use_qalora": False, "velora_config": None, "invented_by_a_later_version": {"deep": [1]}},
}

# Why more is refused here than by vLLM.
BASE_ANSWERS = "the base answers in the adapter's name"
WRONG = "it is served, but not as it was trained"
NOT_SHIPPED = "only a plain safetensors file of the adapter's own is shipped"
NOT_ONE_MEANING = "what is meant cannot be told"
BOUNDED = "no adapter's file is like this, and reading it is bounded"


def accepted(name: str, write: Write) -> Case:
    return Case(name, write, "accept")


def warned(name: str, write: Write) -> Case:
    return Case(name, write, "warn")


def refused(name: str, write: Write, stricter: str = "") -> Case:
    return Case(name, write, "refuse", stricter)


GOOD = [
    accepted("plain", keys({})),
    accepted("every module", keys({"target_modules": list(ALL)}, tensors(ALL))),
    accepted("one layer", holding(tensors(layers=(1,)))),
    accepted("gate without up", keys({"target_modules": ["gate_proj"]}, tensors(("mlp.gate_proj",)))),
    accepted("bfloat16", holding(weights(dtype="BF16"))),
    accepted("float16", holding(weights(dtype="F16"))),
    accepted("rank 512", keys({"r": 512}, tensors(rank=512))),
    accepted("rank 1", keys({"r": 1}, tensors(rank=1))),
    accepted("rank-stabilised", keys({"use_rslora": True, "lora_alpha": 8})),
    accepted("half an alpha", keys({"lora_alpha": 0.5})),
    accepted("alpha as large as r", keys({"lora_alpha": 4})),
    accepted(
        "rank and alpha patterns",
        keys({"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 4}}, {**tensors(), **tensors((Q,), 8)}),
    ),
    accepted(
        "rank pattern of one layer",
        keys({"rank_pattern": {r"layers\.1\.self_attn\.v_proj": 2}}, {**tensors(), **tensors((V,), 2, (1,))}),
    ),
    accepted("targets as a pattern", keys({"target_modules": r"model.*(q_proj|v_proj)$"})),
    accepted("targets as a word", keys({"target_modules": "all-linear"}, tensors(ALL))),
    accepted("targets the base lacks too", keys({"target_modules": ["q_proj", "v_proj", "c_attn"]})),
    accepted("keys of later versions", keys(FUTURE)),
    accepted("keys of the first version", keys({"enable_lora": None, "merge_weights": False, "fan_in_fan_out": False})),
    warned("only what is required", with_config({"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]})),
    accepted("lm_head", keys({"target_modules": ["q_proj", "v_proj", "lm_head"]}, {**tensors(), **HEAD})),
    accepted("embeddings", keys({"target_modules": ["q_proj", "v_proj", "embed_tokens"]}, {**tensors(), **EMBEDDING})),
    accepted(
        "the untouched base beside lm_head",
        keys({"target_modules": ["q_proj", "v_proj", "lm_head"]}, {**tensors(), **HEAD, **UNTRAINED}),
    ),
    accepted("layers to transform", keys({"layers_to_transform": [1]}, tensors(layers=(1,)))),
]

R = [
    refused("r missing", without("r")),
    refused("r true", keys({"r": True}), WRONG),
    refused("r a text", keys({"r": "16"})),
    refused("r 0", keys({"r": 0})),
    refused("r -8", keys({"r": -8})),
    refused("r 1.5", keys({"r": 1.5}), WRONG),
    refused("r 4.0", keys({"r": 4.0}), NOT_ONE_MEANING),
    refused("r NaN", keys({"r": NAN}), WRONG),
    refused("r Infinity", keys({"r": INFINITY})),
    refused("r null", keys({"r": None})),
    refused("r a list", keys({"r": [4]})),
    refused("r an object", keys({"r": {"q_proj": 4}})),
    refused("r 600", keys({"r": 600}, tensors(rank=600))),
    refused("r 600 with smaller tensors", keys({"r": 600})),
    refused("r with 5000 digits", raw(text(r=0).replace(b'"r": 0', b'"r": ' + b"9" * 5000))),
]

ALPHA = [
    refused("alpha missing", without("lora_alpha")),
    refused("alpha null", keys({"lora_alpha": None})),
    refused("alpha a text", keys({"lora_alpha": "16"})),
    refused("alpha a list", keys({"lora_alpha": [16]})),
    refused("alpha true", keys({"lora_alpha": True}), NOT_ONE_MEANING),
    refused("alpha NaN", keys({"lora_alpha": NAN}), WRONG),
    refused("alpha Infinity", keys({"lora_alpha": INFINITY}), WRONG),
    refused("alpha 0", keys({"lora_alpha": 0}), BASE_ANSWERS),
    refused("alpha beyond all numbers", keys({"lora_alpha": 10**300}), WRONG),
    refused("alpha next to nothing", keys({"lora_alpha": 1e-320}), BASE_ANSWERS),
    warned("alpha negative", keys({"lora_alpha": -16})),
]

PATTERNS = [
    accepted("patterns null", keys({"rank_pattern": None, "alpha_pattern": None})),
    refused("rank pattern 0", keys({"rank_pattern": {"q_proj": 0}})),
    refused("rank pattern -1", keys({"rank_pattern": {"q_proj": -1}})),
    refused("rank pattern a text", keys({"rank_pattern": {"q_proj": "8"}})),
    refused("rank pattern 8.0", keys({"rank_pattern": {"q_proj": 8.0}})),
    refused("rank pattern null inside", keys({"rank_pattern": {"q_proj": None}})),
    refused("rank pattern true", keys({"rank_pattern": {"q_proj": True}}), WRONG),
    refused("rank pattern 600", keys({"rank_pattern": {"q_proj": 600}})),
    refused("rank pattern a list", keys({"rank_pattern": ["q_proj"]})),
    refused("rank pattern a text outside", keys({"rank_pattern": "q_proj"})),
    accepted("rank pattern an empty list", keys({"rank_pattern": []})),
    refused("rank pattern no expression", keys({"rank_pattern": {"(q_proj": 4}})),
    refused("rank pattern unlike the tensors", keys({"rank_pattern": {"q_proj": 8}}), WRONG),
    accepted("rank pattern of nothing", keys({"rank_pattern": {"k_proj": 8}})),
    refused("alpha pattern a text", keys({"alpha_pattern": {"q_proj": "x"}})),
    refused("alpha pattern NaN", keys({"alpha_pattern": {"q_proj": NAN}}), WRONG),
    refused("alpha pattern a list", keys({"alpha_pattern": ["q_proj"]})),
    refused("alpha pattern no expression", keys({"alpha_pattern": {"[": 4}})),
    accepted("alpha pattern of halves", keys({"alpha_pattern": {"q_proj": 0.5}})),
]

TARGETS = [
    warned("other layers to transform", keys({"layers_to_transform": [1]})),
    warned("one other layer to transform", keys({"layers_to_transform": 1})),
    refused("targets missing", without("target_modules")),
    warned("targets null", keys({"target_modules": None})),
    warned("targets an empty list", keys({"target_modules": []})),
    warned("targets an empty text", keys({"target_modules": ""})),
    warned("targets of other modules", keys({"target_modules": ["k_proj"]})),
    refused("targets a number", keys({"target_modules": 5}), NOT_ONE_MEANING),
    refused("targets of numbers", keys({"target_modules": [1, 2]}), NOT_ONE_MEANING),
    refused("targets an object", keys({"target_modules": {"q_proj": 1}}), NOT_ONE_MEANING),
]

INIT = [
    accepted("init true", keys({"init_lora_weights": True})),
    accepted("init false", keys({"init_lora_weights": False})),
    accepted("init null", keys({"init_lora_weights": None})),
    *(
        accepted(f"init {value}", keys({"init_lora_weights": value}))
        for value in ("gaussian", "Gaussian", "eva", "orthogonal", "mica", "lora_ga")
    ),
    *(
        refused(f"init {value or 'empty'}", keys({"init_lora_weights": value}))
        for value in ("pissa", "pissa_niter_16", "PiSSA", "olora", "corda", "loftq", "invented", "")
    ),
]

UNSUPPORTED = [
    refused("dora", keys({"use_dora": True}, {**tensors(), **MAGNITUDE})),
    refused("dora without its tensors", keys({"use_dora": True})),
    refused("dora as a text", keys({"use_dora": "false"})),
    refused("dora not told", beside(MAGNITUDE)),
    refused("dora of newer versions not told", beside({f"{Q0}.lora_magnitude_vector.weight": [128]})),
    accepted("dora null", keys({"use_dora": None})),
    accepted("dora 0", keys({"use_dora": 0})),
    refused("bias all", keys({"bias": "all"})),
    refused("bias lora_only", keys({"bias": "lora_only"})),
    refused("bias None", keys({"bias": "None"})),
    refused("bias empty", keys({"bias": ""})),
    refused("bias null", keys({"bias": None})),
    refused("bias false", keys({"bias": False})),
    refused("lora_bias", keys({"lora_bias": True}, {**tensors(), f"{Q0}.lora_B.bias": [128]})),
    refused("lora_bias without its tensors", keys({"lora_bias": True})),
    refused("lora_bias not told", beside({f"{Q0}.lora_B.bias": [128]})),
    refused("bias not told", beside({f"{Q0}.bias": [128]})),
    refused("bias of the base layer not told", beside({f"{Q0}.base_layer.bias": [128]})),
    accepted("modules_to_save []", keys({"modules_to_save": []})),
    accepted("modules_to_save null", keys({"modules_to_save": None})),
    refused(
        "modules_to_save lm_head",
        keys({"modules_to_save": ["lm_head"]}, {**tensors(), "base_model.model.lm_head.weight": [512, 128]}),
    ),
    refused("modules_to_save without its tensors", keys({"modules_to_save": ["embed_tokens", "lm_head"]})),
    refused("modules_to_save not told", beside({"base_model.model.lm_head.weight": [512, 128]})),
    refused("modules_to_save a text", keys({"modules_to_save": "lm_head"})),
    refused("modules_to_save a number", keys({"modules_to_save": 5})),
    refused(
        "modules_to_save classifier",
        keys({"modules_to_save": ["classifier"]}, {**tensors(), "base_model.model.classifier.weight": [2, 128]}),
    ),
    refused(
        "two classifiers",
        keys(
            {"modules_to_save": ["classifier", "score"]},
            {**tensors(), "base_model.model.classifier.weight": [2, 128], "base_model.model.score.weight": [2, 128]},
        ),
    ),
    refused(
        "a classifier's bias alone",
        keys({"modules_to_save": ["classifier"]}, {**tensors(), "base_model.model.classifier.bias": [2]}),
    ),
    refused("modules_to_save score without its tensors", keys({"modules_to_save": ["score"]}), NOT_ONE_MEANING),
    refused("score not told", beside({"base_model.model.score.weight": [2, 128]})),
    refused("activated lora", keys({"alora_invocation_tokens": [1, 2]})),
    accepted("activated lora of nothing", keys({"alora_invocation_tokens": []})),
    refused("layer replication", keys({"layer_replication": [[0, 1], [0, 2]]})),
    refused("block-diagonal", keys({"use_bdlora": {"nblocks": 2}})),
    refused("qalora", keys({"use_qalora": True})),
]

KINDS = [
    *(
        refused(f"kind {value}", keys({"peft_type": value}), NOT_ONE_MEANING)
        for value in ("PREFIX_TUNING", "ADALORA", "LOHA", "IA3", "\x1b[31mLORA")
    ),
    warned("kind missing", without("peft_type")),
    warned("kind in small letters", keys({"peft_type": "lora"})),
    refused("kind a number", keys({"peft_type": 5}), NOT_ONE_MEANING),
    refused("soft prompts", with_config({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 8})),
    refused("of mlx", with_config({"lora_parameters": {"rank": 8, "scale": 20.0}, "model": "/Users/alice/base"})),
    refused("a base's name and no more", with_config({"base_model": "lerobot/smolvla_base"})),
    warned("a variant of its own", keys({"kasa_config": {"beta": 0.1}})),
    warned("target_parameters", keys({"target_parameters": ["mlp.experts.gate_up_proj"]})),
    refused("tokens trained", keys({"trainable_token_indices": {"embed_tokens": [5]}}), WRONG),
    refused(
        "tokens trained with tensors", beside({f"{BODY}embed_tokens.token_adapter.trainable_tokens_delta": [1, 128]})
    ),
    warned(
        "made by a class of images",
        keys({"auto_mapping": {"base_model_class": "UNet2DConditionModel", "parent_library": "diffusers"}}),
    ),
    accepted("scaling of vLLM's own", keys({"vllm_lora_scaling_factor": 99, "vllm_max_position_embeddings": 1})),
]

BASES = [
    warned("base another", keys({"base_model_name_or_path": "example/other"})),
    warned("base quantised", keys({"base_model_name_or_path": "unsloth/base-bnb-4bit"})),
    accepted("base empty", keys({"base_model_name_or_path": ""})),
    accepted("base null", keys({"base_model_name_or_path": None})),
    accepted("base missing", without("base_model_name_or_path")),
    warned("base on somebody's disk", keys({"base_model_name_or_path": "/home/alice/checkpoint-75"})),
    accepted("base on somebody's disk under its name", keys({"base_model_name_or_path": "/home/alice/ckpt/base"})),
    warned("base no unicode", raw(text().replace(b"example/base", b"\\ud800"))),
    warned("base with escape codes", keys({"base_model_name_or_path": "a\x1b[2Jb\nc"})),
]

TEXTS = [
    accepted("line ends of Windows", raw(text().replace(b"\n", b"\r\n"))),
    accepted("not a number elsewhere", keys({"lora_dropout": NAN})),
    accepted("a key with escape codes", keys({"\x1b[31m": 1})),
    refused("byte order mark", raw(b"\xef\xbb\xbf" + text())),
    refused("utf-16", raw(text().decode().encode("utf-16"))),
    refused("latin-1", raw(text().replace(b"base", b"b\xe4se"))),
    refused("not JSON", raw(b"r: 4\nlora_alpha: 16\n")),
    refused("empty config", raw(b"")),
    refused("half a config", raw(text()[:-20])),
    refused("something after the config", raw(text() + b"}")),
    refused("a list", raw(b'["r", "lora_alpha", "target_modules"]')),
    refused("nested too deeply", raw(b'{"x": ' + b"[" * 100_000)),
    refused("a key twice", raw(text().replace(b"{", b'{"r": 8,', 1)), NOT_ONE_MEANING),
    refused("a megabyte of config", raw(text(padding="x" * 1024 * 1024)), BOUNDED),
    refused("a comment", raw(b"// saved\n" + text())),
    refused("a page of a web server", raw(b"<!DOCTYPE html><html>")),
]

FILES = [
    refused("no files", files({}, sound=False)),
    refused("no config", files({"adapter_config.json": None})),
    refused("no weights", files({"adapter_model.safetensors": None})),
    refused("config with another name", files({"adapter_config.json": None, "config.json": text()})),
    refused(
        "bin only",
        files({"adapter_model.safetensors": None, "adapter_model.bin": pickled()}),
    ),
    refused("bin that is none", files({"adapter_model.safetensors": None, "adapter_model.bin": b"PK"})),
    refused("pt only", files({"adapter_model.safetensors": None, "adapter_model.pt": b"PK"})),
    refused("bin beside", files({"adapter_model.bin": pickled()}), NOT_ONE_MEANING),
    refused("pt beside", files({"adapter_model.pt": b"PK"}), NOT_ONE_MEANING),
    refused(
        "shards",
        files(
            {
                "adapter_model.safetensors": None,
                "adapter_model-00001-of-00002.safetensors": weights(),
                "adapter_model.safetensors.index.json": b"{}",
            }
        ),
    ),
    refused(
        "a checkpoint of the whole model",
        files({"adapter_model.safetensors": None, "pytorch_model.bin": b"PK", "optimizer.pt": b"PK"}),
    ),
    accepted(
        "training state beside",
        files({"optimizer.pt": b"PK", "scheduler.pt": b"PK", "trainer_state.json": b"{", "rng_state.pth": b""}),
    ),
    warned("a chat template beside", files({"chat_template.jinja": b"{{ messages }}"})),
    accepted("rubbish of macOS", files({"._adapter_config.json": b"\0\5", ".DS_Store": b"\0", "__MACOSX/x": b""})),
    refused(
        "in folders below",
        files(
            {
                "default/adapter_config.json": text(),
                "default/adapter_model.safetensors": weights(),
                "reward/adapter_config.json": text(),
            },
            sound=False,
        ),
    ),
    refused(
        "weights in a folder below",
        files({"adapter_model.safetensors": None, "weights/adapter_model.safetensors": b""}),
    ),
    accepted("links of the hub's cache", in_the_hubs_cache),
    accepted("a link within", files({"adapter_model.safetensors": Path("real"), "real": weights()})),
    refused("a link out", link_out, NOT_SHIPPED),
    refused("a dangling link", files({"adapter_model.safetensors": Path("nowhere")})),
    refused("a loop of links", files({"adapter_model.safetensors": Path("adapter_model.safetensors")})),
    refused("a dangling config", files({"adapter_config.json": Path("nowhere")})),
    refused("a folder for weights", folder_for_weights),
    refused("a pipe for weights", pipe_for_weights),
]

WEIGHTS = [
    refused("weights empty", holding(b"")),
    refused("weights of 7 bytes", holding(b"\0" * 7)),
    refused("Git LFS pointer", holding(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")),
    refused("weights pickled", holding(b"PK\x03\x04" + b"\0" * 100)),
    refused("header beyond the file", holding(struct.pack("<Q", 1000) + b"{}")),
    refused("header beyond all files", holding(struct.pack("<Q", 2**63) + b"{}")),
    refused("header not JSON", holding(with_header(b"{no}"))),
    refused("header a list", holding(with_header(b"[]"))),
    refused("header not text", holding(with_header(b"\xff\xfe"))),
    refused("header NaN", holding(header(entry(shape=[NAN, 1]), b"\0" * 4))),
    refused("header negative", holding(header(entry(shape=[-1, 1]), b"\0" * 4))),
    refused("header of halves", holding(header(entry(shape=[1.5, 1]), b"\0" * 4))),
    refused("header huge", holding(header(entry(shape=[2**40, 2**40]), b"\0" * 4))),
    refused("dtype unknown", holding(header(entry(dtype="F31"), b"\0" * 4))),
    refused("dtype missing", holding(header({Q0: {"shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4))),
    refused("shape unlike its data", holding(header(entry(shape=[2, 1]), b"\0" * 4))),
    refused("data short", holding(weights()[:-1])),
    refused("data long", holding(weights() + b"\0")),
    refused("data with a hole", holding(header(entry(data_offsets=[4, 8]), b"\0" * 8))),
    refused("metadata of numbers", holding(header({"__metadata__": {"a": 1}}))),
    refused("metadata of half a character", holding(header({"__metadata__": {"a": "\ud800"}}))),
    refused(
        "a place of minus nothing", holding(with_header(json.dumps(entry()).replace("[0,", "[-0,").encode(), b"\0" * 4))
    ),
    refused("a key of its own", holding(annotated(weights())), BOUNDED),
    refused("a tensor twice", holding(twice(weights())), NOT_ONE_MEANING),
    accepted("header padded", holding(padded(weights()))),
]

NAMES = [
    refused(
        "prefix of a multimodal model", holding(tensors(body="base_model.model.language_model.model.")), BASE_ANSWERS
    ),
    refused("prefix of transformers 5", holding(tensors(body="base_model.model.model.language_model.")), BASE_ANSWERS),
    refused("prefix lost", holding(tensors(body="base_model.model.")), BASE_ANSWERS),
    refused("prefix of GPT", holding(tensors(body="base_model.model.transformer.h.")), BASE_ANSWERS),
    refused("vision tower", beside(pair("base_model.model.vision_tower.layers.0.self_attn.q_proj")), WRONG),
    refused(
        "prefix wrong in one layer",
        holding({**tensors(layers=(0,)), **tensors(layers=(1,), body="base_model.model.x.")}),
        WRONG,
    ),
    accepted("prefix of PEFT missing", holding(tensors(body="model."))),
    warned("prefix of PEFT twice", holding(tensors(body="base_model.model." + BODY))),
    refused(
        "adapter's name inside",
        holding({f"{Q0}.lora_A.default.weight": [4, 128], f"{Q0}.lora_B.default.weight": [128, 4]}),
    ),
    refused(
        "names of mlx",
        holding(
            {"model.layers.0.self_attn.q_proj.lora_a": [128, 4], "model.layers.0.self_attn.q_proj.lora_b": [4, 128]}
        ),
    ),
    refused(
        "names of kohya",
        holding(
            {"lora_unet_x.lora_down.weight": [4, 128], "lora_unet_x.lora_up.weight": [128, 4], "lora_unet_x.alpha": []}
        ),
    ),
    refused("names of no lora", holding({f"{Q0}.weight": [128, 128]})),
    refused("names without weight", holding({f"{Q0}.lora_A": [4, 128], f"{Q0}.lora_B": [128, 4]})),
    refused("matrix C", beside({f"{Q0}.lora_C.weight": [4, 4]})),
    refused("AdaLoRA's vector", beside({f"{Q0}.lora_E": [4, 1]})),
    *(
        refused(f"module {module}", beside(pair(f"{BODY}layers.0.{module}")))
        for module in (
            "self_attn.qkv_proj",
            "mlp.gate_up_proj",
            "self_attn.W_pack",
            "input_layernorm",
            "mlp",
            "self_attn.Q_PROJ",
        )
    ),
    refused("module with a line break", beside(pair(f"{Q0}\n"))),
    refused("module with a space", beside(pair(f"{Q0} "))),
    refused("module with an empty name", beside(pair(f"{BODY}layers.0."))),
    refused("names with escape codes", beside(pair("base_model.model.\x1b[31m.q_proj")), WRONG),
    refused("names with line breaks", beside(pair("base_model.model.a\nb.q_proj")), WRONG),
    refused("layer 2 of 2", holding(tensors(layers=(0, 1, 2))), WRONG),
    refused("layers beyond the base", holding(tensors(layers=(7, 8))), BASE_ANSWERS),
    refused(
        "a layer written otherwise",
        holding({name.replace("layers.1.", "layers.01."): shape for name, shape in tensors().items()}),
        WRONG,
    ),
    refused(
        "a layer of none",
        holding({name.replace("layers.1.", "layers.-1."): shape for name, shape in tensors().items()}),
        WRONG,
    ),
    refused("q_proj in the mlp", beside(pair(f"{BODY}layers.0.mlp.q_proj")), WRONG),
    refused("the untouched base of a layer", beside({f"{Q0}.base_layer.weight": [128, 128]})),
    refused("lora of a base layer", beside(pair(f"{Q0}.base_layer")), WRONG),
    refused("experts of a base without", beside(pair(f"{BODY}layers.0.mlp.experts.0.gate_proj"))),
    refused(
        "fused experts of a base without",
        beside({**pair(f"{BODY}layers.0.mlp.experts"), **pair(f"{BODY}layers.0.mlp.experts.base_layer")}),
    ),
    refused("nothing at all", holding({})),
    refused("only the untouched base", holding(UNTRAINED)),
]

SHAPES = [
    refused("rank unlike r", keys({"r": 8}), WRONG),
    refused("rank of one module unlike r", instead(Q0, [8, 128]), WRONG),
    refused("rank above r's flag", keys({"r": 4}, tensors(rank=600))),
    refused("A and B of two ranks", holding({**tensors(), **pair(Q0, rank=8), f"{Q0}.lora_B.weight": [128, 4]}), WRONG),
    refused("A too narrow", instead(Q0, [4, 64]), WRONG),
    refused("A too wide", instead(Q0, [4, 256])),
    refused("B too narrow", instead(Q0, [64, 4], "B"), WRONG),
    refused("B too wide", instead(Q0, [256, 4], "B")),
    refused("A turned round", instead(Q0, [128, 4]), WRONG),
    refused(
        "for a smaller base", holding({n: [x if x == 4 else x // 2 for x in s] for n, s in tensors().items()}), WRONG
    ),
    refused("for a larger base", holding({n: [x if x == 4 else x * 2 for x in s] for n, s in tensors().items()})),
    refused("A of one dimension", instead(Q0, [128])),
    refused("A of no dimension", instead(Q0, [])),
    refused("A of three dimensions", instead(Q0, [1, 4, 128])),
    refused("B of one dimension", instead(Q0, [128], "B")),
    refused("A without rows", instead(Q0, [0, 128]), WRONG),
    refused("A and B empty", holding({**tensors(), **pair(Q0, rank=0)}), WRONG),
    refused("everything empty", holding(tensors(rank=0)), BASE_ANSWERS),
    refused("A without B", lacking(f"{Q0}.lora_B.weight")),
    refused("B without A", lacking(f"{Q0}.lora_A.weight"), WRONG),
    refused("A's only", holding({name: shape for name, shape in tensors().items() if "lora_A" in name})),
    refused("B's only", holding({name: shape for name, shape in tensors().items() if "lora_B" in name}), BASE_ANSWERS),
    refused(
        "embeddings of another vocabulary",
        beside({f"{BODY}embed_tokens.lora_embedding_A": [4, 600], f"{BODY}embed_tokens.lora_embedding_B": [128, 4]}),
    ),
    refused("embeddings A without B", beside({f"{BODY}embed_tokens.lora_embedding_A": [4, 512]})),
    refused(
        "a linear layer as embeddings",
        beside(
            {
                f"{BODY}layers.0.self_attn.k_proj.lora_embedding_A": [4, 128],
                f"{BODY}layers.0.self_attn.k_proj.lora_embedding_B": [64, 4],
            }
        ),
    ),
    warned("embeddings as a linear layer", beside(pair(f"{BODY}embed_tokens", 512, 128))),
    refused("lm_head of another vocabulary", beside({**HEAD, "base_model.model.lm_head.lora_B.weight": [600, 4]})),
    *(
        refused(f"numbers of type {dtype}", holding(numbers(dtype, size)), WRONG)
        for dtype, size in (("I64", 8), ("U8", 1), ("BOOL", 1))
    ),
    accepted("numbers of type F64", holding(numbers("F64", 8))),
]

SECTIONS: Mapping[str, Sequence[Case]] = {
    "good": GOOD,
    "r": R,
    "alpha": ALPHA,
    "patterns": PATTERNS,
    "targets": TARGETS,
    "init": INIT,
    "unsupported": UNSUPPORTED,
    "kinds": KINDS,
    "bases": BASES,
    "texts": TEXTS,
    "files": FILES,
    "weights": WEIGHTS,
    "names": NAMES,
    "shapes": SHAPES,
}
CASES: Sequence[Case] = [case for cases in SECTIONS.values() for case in cases]
