"""The rules of adapter_config.json: what each value leads to, and what any value at all leads to."""

import json
import math
import re
import warnings
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.check.config_rules import config_findings
from components.core.findings import Finding
from components.core.vllm_loader import loader_rules
from tests.support.adapters import CONFIG, Json

NEWEST = loader_rules(None)


def found(config: Mapping[str, object], vllm: str | None = None) -> list[Finding]:
    return list(config_findings(config, loader_rules(vllm)))


def verdicts(vllm: str | None = None, **changes: object) -> list[tuple[str, str, str]]:
    """Severity, rule and key of everything found in a sound config with these changes."""
    return [(each.severity, each.rule, each.subject) for each in found({**CONFIG, **changes}, vllm)]


def sentence(vllm: str | None = None, **changes: object) -> str:
    (only,) = found({**CONFIG, **changes}, vllm)
    return f"{only.subject}: {only.message}"


# --- sound ones -------------------------------------------------------------------------------------------

# What PEFT 0.19 writes for a plain adapter.
FULL: Mapping[str, object] = {
    **CONFIG,
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_dropout": 0.05,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_version": "0.19.1",
    "qalora_group_size": 16,
    "rank_pattern": {},
    "revision": None,
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}


@pytest.mark.parametrize("vllm", [None, "0.33.0", "0.32.0", "0.12.0", "0.10.2", "0.6.6", "0.6.5"])
def test_a_plain_adapter_is_sound_for_every_version(vllm: str | None) -> None:
    assert found(FULL, vllm) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"key_of_the_future": [1, {"a": None}]},
        {"eva_config": {"rho": 2.0}, "init_lora_weights": "eva"},
        {"corda_config": {"corda_method": "ipm"}},
        {"velora_config": {"num_groups": 64}},
        {"enable_lora": None, "merge_weights": False},
        {"target_modules": "all-linear"},
        {"target_modules": r"model.*(q_proj|v_proj)$"},
        {"lora_alpha": 16.5},
        {"lora_alpha": 1, "r": 256},
        {"r": 512},
        {"use_rslora": True},
        {"modules_to_save": []},
        {"rank_pattern": {"q_proj": 64, r"^model\.layers\.\d+\.mlp\..*_proj": 2}, "alpha_pattern": {"q_proj": 0.5}},
        {"init_lora_weights": False},
        {"init_lora_weights": "Gaussian"},
        {"init_lora_weights": "lora_ga"},
        {"trainable_token_indices": []},
        {"auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers"}},
        {"lora_dropout": 0},
    ],
)
def test_what_is_no_fault(changes: Mapping[str, object]) -> None:
    assert found({**FULL, **changes}) == []


# --- the required keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"base_model": "x"},
            "r: r and lora_alpha and target_modules missing, which vLLM needs: this is not a LoRA adapter's config. "
            "Name the directory that PEFT's save_pretrained wrote.",
        ),
        (
            {"r": 8, "target_modules": ["q_proj"], "peft_type": "LORA"},
            "lora_alpha: lora_alpha missing, which vLLM needs: this is not a LoRA adapter's config. Name the directory "
            "that PEFT's save_pretrained wrote.",
        ),
        (
            {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 20},
            'peft_type: is "PREFIX_TUNING"; vLLM serves LoRA only, and would take this for LoRA or fail. Train a LoRA '
            "adapter, or merge the adapter into its base.",
        ),
        (
            {**CONFIG, "peft_type": "ADALORA"},
            'peft_type: is "ADALORA"; vLLM serves LoRA only, and would take this for LoRA or fail. Train a LoRA '
            "adapter, or merge the adapter into its base.",
        ),
    ],
)
def test_what_is_no_lora_adapter(config: Mapping[str, object], expected: str) -> None:
    assert [f"{each.severity} {each.subject}: {each.message}" for each in found(config)] == [f"error {expected}"]


def test_peft_wants_its_type_spelt_right() -> None:
    config = {key: value for key, value in CONFIG.items() if key != "peft_type"}
    assert [(each.severity, each.subject) for each in found(config)] == [("warning", "peft_type")]
    assert verdicts(peft_type="lora") == [("warning", "peft-type", "peft_type")]
    assert verdicts(peft_type=7) == [("error", "peft-type", "peft_type")]


