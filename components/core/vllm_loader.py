"""What vLLM's LoRA loader accepts, by version.

Read in the source distributions of every minor release from 0.6.5 to 0.33.0, in `vllm/lora/peft_helper.py`,
`vllm/lora/lora_model.py` (`vllm/lora/models.py` before 0.13), `vllm/lora/utils.py` and `vllm/config/lora.py`
(`vllm/config.py` before 0.10.1). A rule that never changed stands with the check that applies it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from components.core.errors import UserError, printable

OLDEST = "0.6.5"
NEWEST = "0.33.0"
DRAINS_SINCE = "0.18.0"

_RELEASE = re.compile(r"v?(\d{1,6}(?:\.\d{1,6}){0,3})")


@dataclass(frozen=True)
class LoaderRules:
    """The rules of one version."""

    version: str
    """As a message names it: what the stack file says, or the newest known."""
    minor: tuple[int, ...]
    """Its first two numbers: (0, 32)."""
    legal_ranks: tuple[int, ...]
    """What `--max-lora-rank` takes: `MaxLoRARanks` (`possible_max_ranks` before 0.11.1) in config/lora.py."""
    reads_rslora: bool
    """Since 0.6.6 (peft_helper.py) `use_rslora` scales by the square root of the rank; 0.6.5 refuses it."""
    takes_fused_experts: bool
    """Since 0.11.1 (models.py) the experts of a mixture are LoRA modules, fused ones under `.base_layer` names too."""
    skips_base_embeddings: bool
    """Since 0.12.0 (utils.py, `is_base_embedding_weights`) `….embed_tokens.base_layer.weight` and
    `….lm_head.base_layer.weight`, the untouched embeddings that PEFT saves, are passed over; before, refused."""
    drains: bool
    """Since 0.18.0 (engine/arg_utils.py, `shutdown_timeout`) `--shutdown-timeout` exists: an engine that is told to
    stop lets the requests in flight finish."""
    limits_target_modules: bool
    """Since 0.19.0 (config/lora.py, `target_modules`) `--lora-target-modules` exists."""
    full_modules: tuple[str, ...]
    """Since 0.31.0 (peft_helper.py, `_validate_features`) a classifier's head may be in `modules_to_save`."""
    reads_patterns: bool
    """Since 0.32.0 (peft_helper.py, `get_rank_and_scaling`) `rank_pattern` and `alpha_pattern` count. Before, every
    module is scaled by `r` and `lora_alpha`, without a word."""
    refuses_variants: bool
    """Since 0.32.0 (peft_helper.py, `_validate_features`) initialisations that changed the base, activated LoRA,
    `layer_replication`, `lora_bias`, BD-LoRA and QALoRA are refused. Before, they are served as plain LoRA."""


def loader_rules(version: str | None) -> LoaderRules:
    """The rules of a version; of the newest known for None and for what is no version."""
    number = _number(version) if version is not None else None
    if number is None:
        number = _known(NEWEST)
        version = NEWEST
    return LoaderRules(
        version=printable(version, limit=40),
        minor=number[:2],
        legal_ranks=_legal_ranks(number),
        reads_rslora=number >= (0, 6, 6),
        takes_fused_experts=number >= (0, 11, 1),
        skips_base_embeddings=number >= (0, 12),
        drains=number >= _known(DRAINS_SINCE),
        limits_target_modules=number >= (0, 19),
        full_modules=("classifier", "score") if number >= (0, 31) else (),
        reads_patterns=number >= (0, 32),
        refuses_variants=number >= (0, 32),
    )


def round_up_rank(rank: int, rules: LoaderRules) -> int:
    """The smallest `--max-lora-rank` of this version that holds an adapter of this rank.

    Raises UserError for a rank below 1 or above the largest legal one.
    """
    if rank < 1:
        raise UserError(f"rank {rank} is no LoRA rank: it must be at least 1")
    for legal in rules.legal_ranks:
        if rank <= legal:
            return legal
    raise UserError(
        f"rank {rank} is above {rules.legal_ranks[-1]}, the most vLLM {rules.version} serves; train with a smaller r, "
        "or merge the adapter into its base"
    )


def version_warning(version: str | None) -> str | None:
    """Why the rules may not be this version's, as a whole clause; None where they are."""
    if version is None:
        return None
    shown = printable(version, limit=40)
    number = _number(version)
    if number is None:
        return f"{shown} is no release of vLLM, so that adapters are checked by the rules of {NEWEST}"
    if number > _known(NEWEST):
        return (
            f"vLLM {shown} is newer than {NEWEST}, the newest whose LoRA loader is known here; adapters are checked by "
            f"the rules of {NEWEST}"
        )
    if number < _known(OLDEST):
        return (
            f"vLLM {shown} is older than {OLDEST}, the oldest whose LoRA loader is known here; adapters are checked by "
            f"the rules of {OLDEST}"
        )
    return None


def _number(version: str) -> tuple[int, ...] | None:
    """The numbers at the front of a version: 0.33.0rc1 and 0.33.0.post1 have the rules of 0.33.0."""
    found = _RELEASE.match(version)
    return tuple(map(int, found[1].split("."))) if found else None


def _known(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _legal_ranks(number: tuple[int, ...]) -> tuple[int, ...]:
    ranks: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    if number >= (0, 8):
        ranks = (*ranks, 320, 512)
    return (1, *ranks) if number >= (0, 11, 1) else ranks
