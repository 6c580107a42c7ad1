"""What is wrong with an adapter's config, key by key: what vLLM refuses, and what it takes and serves wrongly.

Read in vLLM 0.32.0, vllm/lora/peft_helper.py (`PEFTHelper`), and in PEFT 0.21.2, peft/tuners/lora/config.py
(`LoraConfig`); `vllm_loader` says what other versions of vLLM do. Keys that only PEFT reads are warned of at most, and
keys that nobody knows are nobody's business.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from components.core.adapter import rank_of
from components.core.adapter_files import CONFIG_NAME
from components.core.errors import printable
from components.core.findings import Finding
from components.core.json_text import as_object, shown_json
from components.core.listing import listed_names
from components.core.vllm_loader import LoaderRules

REQUIRED = ("r", "lora_alpha", "target_modules")
NAMES_SHOWN = 5
# A config may hold expressions that take long to compile: how many, how long, and of what is bounded.
# vLLM multiplies by alpha over the rank in numbers of 32 bits or fewer.
SMALLEST_ALPHA, LARGEST_ALPHA = 1e-6, 1e6
PATTERN_CHARACTERS = 500
EXPRESSIONS = 100
EXPRESSIONS_CHARACTERS = 20_000

_MERGE = "merge the adapter into its base"

# peft_helper.py, `_init_is_supported`: these set the adapter's first values only, and leave the base as it is.
_PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
# Sub-configs of PEFT that change how an adapter is trained or first filled, not what a saved one means.
_HARMLESS_CONFIGS = frozenset(
    {
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "velora_config",
        "megatron_config",
        "runtime_config",
    }
)
_KNOWN_USES = frozenset({"use_rslora", "use_dora", "use_bdlora", "use_qalora"})

# peft/utils/peft_types.py, TaskType
_TASK_TYPES = frozenset({"SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"})
_PLAIN_NAME = re.compile(r"(?:[\w^$-]|\\?\.){0,500}")
# Expressions of groups, `|`, repeats and small sets. Python compiles others slowly (flags with a wide range of letters)
# or warns of them, which cannot be kept still in one thread alone.
_SIMPLE_EXPRESSION = re.compile(
    r"(?:[^\\\[(]|\\[^uUN]|\((?:\?:|(?!\?))|\[\^?(?:\w(?:-\w)?|\.|\\[.dw])+-?\])*", re.ASCII | re.DOTALL
)
_GENERATES = re.compile(r"CausalLM|ConditionalGeneration|LMHead|ImageTextToText|MultimodalLM|ForGeneration|ChatModel")


def config_findings(config: Mapping[str, object], rules: LoaderRules) -> Iterator[Finding]:
    """Everything found in a parsed `adapter_config.json`, whatever its values; every path is that name."""
    missing = [key for key in REQUIRED if key not in config]
    kind = config.get("peft_type")
    if not _is_lora(kind):
        yield _error(
            "peft-type",
            "peft_type",
            f"is {shown_json(kind)}; vLLM serves LoRA only, and would take this for LoRA or fail. Train a LoRA "
            f"adapter, or {_MERGE}.",
        )
        if missing:
            return
    elif missing:
        yield _error(
            "missing-key",
            missing[0],
            f"{' and '.join(missing)} missing, which vLLM needs: this is not a LoRA adapter's config. Name the "
            "directory that PEFT's save_pretrained wrote.",
        )
        if len(missing) == len(REQUIRED):
            return
    elif kind != "LORA":
        what = "missing" if kind is None else f"is {shown_json(kind)}"
        yield _warning("peft-type", "peft_type", f"{what}; vLLM takes the adapter for LoRA, PEFT wants LORA there.")
    yield from _rank(config, rules)
    yield from _alpha(config)
    yield from _target_modules(config)
    yield from _patterns(config, rules)
    yield from _variants(config, rules)
    yield from _init(config, rules)
    yield from _saved_modules(config, rules)
    yield from _unread_variants(config)
    yield from _purpose(config)
    yield from _peft_reads(config)


def _error(rule: str, subject: str, message: str) -> Finding:
    return Finding(CONFIG_NAME, "error", rule, subject, message)


def _warning(rule: str, subject: str, message: str) -> Finding:
    return Finding(CONFIG_NAME, "warning", rule, subject, message)


# --- what it is, and the required keys --------------------------------------------------------------------


def _is_lora(kind: object) -> bool:
    """vLLM never looks at `peft_type`."""
    return kind is None or (isinstance(kind, str) and kind.upper() == "LORA")


def _rank(config: Mapping[str, object], rules: LoaderRules) -> Iterator[Finding]:
    if "r" not in config:
        return
    rank = rank_of(config["r"])
    if rank is None:
        yield _error("rank", "r", f"must be a whole number of at least 1, not {shown_json(config['r'])}.")
    elif rank > rules.legal_ranks[-1]:
        yield _error("rank-too-large", "r", _too_large(rank, rules))


def _too_large(rank: int, rules: LoaderRules) -> str:
    shown = str(rank) if rank < 10**12 else "a number of many digits"
    return (
        f"is {shown}, and vLLM {rules.version} serves ranks up to {rules.legal_ranks[-1]}; train with a smaller one, "
        f"or {_MERGE}."
    )


def _scale_fault(value: object) -> str | None:
    """What is wrong with an alpha, as a clause; None for a number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"must be a number, not {shown_json(value)}"
    try:
        finite = math.isfinite(value)
    except OverflowError:
        finite = False
    if not finite:
        return f"must be a number, not {shown_json(value)}"
    if value == 0:
        return "is 0, so that the adapter changes nothing and the base would answer in its name"
    if not SMALLEST_ALPHA < abs(value) < LARGEST_ALPHA:
        return f"is {shown_json(value)}, which leaves nothing of the adapter, or nothing but it, in vLLM's numbers"
    return None