@pytest.mark.parametrize(
    ("rank", "shown"),
    [
        (0, "0"),
        (-8, "-8"),
        ("16", '"16"'),
        (True, "true"),
        (8.0, "8.0"),
        (None, "null"),
        (math.nan, "NaN"),
        ([8], "[8]"),
        ("\x1b[31m\n", r'"\u001b[31m\n"'),
    ],
)
def test_ranks_that_are_none(rank: Json, shown: str) -> None:
    assert sentence(r=rank) == f"r: must be a whole number of at least 1, not {shown}."


@pytest.mark.parametrize(
    ("vllm", "ceiling", "rank"), [(None, 512, 513), (None, 512, 600), ("0.7.3", 256, 257), ("0.8.0", 512, 10**4000)]
)
def test_a_rank_above_the_ceiling(vllm: str | None, ceiling: int, rank: int) -> None:
    assert f"{vllm or '0.33.0'} serves ranks up to {ceiling}; train with a smaller one" in sentence(vllm, r=rank)
    assert verdicts(vllm, rank_pattern={"q_proj": rank})[0] == ("error", "rank-too-large", "rank_pattern")
    assert verdicts(vllm, r=ceiling) == []


@pytest.mark.parametrize(
    ("alpha", "shown"),
    [("16", '"16"'), (None, "null"), (False, "false"), (math.nan, "NaN"), (math.inf, "Infinity"), ({}, "{}")],
)
def test_alphas_that_are_none(alpha: Json, shown: str) -> None:
    assert sentence(lora_alpha=alpha) == f"lora_alpha: must be a number, not {shown}; set what it was trained with."


def test_odd_alphas() -> None:
    assert verdicts(lora_alpha=10**400) == [("error", "alpha", "lora_alpha")]
    assert "the base would answer in its name" in sentence(lora_alpha=0)
    assert verdicts(lora_alpha=0.0) == [("error", "alpha", "lora_alpha")]
    assert verdicts(lora_alpha=-16) == [("warning", "alpha", "lora_alpha")]


@pytest.mark.parametrize("targets", [7, ["q", 1], {"q": 1}, True])
def test_target_modules_that_are_none(targets: Json) -> None:
    assert sentence(target_modules=targets).startswith("target_modules: must be a list of names or one string, not ")


def test_a_template_that_was_never_trained() -> None:
    assert verdicts(target_modules=None) == [("warning", "target-modules", "target_modules")]


# --- patterns ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rank_pattern": [8]}, "rank_pattern: must map module names to numbers, not be [8]."),
        (
            {"rank_pattern": {"q\x1b": True}},
            r"rank_pattern: a rank must be a whole number of at least 1, not true as for q\x1b.",
        ),
        (
            {"rank_pattern": {"q": math.nan, "v": 0, "k": 8}},
            "rank_pattern: a rank must be a whole number of at least 1, not NaN as for q, v.",
        ),
        ({"alpha_pattern": {"q": math.nan}}, "alpha_pattern: the alpha of q must be a number, not NaN."),
        ({"alpha_pattern": {"q": None}}, "alpha_pattern: the alpha of q must be a number, not null."),
        (
            {"rank_pattern": {"q(": 8}},
            "rank_pattern: has names that are no simple regular expression (groups, sets and repeats, in ASCII, of up "
            "to 500 characters): q(; write the modules' names.",
        ),
    ],
)
def test_faulty_patterns(changes: Mapping[str, object], expected: str) -> None:
    assert sentence(**changes) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "key",
    [
        r".*\.layers\.(?:0|1)\.self_attn\.(q|k)_proj",
        r"layers\.[0-9]+\.[\w.-]*mlp",
        r"layers.(1[0-5]|[^0-9]).\w+?_proj",
        r"^model\.(layers\.\d{1,2}\.)+[qkv]_proj$",
    ],
)
def test_keys_that_are_expressions(key: str) -> None:
    assert verdicts(rank_pattern={key: 4}) == []


