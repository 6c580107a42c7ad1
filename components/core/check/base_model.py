"""Which modules a base model has and how wide they are, from its Hugging Face config.json.

A LoRA matrix that names a module the base does not have is loaded by vLLM and never used: vllm/lora/lora_model.py
(0.32.0) compares the last part of a name only. So the names have to be known here. For an architecture that
components/core/check/base_layouts.py does not list, nothing is claimed: `BaseFacts.known` is False.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

from components.core.adapter_files import is_directory, read_start, shown_path
from components.core.check.base_layouts import (
    ARCHITECTURES,
    LAYOUTS,
    TEXT_MODELS,
    TOWER_MODULES,
    WIDTHS,
    WRAPPERS,
    Layout,
    Served,
    Wrapper,
)
from components.core.errors import os_reason, printable
from components.core.findings import FaultError, fault
from components.core.json_text import NotReadableError, as_object, parse_json

CONFIG_NAME = "config.json"
# Where else a base's longest context may stand (`derive_max_model_len_and_key` in
# vllm/transformers_utils/model_arch_config_convertor.py).
_OTHER_LENGTHS = (
    *("n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions", "max_sequence_length"),
    *("max_seq_length", "seq_len"),
)
# The largest in public repositories, with a list of modules left unquantised, is about a tenth of this.
CONFIG_LIMIT = 4 * 1024 * 1024
LARGEST_SIZE = 2**40

Kind: TypeAlias = Literal["linear", "embedding", "output", "tower", "varies"]

_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,5})(?=\.)")
LAYERS = 10**6
"""More than any number that is taken for a layer's."""
# What config.json calls the sizes of a layout, unless the layout says otherwise.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "layers": ("num_hidden_layers",),
    "mlp": ("intermediate_size",),
    "vocab": ("vocab_size",),
    "nope": ("qk_nope_head_dim",),
    "rope": ("qk_rope_head_dim",),
    "value": ("v_head_dim",),
    "q_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
}
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True)
class Module:
    """One module of the base, or one kind of module that all layers have."""

    inputs: int | None
    """Columns of its LoRA A matrix; None where they differ from layer to layer or cannot be told."""
    outputs: int | None
    """Rows of its LoRA B matrix; None likewise."""
    kind: Kind = "linear"
    """`tower`: outside of the language model of a multimodal base. `varies`: below this name anything may be."""
    served: bool = True
    """Whether vLLM takes LoRA for it."""


@dataclass(frozen=True)
class BaseFacts:
    """What a base is made of. Names are those of an adapter's tensors without `base_model.model.` in front."""

    architecture: str
    """The first of `architectures`; foreign text."""
    digest: str
    """SHA-256 of config.json's bytes, in hexadecimal."""
    known: bool = False
    """Whether the architecture is in the table; if not, `modules` is empty and says nothing."""
    multimodal: bool = False
    takes_lora: bool = True
    """False where vLLM serves the architecture without LoRA: of `VERSIONS` in base_layouts.py."""
    layers: int | None = None
    """Number of layers, where config.json says so."""
    modules: Mapping[str, Module] = field(default_factory=dict)
    """By name; a layer's number is written `{}`. The spelling that transformers writes comes first."""
    open_modules: Mapping[str, Module] = field(default_factory=dict)
    """Beginnings of names, with a dot at the end, below which anything may be."""

    @property
    def adapted(self) -> frozenset[str] | None:
        """The last parts of names that vLLM takes; None where some of them are not known."""
        if self.has_experts:
            return None
        served = frozenset(_last(name) for name, module in self.modules.items() if module.served)
        return served | TOWER_MODULES if self.multimodal else served

    @property
    def has_experts(self) -> bool:
        return any(module.kind == "varies" for module in self.open_modules.values())

    def find(self, template: str) -> Module | None:
        """The module of a name that `split_layer` has taken the layer's number from; None if the base has none."""
        module = self.modules.get(template)
        if module is None:
            for beginning, below in self.open_modules.items():
                if template.startswith(beginning):
                    return below
        return module

    def nearest(self, name: str) -> str | None:
        """The base's own name for what `name` seems to mean: the same module under another beginning."""
        template, number = split_layer(name)
        tail = _tail(template)
        for known in self.modules:
            if _tail(known) == tail and ("{}" in known) == (number is not None):
                return known if number is None else known.replace("{}", str(number))
        return None


def split_layer(name: str) -> tuple[str, int | None]:
    """`model.layers.3.mlp.up_proj` as (`model.layers.{}.mlp.up_proj`, 3): the first number is the layer's."""
    found = _NUMBER.search(name)
    if found is None:
        return name, None
    return f"{name[: found.start()]}{{}}{name[found.end() :]}", int(found.group())


def read_base_model(path: Path) -> BaseFacts:
    """What a base's config.json says of it, or the one in the directory `path`. Raises as `read_base_config` does."""
    return read_base_config(path)[1]