def _alpha(config: Mapping[str, object]) -> Iterator[Finding]:
    if "lora_alpha" not in config:
        return
    value = config["lora_alpha"]
    what = _scale_fault(value)
    if what is not None:
        yield _error("alpha", "lora_alpha", f"{what}; set what it was trained with.")
    elif isinstance(value, int | float) and value < 0:
        yield _warning(
            "alpha",
            "lora_alpha",
            f"is {shown_json(value)}: a negative scale takes away what was trained; make sure that this is meant.",
        )


def _target_modules(config: Mapping[str, object]) -> Iterator[Finding]:
    if "target_modules" not in config:
        return
    targets = config["target_modules"]
    # vLLM goes by the tensors' names. PEFT writes null where the model's default targets were meant, and an empty list
    # where parameters are targeted instead.
    if targets is None or targets == "" or (targets == [] and not config.get("target_parameters")):
        yield _warning(
            "target-modules",
            "target_modules",
            f"is {shown_json(targets)}, which is what a config says before training; make sure that config and "
            "weights are of the same training.",
        )
    elif not isinstance(targets, str) and not _is_names(targets):
        yield _error(
            "target-modules", "target_modules", f"must be a list of names or one string, not {shown_json(targets)}."
        )


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


# --- ranks and scales of single modules -------------------------------------------------------------------


def _patterns(config: Mapping[str, object], rules: LoaderRules) -> Iterator[Finding]:
    for key, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        value = config.get(key)
        if not value:
            continue
        pattern = as_object(value)
        if pattern is None:
            yield _error("pattern", key, f"must map module names to numbers, not be {shown_json(value)}.")
            continue
        yield from _expressions(key, pattern)
        if key == "rank_pattern":
            yield from _pattern_ranks(pattern, rules)
        else:
            yield from _pattern_alphas(pattern)
        differing = [name for name, number in pattern.items() if _differs(number, config.get(default))]
        if differing and not rules.reads_patterns:
            yield _error(
                "pattern-ignored",
                key,
                f"gives {_some(differing)} other values than {default}, and vLLM {rules.version} does not read it: "
                "these modules would be scaled wrongly. vLLM 0.32 and newer read it.",
            )


def _differs(number: object, default: object) -> bool:
    return isinstance(number, int | float) and isinstance(default, int | float) and number != default


