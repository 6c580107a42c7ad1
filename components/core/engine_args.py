"""`engine.args`: flags of vLLM that are passed on as the stack file has them, once they are known to be the user's own.

A key is a flag without its dashes in front, as in the YAML that vLLM's `--config` reads: `max-num-seqs`, or
`max_num_seqs`, which vLLM takes as well; and `maxNumSeqs`, as the stack file's other keys are written.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from components.core.ec2_gpus import Gpus
from components.core.errors import UserError, UserErrors, printable
from components.core.listing import counted
from components.core.slot_budget import overriding, whole
from components.core.vllm_flags import OTHER_NAMES, Flag, flags_of, misused, nearest, opposite, same_flag, unknown
from components.core.vllm_loader import loader_rules, version_warning
from components.core.vllm_rules import NO_SUCH_FLAGS, OWNED_FLAGS

Json: TypeAlias = str | int | float | bool | Sequence["Json"] | Mapping[str, "Json"] | None

_REFUSED_FLAGS = {
    **{
        name: reason
        for flag, reason in {**OWNED_FLAGS, **NO_SUCH_FLAGS}.items()
        for name in (flag, opposite(flag))
        if name
    },
    **{other: OWNED_FLAGS[flag] for other, flag in OTHER_NAMES.items() if flag in OWNED_FLAGS},
}
# A flag of older vLLMs; today's refuse it themselves, as a beginning of several (--device-ids is another).
_ONCE_A_FLAG = "device"
# How vLLM shares a model among GPUs, and how often: `world_size` of vllm/config/parallel.py, and its replicas.
_PARALLEL_FLAGS = (
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "prefill-context-parallel-size",
    "data-parallel-size",
)
# Whole numbers in any version, and no engine has less of them: `ge` and `gt` in vllm/config/parallel.py,
# scheduler.py, cache.py and vllm.py (0.32.0).
_LEAST = {
    **dict.fromkeys(_PARALLEL_FLAGS, 1),
    "block-size": 1,
    "decode-context-parallel-size": 1,
    "max-num-active-seqs": 1,
    "max-num-batched-tokens": 1,
    "max-num-scheduled-tokens": 1,
    "max-num-seqs": 1,
    "nnodes": 1,
    "node-rank": 0,
    "shutdown-timeout": 0,
    "stream-interval": 1,
}
# With one of these its GPUs may be those of several machines, or only some of one's.
_PLACING_FLAGS = ("nnodes", "node-rank", "distributed-executor-backend", "device-ids", "data-parallel-")


def parsed_arguments(args: Mapping[str, Json], version: str | None) -> tuple[dict[str, Json], list[str]]:
    """Return `engine.args` under vLLM's spelling of the flags, in the order of those, and what to know: sentences.

    `no-x: true` of a boolean flag is returned as `x: False`. Raises UserErrors with all that cannot be right. Of a vLLM
    whose flags are not known here, what the nearest known one would not take is only told.
    """
    minor = loader_rules(version).minor
    keys: dict[str, str] = {}
    meant: dict[str, str] = {}
    faults: list[str] = []
    told: list[str] = []
    for key in args:
        try:
            name = _flag_name(key)
        except UserError as error:
            faults.append(str(error))
            continue
        flag = same_flag(name, minor)
        if flag in meant:
            faults.append(f"engine.args.{key} and engine.args.{meant[flag]} are one flag; keep one of them")
        keys[name] = meant[flag] = key
    for name in sorted(keys):
        least = _LEAST.get(name)
        if least is not None and _below(least, args[keys[name]]):
            faults.append(f"engine.args.{keys[name]} is {args[keys[name]]}; it must be at least {least}")
            continue
        fault, said = _held_against_vllm(name, keys[name], args[keys[name]], version)
        faults += fault
        told += said
    if faults:
        raise UserErrors(faults)
    return dict(_positive(name, args[keys[name]], minor) for name in sorted(keys)), told


def _positive(name: str, value: Json, minor: tuple[int, ...]) -> tuple[str, Json]:
    """`x: False` for `no-x: true`, which has the same word in a command line: whoever looks x up finds it."""
    bare = name.removeprefix("no-")
    flag = flags_of(minor).get(bare)
    return (bare, False) if bare != name and value is True and flag and flag.kind == "boolean" else (name, value)


def _below(least: int, value: Json) -> bool:
    try:
        return not isinstance(value, bool) and float(str(value)) < least
    except ValueError:
        return False


def argv_of(arguments: Mapping[str, Json], version: str | None) -> list[str]:
    """The words of the arguments that `parsed_arguments` returned. Raises UserErrors for values no flag can have."""
    flags = flags_of(loader_rules(version).minor)
    words: list[str] = []
    faults: list[str] = []
    for name, value in arguments.items():
        try:
            words += _words(name, value, flags.get(name) or Flag("text"))
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserErrors(faults)
    return words


def flag_words(name: str, value: str | int | float) -> list[str]:
    """A flag and its one value."""
    word = _word(value, name)
    # As a word of its own vLLM's parser would take it for a flag, or (with a dot in it) for a nested setting.
    return [f"--{name}={word}"] if word.startswith("-") else [f"--{name}", word]


def lora_target_modules(args: Mapping[str, Json]) -> tuple[str, ...] | None:
    """What `engine.args` gives vLLM as --lora-target-modules, however it is spelled; None where it is not given."""
    for key, value in args.items():
        name = _spelled(key)
        # No other flag of vLLM begins like this, and argparse takes the beginning for the whole.
        if name.startswith("lora-t") and "lora-target-modules".startswith(name):
            items = [value] if isinstance(value, str) else value if isinstance(value, Sequence) else ()
            return tuple(map(str, items)) or None
    return None


def overrides_config(args: Mapping[str, Json]) -> bool:
    """Whether `engine.args` gives vLLM another config of the base than its config.json, or another place for it."""
    return overriding(map(_spelled, args))


def gpus_needed(args: Mapping[str, Json]) -> int | None:
    """How many GPUs of its machine an engine takes by `engine.args`; None where they do not tell."""
    given = {_spelled(key): value for key, value in args.items()}
    sizes = [whole(given.pop(name)) for name in _PARALLEL_FLAGS if name in given]
    if any(name.startswith(_PLACING_FLAGS) for name in given):
        return None
    return None if None in sizes else math.prod(filter(None, sizes))


def first_gpu(args: Mapping[str, Json]) -> str | None:
    """The first of `--device-ids`; None where it is not given."""
    for key, value in args.items():
        if _spelled(key) == "device-ids":
            return str(value).split(",")[0].strip()
    return None


def gpu_fault(args: Mapping[str, Json], instance_type: str, gpus: Gpus) -> str | None:
    """Why an instance's GPUs are too few; None where they are not."""
    needed = gpus_needed(args)
    if needed is None or needed <= gpus.count:
        return None
    given = {_spelled(key): whole(value) for key, value in args.items()}
    sizes = [f"{name} {given[name]}" for name in _PARALLEL_FLAGS if name in given]
    return (
        f"engine.args: {' × '.join(sizes)} takes {counted(needed, 'GPU')}, and the {instance_type} has "
        f"{gpus.count} ({gpus.gpu.name}); lower it, or take a larger ec2.instanceType"
    )