def read_base_config(path: Path) -> tuple[Mapping[str, object], BaseFacts]:
    """Reads a base's config.json, or the one in the directory `path`: all of it, and what it says of the base.

    Raises:
        FaultError: it cannot be read, is larger than 4 MiB, is no JSON object, has a key twice or names no
            architecture.
    """
    if "\0" in str(path):
        raise _no_base(shown_path(path), "a path cannot hold a NUL character.")
    file = path / CONFIG_NAME if is_directory(path) else path
    place = shown_path(file)
    try:
        real = file.resolve(strict=True)
    # A loop is a RuntimeError on Pythons before 3.13.
    except (OSError, RuntimeError) as error:
        if isinstance(error, FileNotFoundError) and file != path and not os.path.lexists(file):
            message = f"holds no {CONFIG_NAME}; name the config.json of the base model."
            raise _no_base(shown_path(path), message) from None
        reason = os_reason(error) if isinstance(error, OSError) else "a loop of links"
        raise _no_base(place, f"cannot be read ({reason}).") from None
    raw = read_start(real, place, CONFIG_LIMIT + 1)
    if len(raw) > CONFIG_LIMIT:
        raise _no_base(place, "larger than 4 MiB, which no model's config.json is.")
    try:
        document = as_object(parse_json(raw))
    except NotReadableError as error:
        raise _no_base(place, f"{error}; name the config.json of the base model.") from None
    if document is None:
        raise _no_base(place, "not a JSON object; name the config.json of the base model.")
    architectures = document.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        hint = " (this is an adapter's config)" if "peft_type" in document else ""
        raise _no_base(place, f"names no architectures; name the config.json of the base model{hint}.")
    return document, base_model_of(document, architectures[0], hashlib.sha256(raw).hexdigest())


def longest_context(config: Mapping[str, object]) -> int | None:
    """The most tokens that vLLM takes as its --max-model-len; None where config.json says it in another way.

    `_get_and_verify_max_len` of vllm/config/model.py (0.32.0), for the key that nearly all have and for rotary
    embeddings that are not stretched.
    """
    text = _text_config(config) or config
    longest = text.get("max_position_embeddings")
    if not isinstance(longest, int) or isinstance(longest, bool) or longest < 1:
        return None
    if any(part.get(key) is not None for part in (config, text) for key in _OTHER_LENGTHS):
        return None
    for key in ("rope_scaling", "rope_parameters"):
        stretched = text.get(key)
        if isinstance(stretched, Mapping):
            kind = stretched.get("rope_type") or stretched.get("type")
            nested = any(isinstance(value, Mapping) for value in stretched.values())
            if nested or (kind != "llama3" and (kind not in (None, "default") or stretched.get("factor") is not None)):
                return None
    return longest


def _no_base(place: str, message: str) -> FaultError:
    return fault(place, "base-config", message)


def base_model_of(config: Mapping[str, object], architecture: str, digest: str) -> BaseFacts:
    """The base that a parsed config.json describes; whatever is in it, nothing is raised."""
    wrapper = WRAPPERS.get(architecture)
    if wrapper is not None:
        return _multimodal(config, architecture, digest, wrapper)
    served = ARCHITECTURES.get(architecture)
    if served is None:
        nested = any(isinstance(config.get(key), dict) for key in (*_TEXT_CONFIGS, "vision_config", "audio_config"))
        return BaseFacts(printable(architecture), digest, multimodal=nested)
    layout = LAYOUTS[served.layout]
    sizes = _sizes(config, layout)
    # vllm/model_executor/models/transformers/base.py, _create_hf_to_vllm_mapper
    bodies = (layout.body, "model", "") if served.any_body else (layout.body,)
    return BaseFacts(
        architecture,
        digest,
        known=True,
        takes_lora=served.lora,
        layers=sizes.get("layers"),
        modules={**_body_modules(layout, sizes, bodies, served), **_head(layout, sizes, layout.heads, served)},
        open_modules=_open_modules(layout, bodies),
    )


def _text_config(config: Mapping[str, object]) -> Mapping[str, object] | None:
    return next((found for key in _TEXT_CONFIGS if isinstance(found := config.get(key), dict)), None)


def _multimodal(config: Mapping[str, object], architecture: str, digest: str, wrapper: Wrapper) -> BaseFacts:
    nested = _text_config(config)
    text = config if nested is None else nested
    model_type = text.get("model_type")
    if nested is None or not isinstance(model_type, str) or model_type not in TEXT_MODELS:
        model_type = wrapper.text_model if nested is None else None
    if model_type is None:
        return BaseFacts(architecture, digest, multimodal=True, takes_lora=wrapper.lora)
    served = ARCHITECTURES[TEXT_MODELS[model_type]]
    if wrapper.own_head:
        served = replace(served, embeddings=())
    layout = LAYOUTS[served.layout]
    sizes = _sizes(text, layout)
    towers = dict.fromkeys((f"{tower}." for tower in wrapper.towers), Module(None, None, "tower"))
    return BaseFacts(
        architecture,
        digest,
        known=True,
        multimodal=True,
        takes_lora=wrapper.lora,
        layers=sizes.get("layers"),
        modules={
            **_body_modules(layout, sizes, wrapper.bodies, served),
            **_head(layout, sizes, (*layout.heads, *(f"language_model.{head}" for head in layout.heads)), served),
        },
        open_modules={**_open_modules(layout, wrapper.bodies), **towers},
    )