def _expressions(key: str, pattern: Mapping[str, object]) -> Iterator[Finding]:
    """vLLM and PEFT match `(.*\\.)?(KEY)$` with a module's name."""
    # Most are plain names, of which there may be thousands.
    odd = [name for name in pattern if not _PLAIN_NAME.fullmatch(name)]
    characters = sum(map(len, odd))
    if len(odd) > EXPRESSIONS or characters > EXPRESSIONS_CHARACTERS:
        yield _error(
            "pattern",
            key,
            f"has {len(odd)} regular expressions of {characters} characters in all, and at most {EXPRESSIONS} of "
            f"{EXPRESSIONS_CHARACTERS} are read; write the modules' names.",
        )
        return
    faulty = [name for name in odd if not _is_expression(name)]
    if faulty:
        yield _error(
            "pattern",
            key,
            f"has names that are no simple regular expression (groups, sets and repeats, in ASCII, of up to "
            f"{PATTERN_CHARACTERS} characters): {_some(faulty)}; write the modules' names.",
        )


def _is_expression(text: str) -> bool:
    if len(text) > PATTERN_CHARACTERS or not text.isascii() or not _SIMPLE_EXPRESSION.fullmatch(text):
        return False
    try:
        re.compile(rf"(.*\.)?({text})$")
    except (re.error, OverflowError, RecursionError, MemoryError, ValueError):
        return False
    return True


def _pattern_ranks(pattern: Mapping[str, object], rules: LoaderRules) -> Iterator[Finding]:
    faulty = [name for name, value in pattern.items() if rank_of(value) is None]
    if faulty:
        yield _error(
            "rank",
            "rank_pattern",
            f"a rank must be a whole number of at least 1, not {shown_json(pattern[faulty[0]])} as for "
            f"{_some(faulty)}.",
        )
    ranks = [rank for value in pattern.values() if (rank := rank_of(value))]
    if ranks and max(ranks) > rules.legal_ranks[-1]:
        yield _error("rank-too-large", "rank_pattern", _too_large(max(ranks), rules))


def _pattern_alphas(pattern: Mapping[str, object]) -> Iterator[Finding]:
    faulty = {name: what for name, value in pattern.items() if (what := _scale_fault(value)) is not None}
    if faulty:
        names = list(faulty)
        yield _error("alpha", "alpha_pattern", f"the alpha of {_some(names)} {faulty[names[0]]}.")


def _some(names: list[str]) -> str:
    return listed_names(names, NAMES_SHOWN, limit=80)


# --- what vLLM does not implement -------------------------------------------------------------------------


def _variants(config: Mapping[str, object], rules: LoaderRules) -> Iterator[Finding]:
    """peft_helper.py, `_validate_features`: any true value counts."""
    if config.get("use_dora"):
        yield _error("dora", "use_dora", f"vLLM does not support DoRA; train without it, or {_MERGE}.")
    if config.get("bias", "none") != "none":
        yield _error(
            "bias",
            "bias",
            f"is {shown_json(config['bias'])}, and vLLM loads no biases of adapters; train with bias: none, or "
            f"{_MERGE}.",
        )
    if config.get("use_rslora") and not rules.reads_rslora:
        yield _error(
            "rslora",
            "use_rslora",
            f"vLLM {rules.version} does not scale by the square root of the rank; serve it by vLLM 0.6.6 or newer.",
        )
    for key, rule, name in (
        ("lora_bias", "lora-bias", "biases of LoRA matrices (lora_bias)"),
        ("alora_invocation_tokens", "alora", "activated LoRA, which starts at certain tokens only"),
        ("layer_replication", "layer-replication", "layers used more than once (layer_replication)"),
        ("use_bdlora", "bdlora", "block-diagonal LoRA"),
        ("use_qalora", "qalora", "QALoRA"),
    ):
        if config.get(key):
            yield _error(rule, key, f"{_not_supported(name, rules)}; train without it, or {_MERGE}.")


def _not_supported(name: str, rules: LoaderRules) -> str:
    if rules.refuses_variants:
        return f"vLLM does not support {name}"
    return f"vLLM {rules.version} does not know {name}, and would serve the adapter wrongly without a word"


