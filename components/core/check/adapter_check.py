"""Whether vLLM would load an adapter and serve what was trained, known before anything leaves this machine.

Everything that is wrong is found at once: in the directory, in the config (`config_rules`, `base_names`) and in the
names and shapes of the tensors (`tensor_rules`). No tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from components.core.adapter_config import read_config
from components.core.adapter_files import (
    CONFIG_NAME,
    OTHER_WEIGHTS_NAMES,
    WEIGHTS_NAME,
    AdapterFiles,
    entries_named,
    real_config,
    real_directory,
    real_weights,
    shown_path,
)
from components.core.check.base_model import BaseFacts
from components.core.check.base_names import SUBJECT, base_findings
from components.core.check.config_rules import config_findings
from components.core.check.tensor_rules import tensor_findings
from components.core.findings import FaultError, Finding
from components.core.safetensors_header import Tensor, read_tensors
from components.core.vllm_loader import loader_rules

DIRECTORY = ""
"""Stands for the directory where findings name files only."""


@dataclass(frozen=True)
class Against:
    """What an adapter is to be served by, as far as it is known."""

    base: str | None = None
    """As the stack file names it."""
    base_model: BaseFacts | None = None
    """From the base's config.json."""
    vllm: str | None = None
    """The version that is to serve it; None for the newest known."""
    lora_target_modules: tuple[str, ...] | None = None
    """vLLM's `--lora-target-modules`, if given."""


def check_adapter(directory: Path, against: Against = Against()) -> list[Finding]:
    """Everything found in an adapter, sorted; errors are what must not be served. Never raises for what is there."""
    try:
        real = real_directory(directory)
    except FaultError as error:
        return [error.finding]
    found = list(around(real))
    config: dict[str, object] | None = None
    tensors: dict[str, Tensor] | None = None
    try:
        config = read_config(real_config(directory, real), shown_path(directory / CONFIG_NAME))
    except FaultError as error:
        found.append(error.finding)
    try:
        tensors = read_tensors(real_weights(directory, real), shown_path(directory / WEIGHTS_NAME))
    except FaultError as error:
        # A directory without either is no adapter's, and one finding says so.
        if error.finding.rule != "no-weights" or all(finding.rule != "no-config" for finding in found):
            found.append(error.finding)
    found += contents(config, tensors, against)
    return placed(found, directory)


def check_files(files: AdapterFiles, against: Against) -> list[Finding]:
    """`contents` of files that were located before.

    Raises:
        UserError: one of them cannot be read.
    """
    config = read_config(files.config, shown_path(files.directory / CONFIG_NAME))
    tensors = read_tensors(files.weights, shown_path(files.directory / WEIGHTS_NAME))
    return list(contents(config, tensors, against))


def around(real: Path) -> Iterator[Finding]:
    """What the names beside the adapter's two files tell; opens nothing. `real` is the directory itself."""
    weights = entries_named(real, (WEIGHTS_NAME, *OTHER_WEIGHTS_NAMES))
    for name in weights[1:] if WEIGHTS_NAME in weights else ():
        yield Finding(
            DIRECTORY,
            "error",
            "two-weights",
            name,
            f"lies beside {WEIGHTS_NAME}; vLLM loads {WEIGHTS_NAME} and never looks at {name}. Delete the one that is "
            "out of date.",
        )
    for name in entries_named(real, ("new_embeddings.safetensors", "new_embeddings.bin")):
        yield Finding(
            DIRECTORY,
            "warning",
            "new-embeddings",
            name,
            "added tokens are not served: vLLM 0.12 and newer does not read this file, and it is not shipped.",
        )
    for name in entries_named(real, ("chat_template.jinja",)):
        yield Finding(
            DIRECTORY,
            "warning",
            "chat-template",
            name,
            "a chat template beside an adapter is not used; the base's is. If it differs, give the engine the "
            "template with chat-template in engine.args.",
        )


def contents(
    config: dict[str, object] | None, tensors: dict[str, Tensor] | None, against: Against
) -> Iterator[Finding]:
    """What the two files say, each finding by the name of its file; None for a file that cannot be read."""
    rules = loader_rules(against.vllm)
    if config is not None:
        yield from config_findings(config, rules)
        yield from base_findings(config.get(SUBJECT), against.base)
    if tensors is not None:
        yield from tensor_findings(
            config or {}, tensors, WEIGHTS_NAME, rules, against.base_model, against.lora_target_modules
        )


def placed(found: Iterable[Finding], directory: Path) -> list[Finding]:
    """The findings sorted, where they name files only with the directory in front."""
    paths = {
        DIRECTORY: shown_path(directory),
        **{name: shown_path(directory / name) for name in (CONFIG_NAME, WEIGHTS_NAME)},
    }
    return sorted(replace(finding, path=paths.get(finding.path, finding.path)) for finding in found)