@pytest.mark.parametrize(
    "key",
    [
        *("(" * 400, "a{99999999999}", "x" * 501, "[", "(?P<a>x)(?P<a>y)", "\\", "[z-a]"),
        # Slow to compile, or doubted by Python in a warning.
        *("(?i:[\\u0100-\\uffff])", "(?i)q", "[\u0100-\uffff]", "\\N{DIGIT ONE}", "(?=q)", "[[a]", "[a--b]", "[a||b]"),
    ],
)
def test_keys_that_are_no_simple_expression(key: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ("error", "pattern", "rank_pattern") in verdicts(rank_pattern={key: 4})


@pytest.mark.parametrize(
    "keys",
    [[f"layers.({number})" for number in range(101)], [f"({number}{'a' * 490})" for number in range(41)]],
)
def test_more_expressions_than_are_read(keys: list[str]) -> None:
    assert verdicts(rank_pattern=dict.fromkeys(keys, 4)) == [("error", "pattern", "rank_pattern")]
    assert verdicts(rank_pattern=dict.fromkeys(keys[:40], 4)) == []


def test_plain_names_are_no_expressions_however_many() -> None:
    names = [f"model.layers.{number}.self_attn.q_proj" for number in range(5000)]
    for pattern in (names, [name.replace(".", "\\.") for name in names]):
        assert verdicts(rank_pattern=dict.fromkeys(pattern, 4)) == []


def test_an_alpha_of_zero_for_one_module_is_a_fault() -> None:
    assert verdicts(alpha_pattern={"q_proj": 0}) == [("error", "alpha", "alpha_pattern")]


@pytest.mark.parametrize("pattern", [{"rank_pattern": {"q_proj": 8}}, {"alpha_pattern": {"q_proj": 8}}])
def test_versions_that_ignore_patterns(pattern: Mapping[str, object]) -> None:
    (key,) = pattern
    assert verdicts("0.31.0", **pattern) == [("error", "pattern-ignored", key)]
    assert verdicts("0.32.0", **pattern) == []
    assert verdicts("0.31.0", rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 16}) == []


def test_a_million_patterns_are_told_in_a_sentence() -> None:
    pattern = {f"layers.({number})": 0 for number in range(50_000)}
    assert all(len(each.message) < 400 for each in found({**CONFIG, "rank_pattern": pattern}))


# --- what vLLM does not implement -------------------------------------------------------------------------

REFUSED: list[tuple[str, object]] = [
    ("use_dora", True),
    ("use_dora", "false"),
    ("bias", "all"),
    ("bias", "lora_only"),
    ("bias", None),
    ("modules_to_save", ["lm_head"]),
    ("modules_to_save", "classifier"),
    ("modules_to_save", {"lm_head": 1}),
    ("modules_to_save", ["classifier", "score"]),
    ("trainable_token_indices", [1, 2]),
    ("trainable_token_indices", {"embed_tokens": [1]}),
    ("lora_bias", True),
    ("alora_invocation_tokens", [5]),
    ("layer_replication", [[0, 2]]),
    ("use_bdlora", {"nblocks": 2}),
    ("use_qalora", True),
    ("init_lora_weights", "pissa"),
    ("init_lora_weights", "pissa_niter_4"),
    ("init_lora_weights", "PiSSA"),
    ("init_lora_weights", "olora"),
    ("init_lora_weights", "corda"),
    ("init_lora_weights", "loftq"),
    ("init_lora_weights", "true"),
    ("init_lora_weights", ""),
]


@pytest.mark.parametrize(("key", "value"), REFUSED)
@pytest.mark.parametrize("vllm", [None, "0.32.0", "0.31.0", "0.12.0", "0.6.5"])
def test_what_no_version_serves_rightly(vllm: str | None, key: str, value: object) -> None:
    assert [(severity, subject) for severity, _, subject in verdicts(vllm, **{key: value})] == [("error", key)]


def test_older_versions_serve_variants_wrongly_without_a_word() -> None:
    assert sentence("0.31.0", use_qalora=True) == (
        "use_qalora: vLLM 0.31.0 does not know QALoRA, and would serve the adapter wrongly without a word; train "
        "without it, or merge the adapter into its base."
    )
    assert sentence(use_qalora=True).startswith("use_qalora: vLLM does not support QALoRA; ")


def test_a_classifiers_head_is_for_a_base_that_classifies() -> None:
    assert "a base that classifies, and a pod's generates text" in sentence(modules_to_save=["score"])
    assert "modules trained as a whole" in sentence("0.30.0", modules_to_save=["score"])


def test_rslora_before_vllm_scaled_by_it() -> None:
    assert verdicts("0.6.5", use_rslora=True) == [("error", "rslora", "use_rslora")]
    assert verdicts("0.6.6", use_rslora=True) == []