def _init(config: Mapping[str, object], rules: LoaderRules) -> Iterator[Finding]:
    """peft_helper.py, `_init_is_supported`."""
    init = config.get("init_lora_weights", True)
    if not isinstance(init, str) or init.lower() in _PLAIN_INITS:
        return
    yield _error(
        "init",
        "init_lora_weights",
        f"{_not_supported(f'adapters that began as {shown_json(init)}', rules)}: such a beginning changes the base. "
        "Save it again with PEFT's path_initial_model_for_weight_conversion, or set true if the base served is the "
        "changed one.",
    )


def _saved_modules(config: Mapping[str, object], rules: LoaderRules) -> Iterator[Finding]:
    modules = config.get("modules_to_save")
    if modules:
        if isinstance(modules, list) and all(name in rules.full_modules for name in modules):
            # vllm/lora/model_manager.py, `_validate_modules_to_save`: refused for a model that generates.
            why = "a classifier's head, which vLLM loads only for a base that classifies, and a pod's generates text."
        else:
            why = f"modules trained as a whole, which vLLM does not load; train them by LoRA, or {_MERGE}."
        yield _error("modules-to-save", "modules_to_save", f"is {shown_json(modules)}: {why}")
    if config.get("trainable_token_indices"):
        yield _error(
            "trainable-tokens",
            "trainable_token_indices",
            f"tokens of the base were trained, and vLLM does not load these; train without it, or {_MERGE}.",
        )


def _unread_variants(config: Mapping[str, object]) -> Iterator[Finding]:
    """Switches of PEFT that `PEFTHelper` does not read."""
    names = [
        key
        for key, value in config.items()
        if value
        and (
            (key.endswith("_config") and key not in _HARMLESS_CONFIGS)
            or (key.startswith("use_") and key not in _KNOWN_USES)
        )
    ]
    if names:
        yield _warning(
            "unread-variant",
            printable(names[0], limit=80),
            f"{_some(names)} may make this another kind of LoRA, and vLLM does not look at that; compare the served "
            "adapter with PEFT's before relying on it.",
        )
    if config.get("target_parameters"):
        yield _warning(
            "target-parameters",
            "target_parameters",
            "parameters are targeted in place of modules, as for fused experts. How vLLM takes them differs from "
            "model to model and from version to version; try the adapter before relying on it.",
        )


# --- what it is for ---------------------------------------------------------------------------------------


def _purpose(config: Mapping[str, object]) -> Iterator[Finding]:
    task = config.get("task_type")
    if task is not None and task != "CAUSAL_LM":
        known = isinstance(task, str) and task in _TASK_TYPES
        why = "was not trained to continue text" if known else "is for a task that PEFT does not know"
        yield _warning(
            "task-type", "task_type", f"is {shown_json(task)}: the adapter {why}; make sure that it can answer prompts."
        )
    mapping = as_object(config.get("auto_mapping")) or {}
    trained = mapping.get("base_model_class")
    library = mapping.get("parent_library")
    if isinstance(trained, str) and not _GENERATES.search(trained):
        yield _warning(
            "not-a-language-model",
            "auto_mapping",
            f"was trained on a {printable(trained, limit=80)}, by its name no model that answers prompts; make sure "
            "that it is for the base.",
        )
    elif isinstance(library, str) and library.startswith("diffusers"):
        yield _warning(
            "not-a-language-model",
            "auto_mapping",
            "was trained on a model for pictures (diffusers); make sure that it is for the base.",
        )


def _peft_reads(config: Mapping[str, object]) -> Iterator[Finding]:
    """What PEFT's own reader refuses and vLLM does not read: config.py, `LoraConfig.__post_init__`."""
    by_text = isinstance(config.get("target_modules"), str)
    for key, refused in (
        ("layers_to_transform", by_text and config.get("layers_to_transform") is not None),
        (
            "layers_pattern",
            config.get("layers_pattern") is not None
            and (by_text or (bool(config["layers_pattern"]) and config.get("layers_to_transform") is None)),
        ),
        ("target_parameters", isinstance(config.get("target_parameters"), str)),
    ):
        if refused:
            yield _warning("peft-refuses", key, "PEFT refuses this beside the other keys; vLLM does not read it.")