def idle_gpus(args: Mapping[str, Json], instance_type: str, gpus: Gpus) -> Iterator[str]:
    """What to know of an instance of whose GPUs not all are used."""
    needed = gpus_needed(args)
    if needed is not None and needed < gpus.count:
        yield (
            f"the {instance_type} has {gpus.count} GPUs, of which the engine takes {needed}; "
            f"args: {{tensorParallelSize: {gpus.count}}} shares the base among them all"
        )


def _held_against_vllm(name: str, key: str, value: Json, version: str | None) -> tuple[list[str], list[str]]:
    """What cannot be right about a flag of the user's, and what may be; each a sentence."""
    rules, where = loader_rules(version), f"args.{printable(key)}"
    missing, wrong = unknown(name, rules.minor), misused(name, value, rules.minor)
    if wrong and name in _LEAST and isinstance(value, float):
        return [f"engine.{where} {wrong}"], []
    if version is not None and version_warning(version) is None and nearest(rules.minor) == rules.minor:
        if missing or wrong:
            return [f"engine.{where}: vLLM {rules.version} {missing}" if missing else f"engine.{where} {wrong}"], []
    elif missing or wrong:
        near = ".".join(map(str, nearest(rules.minor)))
        if missing:
            return [], [f"{where}: vLLM {near}, the nearest whose flags are known here, {missing}"]
        return [], [f"{where} {wrong}, if it is what it is in vLLM {near}"]
    flag = flags_of(rules.minor).get(name.removeprefix("no-"))
    return [], [f"{where} is deprecated: a later vLLM will not know it"] if flag and flag.deprecated else []