@pytest.mark.parametrize(
    ("changes", "rule", "key"),
    [
        ({"kasa_config": {"beta": 0.0001}}, "unread-variant", "kasa_config"),
        ({"use_something_new": True}, "unread-variant", "use_something_new"),
        ({"arrow_config": {"top_k": 3}, "astra_config": {"a": 1}}, "unread-variant", "arrow_config"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target-parameters", "target_parameters"),
        ({"task_type": "SEQ_CLS"}, "task-type", "task_type"),
        ({"task_type": "MADE_UP"}, "task-type", "task_type"),
        (
            {
                "auto_mapping": {
                    "base_model_class": "UNet2DConditionModel",
                    "parent_library": "diffusers.models.unets.unet_2d_condition",
                }
            },
            "not-a-language-model",
            "auto_mapping",
        ),
        ({"target_modules": ".*q", "layers_to_transform": [1]}, "peft-refuses", "layers_to_transform"),
        ({"layers_pattern": "h"}, "peft-refuses", "layers_pattern"),
    ],
)
def test_doubts(changes: Mapping[str, object], rule: str, key: str) -> None:
    assert verdicts(**changes) == [("warning", rule, key)]  # type: ignore[arg-type]


def test_everything_is_found_at_once() -> None:
    subjects = {
        each.subject for each in found({**CONFIG, "r": 0, "lora_alpha": math.nan, "use_dora": True, "bias": "all"})
    }
    assert subjects == {"r", "lora_alpha", "use_dora", "bias"}


# --- anything at all --------------------------------------------------------------------------------------

KEYS = sorted({*FULL, *(key for key, _ in REFUSED), "kasa_config", "use_x", "auto_mapping", "target_parameters"})
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([10**400, "none", "LORA", "\ud800", "\x1b[0m\n", "classifier"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
configs = st.dictionaries(st.sampled_from(KEYS) | st.text(), values, max_size=8)
versions = st.sampled_from([None, "0.6.5", "0.11.0", "0.31.0", "0.32.0", "9.9", "nightly"])


@given(changes=configs, whole=st.booleans(), vllm=versions)
def test_any_value_of_any_key_gives_findings_fit_to_be_shown(
    changes: dict[str, object], whole: bool, vllm: str | None
) -> None:
    for each in found({**CONFIG, **changes} if whole else changes, vllm):
        assert each.path == "adapter_config.json"
        assert str(each).isprintable()
        assert each.message.endswith(".")
        assert len(each.message) < 800


def refused_by_vllm(config: Mapping[str, object]) -> bool:
    """What vLLM 0.32.0 makes of values of the kinds below, told without its code: see peft_helper.py."""
    init = config.get("init_lora_weights", True)
    return (
        any(key not in config for key in ("r", "lora_alpha", "target_modules"))
        or (isinstance(config["r"], int) and config["r"] <= 0)
        or bool(config.get("use_dora"))
        or bool(config.get("lora_bias"))
        or config.get("bias", "none") != "none"
        or bool(config.get("alora_invocation_tokens"))
        or bool(config.get("layer_replication"))
        or bool(config.get("use_bdlora"))
        or bool(config.get("use_qalora"))
        or (isinstance(init, str) and init.lower() not in ("gaussian", "eva", "orthogonal", "mica", "lora_ga"))
    )


@given(changes=configs, dropped=st.sets(st.sampled_from(["r", "lora_alpha", "target_modules"])))
def test_nothing_that_vllm_refuses_passes(changes: dict[str, object], dropped: set[str]) -> None:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if key not in dropped}
    if refused_by_vllm(config):
        assert any(each.severity == "error" for each in found(config))


scales = st.floats(allow_nan=True) | st.floats(1e-5, 1e5) | st.integers() | st.booleans() | st.text() | st.none()


@given(alpha=scales)
def test_an_alpha_passes_only_if_it_scales(alpha: object) -> None:
    sound = isinstance(alpha, int | float) and not isinstance(alpha, bool) and 1e-6 < abs(alpha) < 1e6
    assert (not any(severity == "error" for severity, *_ in verdicts(lora_alpha=alpha))) == sound


@given(rank=scales)
def test_a_rank_passes_only_if_vllm_has_room_for_it(rank: object) -> None:
    sound = isinstance(rank, int) and not isinstance(rank, bool) and 1 <= rank <= 512
    assert (verdicts(r=rank) == []) == sound
    assert (verdicts(rank_pattern={"q_proj": rank}) == []) == sound


@given(name=st.text(max_size=30))
def test_no_key_of_a_pattern_passes_that_is_no_expression(name: str) -> None:
    try:
        re.compile(rf"(.*\.)?({name})$")
    except re.error:
        assert ("error", "pattern", "rank_pattern") in verdicts(rank_pattern={name: 4})


def test_json_of_every_kind_survives() -> None:
    deep: object = 1
    for _ in range(300):
        deep = [deep]
    for key in KEYS:
        for value in (deep, {"a": deep}, "x" * 100_000, list(range(100_000))):
            for each in found({**CONFIG, key: json.loads(json.dumps(value))}):
                assert len(str(each)) < 1000
