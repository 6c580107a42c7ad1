"""Whether the modules an adapter changes are in the base, as wide as there, and let through by vLLM.

vllm/lora/lora_model.py (0.32.0), `check_unexpected_modules`: the last part of a module's name has to be one that the
base has; what stands before it is not looked at. A module that the base lacks is loaded and never used, so that the
base answers in the adapter's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from components.core.capacity import PACKED
from components.core.check.base_layouts import ARCHITECTURES, LAYOUTS, VERSIONS, WRAPPERS
from components.core.check.base_model import LAYERS, BaseFacts, Module, split_layer
from components.core.check.tensor_names import WRAPPERS_OF_TRAINERS
from components.core.check.tensor_pairs import NAMES_SHOWN, Group, Pair, endings, last_part, share, shown, some, told
from components.core.findings import Finding, Severity
from components.core.vllm_loader import LoaderRules

LISTED_AT_MOST = 8

# Modules outside of language models, by a part of their names in the usual multimodal bases.
_TOWERS = frozenset(
    part for wrapper in WRAPPERS.values() for tower in wrapper.towers for part in tower.split(".") if part != "model"
)
# A filter that has the last part of the name of one of them lets all that are packed with it pass.
_PACKED_IN = {part: (packed, parts) for packed, parts in PACKED for part in parts}

_USUAL_MODULES = frozenset(name for layout in LAYOUTS.values() for name in layout.modules if not name.endswith("*"))
_USUAL_OPEN = ("mlp.", "block_sparse_moe.", "feed_forward.")
_USUAL_AT_THE_TOP = frozenset(
    name for layout in LAYOUTS.values() for name in (last_part(layout.embedding), *layout.heads, *layout.others)
)
_USUAL_LISTS_OF_LAYERS = frozenset(
    {
        *(f"{layout.body}.{layout.layers}" for layout in LAYOUTS.values()),
        *(layout.layers for layout in LAYOUTS.values()),
        *(f"{body}.layers" for wrapper in WRAPPERS.values() for body in wrapper.bodies),
    }
)


def modules(
    place: str, pairs: Mapping[str, Pair], rules: LoaderRules, base_model: BaseFacts | None
) -> Iterator[Finding]:
    """What does not belong to the base; without its config.json, to any of the usual ones."""
    if base_model is None:
        yield from _compared_with_the_usual(place, pairs)
    else:
        if not base_model.takes_lora:
            yield told(place, *_without_lora(base_model, rules))
        if base_model.known:
            yield from _compared_with(place, pairs, rules, base_model)
        else:
            kind = "a multimodal architecture" if base_model.multimodal else "an architecture"
            yield told(
                place,
                "warning",
                "unknown-base",
                [],
                f"the base is of {kind} that is not known here ({shown(base_model.architecture)}): names and widths "
                f"were not compared with it; make sure that the adapter answers otherwise than the base does.",
            )
    yield from _experts(place, pairs, rules, base_model)


def left_out(
    place: str,
    pairs: Mapping[str, Pair],
    lora_target_modules: tuple[str, ...] | None,
    base_model: BaseFacts | None,
) -> Iterator[Finding]:
    """Modules that `--lora-target-modules` keeps vLLM from adapting.

    vllm/lora/utils.py (0.32.0), `is_in_target_modules`: the last part of a name stands for all modules that have it,
    and for what is packed with it; a whole name for the one module that has it in the engine, where `….q_proj` is part
    of `….qkv_proj`.
    """
    if lora_target_modules is None:
        return
    allowed = set(lora_target_modules)
    for target in lora_target_modules:
        allowed.update(*({packed, *parts} for packed, parts in PACKED if target == packed or target in parts))
    experts = any("experts" in target for target in lora_target_modules)
    whole = {_identity(target, base_model) for target in lora_target_modules}
    names = [
        module
        for module, pair in pairs.items()
        if last_part(module) not in allowed
        and _identity(_in_engine(module, base_model), base_model) not in whole
        and not (pair.is_experts and experts)
    ]
    if not names:
        return
    has = ", ".join(sorted({shown(last_part(name)) for name in names})[:LISTED_AT_MOST])
    given = ", ".join(shown(target) for target in lora_target_modules[:LISTED_AT_MOST]) or "nothing"
    parts = [name for name in names if _identity(name, base_model) in whole]
    # Elsewhere a part may be a module of its own.
    is_packed = base_model is not None and base_model.known and not _by_transformers(base_model)
    if parts:
        packed = shown(_in_engine(parts[0], base_model))
        given += f" (a whole name is the engine's, which {'' if is_packed else 'usually '}has {packed} for this part)"
    severity: Severity = "error" if len(names) == len(pairs) and (is_packed or not parts) else "warning"
    if severity == "error":
        message = (
            f"the adapter changes {has} only, and --lora-target-modules lets vLLM adapt {given}: the base would answer "
            f"in its name. Widen or drop lora-target-modules."
        )
    else:
        message = (
            f"{len(names)} of {len(pairs)} modules ({has}) are left out by --lora-target-modules ({given}), so that "
            f"the adapter answers otherwise than it was trained to; widen or drop lora-target-modules."
        )
    yield told(place, severity, "target-modules-limit", names, message)


def _in_engine(module: str, base: BaseFacts | None) -> str:
    """What holds the module in the engine: itself, or what it is packed into with the others."""
    before, dot, last = module.rpartition(".")
    if last not in _PACKED_IN:
        return module
    packed, parts = _PACKED_IN[last]
    if base is not None and base.known:
        others = (split_layer(f"{before}{dot}{part}")[0] for part in parts)
        if any(base.find(other) is None for other in others):
            return module
    return f"{before}{dot}{packed}"


def _identity(name: str, base: BaseFacts | None) -> str | tuple[int | None, str]:
    """What a whole name is told from others by: its layer and its last part where vLLM may rename the rest, as it does
    in multimodal models and some with experts."""
    if base is not None and base.known and not (base.multimodal or base.has_experts or _by_transformers(base)):
        return name
    return split_layer(name)[1], last_part(name)


def _by_transformers(base: BaseFacts) -> bool:
    served = ARCHITECTURES.get(base.architecture)
    return served is not None and served.any_body


def not_listed(place: str, pairs: Mapping[str, Pair], config: Mapping[str, object]) -> Iterator[Finding]:
    """Modules that the config does not list: PEFT leaves them out, vLLM serves them.

    The other way round is normal: PEFT takes no offence at a listed module that the base does not have.
    """
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not targets or config.get("target_parameters"):
        return
    listed = {target for target in targets if isinstance(target, str)}
    if "all-linear" in listed:
        return
    names = [
        module
        for module, pair in pairs.items()
        if not pair.is_experts and last_part(module) not in listed and listed.isdisjoint(endings(module))
    ]
    if names:
        yield told(
            place,
            "warning",
            "not-in-target-modules",
            names,
            f"{share(names, len(pairs))} modules ({some(names)}) are not in target_modules of adapter_config.json; "
            f"make sure that config and weights are of the same training.",
        )


def other_layers(place: str, pairs: Mapping[str, Pair], config: Mapping[str, object]) -> Iterator[Finding]:
    """Layers that `layers_to_transform` leaves out: PEFT does not adapt them, vLLM never reads the key."""
    given = config.get("layers_to_transform")
    wanted = given if isinstance(given, list) else [given]
    if not wanted or not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in wanted):
        return
    # Python's sets are slow with large numbers that are chosen to be.
    layers = {layer for layer in wanted if isinstance(layer, int) and 0 <= layer < LAYERS}
    names = [module for module in pairs if (layer := split_layer(module)[1]) is not None and layer not in layers]
    if names:
        yield told(
            place,
            "warning",
            "layers-to-transform",
            names,
            f"{share(names, len(pairs))} modules ({some(names)}) are of layers that layers_to_transform in "
            f"adapter_config.json leaves out, and vLLM serves them; make sure that config and weights are of the same "
            f"training.",
        )


# --- with the base's config.json --------------------------------------------------------------------------


def _without_lora(base: BaseFacts, rules: LoaderRules) -> tuple[Severity, str, list[str], str]:
    serves = f"serves {shown(base.architecture)} without adapters"
    if rules.minor in VERSIONS:
        return "error", "base-without-lora", [], f"vLLM {serves} and would not start with one; choose another base."
    message = f"{_told_of(rules)} {serves}; make sure that this one starts with the adapter."
    return "warning", "base-without-lora", [], message


def _told_of(rules: LoaderRules) -> str:
    """Which vLLM a sentence is about that was not read in the one that is to serve."""
    known = " and ".join(f"{major}.{minor}" for major, minor in VERSIONS)
    return f"what vLLM {rules.version} adapts is not known here; vLLM {known}"


def _compared_with(place: str, pairs: Mapping[str, Pair], rules: LoaderRules, base: BaseFacts) -> Iterator[Finding]:
    missing, refused, beyond, widths, vocabulary, towers, embeddings = (Group() for _ in range(7))
    is_known_version = rules.minor in VERSIONS
    adapted = base.adapted
    for name, pair in pairs.items():
        template, layer = split_layer(name)
        module = base.find(template)
        if module is None:
            certain = is_known_version and adapted is not None and last_part(name) not in adapted
            (refused if certain else missing).add(name)
        elif module.kind == "tower":
            towers.add(name)
        elif is_known_version and not module.served:
            refused.add(name)
        elif layer is not None and base.layers is not None and layer >= base.layers:
            beyond.add(name)
        else:
            if not module.served:
                refused.add(name)
            if module.kind != "embedding" and pair.is_embedding:
                embeddings.add(name)
            _compare_widths(pair, module, vocabulary if module.kind == "embedding" else widths)
    total = len(pairs)
    architecture = shown(base.architecture)
    if refused.names and not is_known_version:
        yield told(
            place,
            "warning",
            "unknown-module",
            refused.names,
            f"{_told_of(rules)} would not adapt {share(refused.names, total)} modules ({some(refused.names)}) in "
            f"{architecture} and refuse the adapter; make sure that this one starts with it.",
        )
    elif refused.names:
        adapts = f" (it adapts {', '.join(sorted(adapted))})" if adapted else ""
        yield told(
            place,
            "error",
            "unknown-module",
            refused.names,
            f"{share(refused.names, total)} modules ({some(refused.names)}) are none that vLLM adapts in {architecture}"
            f"{adapts}, and it refuses the adapter; {_advice(refused.names[0], base)}",
        )
    if missing.names:
        fate = "load them and answer as the base does"
        if not is_known_version:
            fate = f"refuse them, or {fate}"
        yield told(
            place,
            "warning" if base.multimodal else "error",
            "not-in-base",
            missing.names,
            f"{share(missing.names, total)} modules ({some(missing.names)}) are not in the base ({architecture}): vLLM "
            f"would {fate}; {_advice(missing.names[0], base)}",
        )
    if beyond.names:
        yield told(
            place,
            "error",
            "layer-beyond",
            beyond.names,
            f"{share(beyond.names, total)} modules ({some(beyond.names)}) are of layers that the base does not have: "
            f"it has {base.layers}, counted from 0. Serve the adapter on the base it was trained on.",
        )
    if widths.names:
        yield told(
            place,
            "error",
            "width",
            widths.names,
            f"{share(widths.names, total)} modules are for a base of another size ({shown(widths.names[0])} "
            f"{widths.detail}); serve the adapter on the base it was trained on.",
        )
    if embeddings.names:
        yield told(
            place,
            "error",
            "embedding-name",
            embeddings.names,
            f"{share(embeddings.names, total)} modules ({some(embeddings.names)}) are saved as an embedding's "
            f"(lora_embedding_A, lora_embedding_B) and are none in the base, so that vLLM refuses the adapter; save it "
            f"again with PEFT's save_pretrained.",
        )
    if vocabulary.names:
        yield told(
            place,
            "error",
            "vocabulary",
            vocabulary.names,
            f"the embedding's matrices are for another vocabulary or width ({shown(vocabulary.names[0])} "
            f"{vocabulary.detail}), and vLLM refuses them; serve the adapter on the base it was trained on, or train "
            f"it without added tokens.",
        )
    if towers.names:
        yield told(place, "warning", "outside-language-model", towers.names, _of_towers(towers.names, total))


def _compare_widths(pair: Pair, module: Module, group: Group) -> None:
    for side, axis, expected, what in ((pair.a, 1, module.inputs, "inputs"), (pair.b, 0, module.outputs, "outputs")):
        for _, tensor in side:
            shape = tensor.shape
            if expected is not None and len(shape) == 2 and 0 not in shape and shape[axis] != expected:
                group.add(pair.module, f"has {shape[axis]} {what}, and the base {expected}")
                return


def _advice(name: str, base: BaseFacts) -> str:
    nearest = base.nearest(name)
    if nearest is not None and nearest != name:
        return f"what the base has is called {shown(nearest)}. Rename the tensors so, if they were trained for it."
    has = [known.replace("{}", "0") for known in base.modules][:NAMES_SHOWN]
    return f"the base has {some(has)}. Serve the adapter on the base it was trained on."


# --- without ----------------------------------------------------------------------------------------------


def _compared_with_the_usual(place: str, pairs: Mapping[str, Pair]) -> Iterator[Finding]:
    odd, towers = Group(), Group()
    for name in pairs:
        parts = name.split(".")
        if not _TOWERS.isdisjoint(parts):
            towers.add(name)
        elif "" not in parts and WRAPPERS_OF_TRAINERS.isdisjoint(parts[:-1]) and not _is_usual(name):
            odd.add(name)
    if odd.names:
        yield told(
            place,
            "warning",
            "unusual-name",
            odd.names,
            f"{share(odd.names, len(pairs))} modules ({some(odd.names)}) have names that none of the usual bases has; "
            f"vLLM would not notice and answer as the base does. Give the base's config.json to have them compared.",
        )
    if towers.names:
        yield told(place, "warning", "outside-language-model", towers.names, _of_towers(towers.names, len(pairs)))


def _is_usual(name: str) -> bool:
    template, layer = split_layer(name)
    if layer is None:
        return last_part(name) in _USUAL_AT_THE_TOP
    layers, _, below = template.partition(".{}.")
    return layers in _USUAL_LISTS_OF_LAYERS and (below in _USUAL_MODULES or below.startswith(_USUAL_OPEN))


# --- both -------------------------------------------------------------------------------------------------


def _of_towers(names: Sequence[str], total: int) -> str:
    """vllm/lora/model_manager.py, `_get_punica_wrapper`."""
    return (
        f"{share(names, total)} modules ({some(names)}) are outside of the language model: vLLM leaves them out unless "
        f"it is started with --enable-tower-connector-lora and the base's class supports that."
    )


def _experts(
    place: str, pairs: Mapping[str, Pair], rules: LoaderRules, base_model: BaseFacts | None
) -> Iterator[Finding]:
    if base_model is not None and base_model.known and not base_model.has_experts:
        return
    names = [module for module, pair in pairs.items() if pair.is_experts]
    if not names:
        return
    about = f"{share(names, len(pairs))} modules ({some(names)}) are experts"
    if rules.takes_fused_experts:
        message = (
            f"{about}. How vLLM takes them differs from model to model and from version to version, and their shapes "
            f"were not compared; make sure that the adapter answers otherwise than the base does."
        )
        yield told(place, "warning", "experts", names, message)
    else:
        message = f"{about}, which vLLM {rules.version} does not adapt; train without them, or serve by a newer vLLM."
        yield told(place, "error", "experts", names, message)
