"""Shapes and types of LoRA matrices, held against each other and against the ranks of adapter_config.json.

vllm/lora/layers/*.py (0.32.0), `set_lora`: a matrix is copied into the corner of a buffer of zeros. One that is empty
or too small changes less than it should without a word, one that is too large ends the server, and so does a matrix
without its other half (vllm/lora/lora_weights.py, `optimize`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from components.core.adapter import rank_of
from components.core.check.tensor_pairs import NAMES_SHOWN, Group, Pair, endings, shown, some, told
from components.core.findings import Finding
from components.core.safetensors_header import Tensor

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_COARSE_FLOATS = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
_PLAIN_PATTERN = re.compile(r"(?:[A-Za-z0-9_-]|\\?\.)+")
_AGAIN = "save the adapter again with PEFT's save_pretrained."


def halves(place: str, pairs: Mapping[str, Pair]) -> Iterator[Finding]:
    """Matrices whose other half is missing."""
    alone = [pair.matrices[0][0] for pair in pairs.values() if not pair.a or not pair.b]
    if alone:
        yield told(
            place,
            "error",
            "half-a-pair",
            alone,
            f"{len(alone)} of {len(pairs)} modules have only one of their two matrices ({some(alone)}); vLLM fails on "
            f"that, or leaves them as they are in the base. The file is incomplete: save or copy the adapter again.",
        )


def shapes(place: str, pairs: Mapping[str, Pair], config: Mapping[str, object]) -> Iterator[Finding]:
    """Matrices that are empty or none, that do not fit together, or that have another rank than the config says."""
    ranks = _Ranks(config)
    dimensions, empty, unequal, other_rank, unsure = (Group() for _ in range(5))
    for module, pair in pairs.items():
        sound = True
        for name, tensor in pair.matrices:
            if 0 in tensor.shape:
                empty.add(name, _size(tensor))
                sound = False
            elif len(tensor.shape) != 2:
                sound = False
                if not pair.is_experts:
                    dimensions.add(name, _size(tensor))
        if not sound or pair.is_experts:
            continue
        rows = pair.a[0][1].shape[0] if pair.a else pair.b[0][1].shape[1]
        columns = pair.b[0][1].shape[1] if pair.b else rows
        allowed = ranks.of(module)
        if rows != columns:
            unequal.add(pair.a[0][0], f"A has {rows} rows and B {columns} columns")
        elif allowed and rows not in allowed:
            # Told of the first alone: there may be as many ranks as modules.
            other_rank.add(pair.matrices[0][0], "" if other_rank.names else _instead_of(rows, allowed))
        elif len(allowed) > 1 and rows != ranks.plainly(module):
            unsure.add(pair.matrices[0][0], f"has rank {rows}")
    if empty.names:
        yield told(
            place,
            "error",
            "empty-tensor",
            empty.names,
            f"{len(empty.names)} LoRA matrices hold no numbers ({shown(empty.names[0])} is {empty.detail}), so that "
            f"vLLM would answer as the base does; they were saved while sharded over several GPUs. Gather them, and "
            f"{_AGAIN}",
        )
    if dimensions.names:
        yield told(
            place,
            "error",
            "dimensions",
            dimensions.names,
            f"{len(dimensions.names)} LoRA tensors are no matrices ({shown(dimensions.names[0])} is "
            f"{dimensions.detail}); a LoRA matrix has 2 dimensions; {_AGAIN}",
        )
    if unsure.names:
        yield told(
            place,
            "warning",
            "rank-unsure",
            unsure.names,
            f"{len(unsure.names)} of {len(pairs)} modules have another rank than r ({shown(unsure.names[0])} "
            f"{unsure.detail}), which a regular expression in rank_pattern may or may not say; make sure that config "
            f"and weights are of the same training, or write the modules' names there.",
        )
    if unequal.names:
        yield told(
            place,
            "error",
            "ranks-differ",
            unequal.names,
            f"the two matrices of {len(unequal.names)} of {len(pairs)} modules do not fit together "
            f"({shown(unequal.names[0])}: {unequal.detail}); {_AGAIN}",
        )
    if other_rank.names:
        yield told(
            place,
            "error",
            "rank",
            other_rank.names,
            f"{len(other_rank.names)} of {len(pairs)} modules have another rank than adapter_config.json says "
            f"({shown(other_rank.names[0])} {other_rank.detail}), and vLLM would scale them wrongly. Config and "
            f"weights, or rank_pattern, are of different trainings: put those together that belong together.",
        )


def types(place: str, pairs: Mapping[str, Pair]) -> Iterator[Finding]:
    """Numbers that are no floating point: vllm/lora/lora_model.py converts whatever it reads by `tensor.to(dtype)`."""
    coarse, unfit = Group(), Group()
    for pair in pairs.values():
        for name, tensor in pair.matrices:
            if tensor.dtype in _COARSE_FLOATS:
                coarse.add(name, tensor.dtype)
            elif tensor.dtype not in _FLOATS:
                unfit.add(name, tensor.dtype)
    if unfit.names:
        yield told(
            place,
            "error",
            "dtype",
            unfit.names,
            f"{len(unfit.names)} LoRA matrices are of type {shown(unfit.detail)}, which vLLM cannot read or takes for "
            f"the numbers themselves; save the adapter as BF16, F16 or F32.",
        )
    if coarse.names:
        yield told(
            place,
            "warning",
            "dtype",
            coarse.names,
            f"{len(coarse.names)} LoRA matrices are of type {coarse.detail}: vLLM takes their numbers without any "
            f"scale that may belong to them; save the adapter as BF16, F16 or F32.",
        )


class _Ranks:
    """Which ranks the config allows a module.

    vllm/lora/peft_helper.py (0.32.0) `_match_pattern`, as PEFT's `get_pattern_key`: a key of rank_pattern is a regular
    expression for the end of a module's name, and the first that matches counts. Keys come from outside, so that none
    is run as an expression: names are compared as they are, and where another key stands before the one that fits, any
    rank of the pattern is allowed.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        self._default = rank_of(config.get("r"))
        self._plain: dict[str, tuple[int, int | None]] = {}
        pattern = config.get("rank_pattern")
        entries = pattern if isinstance(pattern, dict) else {}
        self._first_expression = len(entries)
        for position, (key, value) in enumerate(entries.items()):
            if isinstance(key, str) and _PLAIN_PATTERN.fullmatch(key):
                self._plain.setdefault(key.replace("\\.", "."), (position, rank_of(value)))
            else:
                self._first_expression = min(self._first_expression, position)
        self._unmatched = (len(entries), self._default)
        # Python's sets are slow with large numbers that are chosen to be; no matrix has so many rows.
        self._any = {rank for rank in (self._default, *map(rank_of, entries.values())) if rank and rank < 2**32}

    def of(self, module: str) -> set[int]:
        """Empty where the config tells nothing usable."""
        if self._default is None:
            return set()
        position, rank = self._first(module)
        if self._first_expression < position:
            return self._any
        return {rank} if rank else set()

    def plainly(self, module: str) -> int | None:
        """The rank by the names that are no expressions."""
        return self._first(module)[1]

    def _first(self, module: str) -> tuple[int, int | None]:
        matches = [self._plain[ending] for ending in endings(module) if ending in self._plain] if self._plain else []
        return min(matches, key=lambda match: match[0]) if matches else self._unmatched


def _instead_of(rank: int, allowed: set[int]) -> str:
    return f"has rank {rank}, and the config says {' or '.join(map(str, sorted(allowed)[:NAMES_SHOWN]))}"


def _size(tensor: Tensor) -> str:
    """`4 x 8`."""
    return " x ".join(map(str, tensor.shape[:8])) or "a single number"