def _flag_name(key: str) -> str:
    """Return `maxNumSeqs`, `max_num_seqs` or `max-num-seqs` in vLLM's spelling, refusing what is not the user's."""
    where = f"engine.args.{printable(key)}"
    if key.startswith("-"):
        raise UserError(f"{where}: write the flag without its dashes in front")
    name = _spelled(key)
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise UserError(
            f"{where} is no flag of vLLM: letters, digits and dashes only "
            "(give a flag's own settings as a mapping under it)"
        )
    # argparse takes any unambiguous beginning of a flag for the flag, and --no-X for X.
    bare = name.removeprefix("no-")
    for refused, reason in _REFUSED_FLAGS.items():
        if refused.startswith(bare) and bare != _ONCE_A_FLAG:
            hint = "" if refused == bare else f" could be read as --{refused}, which"
            raise UserError(f"{where}{hint} cannot be set here: {reason}")
    return name


def _spelled(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", key).replace("_", "-").lower()


def _words(name: str, value: Json, flag: Flag) -> list[str]:
    where = f"engine.args: {name}"
    if value is True:
        return [f"--{name}"]
    if value is False:
        return [f"--no-{name}"]
    if value is None:
        raise UserError(f"{where} has no value; give it one (true for a bare flag) or leave it out")
    if isinstance(value, Mapping):
        return [f"--{name}", _compact(value)]
    if isinstance(value, str | int | float):
        return flag_words(name, _scalar(value, where))
    items = list(value)
    if not items:
        raise UserError(f"{where} is an empty list; give it a value or leave it out")
    if flag.kind == "json":
        return [f"--{name}", _compact(items)]
    if flag.repeated:
        return [word for item in items for word in flag_words(name, _scalar(item, where))]
    if len(items) == 1:
        return flag_words(name, _scalar(items[0], where))
    words = [_word(_scalar(item, where), name) for item in items]
    if any(word.startswith("-") for word in words):
        raise UserError(f"{where} has an item that begins with a dash, which vLLM would take for a flag")
    return [f"--{name}", *words]


def _scalar(item: Json, where: str) -> str | int | float:
    if isinstance(item, bool) or not isinstance(item, str | int | float):
        raise UserError(f"{where} is a list, and its items must be strings or numbers")
    if isinstance(item, str) and re.search(r"[\n\0]", item):
        raise UserError(
            f"{where} holds a line break or a NUL, which a systemd unit cannot pass on; where vLLM takes a "
            "file for it, put one on the pod and give its path"
        )
    return item


def _word(value: str | int | float, name: str) -> str:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UserError(f"{name} is {value}, which is no number vLLM can use")
        # Pulumi's configuration does not tell 8.0 from 8, and vLLM's integers refuse the former.
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    return str(value)


def _compact(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