# --- widths -----------------------------------------------------------------------------------------------


def _size(config: Mapping[str, object], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_SIZE:
            return value
    return None


def _sizes(config: Mapping[str, object], layout: Layout) -> dict[str, int]:
    """Everything of `WIDTHS` that is known, and `layers`."""
    given = {name: _size(config, layout.keys.get(name, keys)) for name, keys in _KEYS.items()}
    given["embed"] = _size(config, layout.keys.get("embed", ()))
    hidden, heads = given["hidden"], given["heads"]
    kv_keys = layout.keys.get("kv_heads", _KEYS["kv_heads"])
    head_dim = given["head_dim"]
    if head_dim is None and layout.head_dim is None and hidden and heads:
        head_dim = hidden // heads
    elif head_dim is None and "head_dim" not in config:
        head_dim = layout.head_dim
    kv_heads = given["kv_heads"]
    if kv_heads is None and layout.all_heads_have_keys and all(config.get(key) is None for key in kv_keys):
        kv_heads = heads
    if kv_heads and heads and heads % kv_heads:
        kv_heads = None  # no base has such heads
    # ChatGLM without it has as many key heads as heads, whatever multi_query_group_num is.
    if config.get("multi_query_attention") is False:
        kv_heads = heads
    if hidden and layout.mlp_of_hidden:
        given["mlp"] = given["mlp"] or layout.mlp_of_hidden * hidden
    given["q"] = heads * head_dim if heads and head_dim else None
    given["kv"] = kv_heads * head_dim if kv_heads and head_dim else None
    return {name: size for name, size in given.items() if size is not None and name in (*WIDTHS, "layers")}


def _width(formula: str, sizes: Mapping[str, int]) -> int | None:
    total = 0
    for term in formula.split("+"):
        product = 1
        for factor in term.split("*"):
            size = int(factor) if factor.isdecimal() else sizes.get(factor)
            if size is None:
                return None
            product *= size
        total += product
    return total


def _module(formula: str, sizes: Mapping[str, int], kind: Kind = "linear", served: bool = True) -> Module:
    inputs, _, outputs = formula.partition(" > ")
    return Module(_width(inputs, sizes), _width(outputs, sizes), kind, served)


# --- names ------------------------------------------------------------------------------------------------


def _below(body: str, name: str) -> str:
    return f"{body}.{name}" if body else name


def _body_modules(
    layout: Layout, sizes: Mapping[str, int], bodies: tuple[str, ...], served: Served
) -> dict[str, Module]:
    named: dict[str, Module] = {}
    for name, formula in layout.modules.items():
        if not name.endswith("*") and _is_there(name, sizes):
            named[f"{layout.layers}.{{}}.{name}"] = _module(formula, sizes, served=_is_served(name, served))
    for name, formula in layout.others.items():
        named[name] = _module(formula, sizes, served=_is_served(name, served))
    # Where `embed` is a size of its own, the embedding is narrower than the layers.
    embedded = "vocab > embed" if "embed" in layout.keys else "vocab > hidden"
    named[layout.embedding] = _module(embedded, sizes, "embedding", _takes(layout.embedding, served))
    return {_below(body, name): module for body in bodies for name, module in named.items()}


def _head(layout: Layout, sizes: Mapping[str, int], names: tuple[str, ...], served: Served) -> dict[str, Module]:
    width = "embed > vocab" if "embed" in layout.keys else "hidden > vocab"
    return {name: _module(width, sizes, "output", _takes(name, served)) for name in names}


def _takes(name: str, served: Served) -> bool:
    return _last(name) in served.embeddings


def _is_there(name: str, sizes: Mapping[str, int]) -> bool:
    """DeepSeek computes queries in one step, or by q_lora_rank in two."""
    if name == "self_attn.q_proj":
        return "q_rank" not in sizes
    return "q_rank" in sizes or not name.startswith(("self_attn.q_a", "self_attn.q_b"))


def _is_served(name: str, served: Served) -> bool:
    return _last(name) not in served.refused


def _open_modules(layout: Layout, bodies: tuple[str, ...]) -> dict[str, Module]:
    beginnings = [name.removesuffix("*") for name in layout.modules if name.endswith("*")]
    return {
        _below(body, f"{layout.layers}.{{}}.{beginning}"): Module(None, None, "varies")
        for body in bodies
        for beginning in beginnings
    }


def _tail(template: str) -> str:
    """What stands after the layer's number; the last part where there is none."""
    before, mark, after = template.partition("{}.")
    return after if mark else _last(before)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
