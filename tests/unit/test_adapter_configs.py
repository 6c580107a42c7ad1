"""The check's verdict on real configs of public repositories, which lie beside this one where they are at hand.

What is special about each is among the cases of adapter_cases too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from components.core.check.adapter_check import Against, check_adapter
from components.core.engine_options import EngineOptions, PlannedAdapter
from components.core.engine_plan import plan_engine
from components.core.naming import blob_path
from tests.support.adapter_cases import CONFIGS, Outcome, with_real_config
from tests.support.verdicts import outcome

# The verdict, the keys it is about, and the smallest `--max-lora-rank` that serves it.
EXPECTED: Mapping[str, tuple[Outcome, str, int | None]] = {
    "01-llama2-peft02-old-keys": ("accept", "", 8),
    "03-baichuan2-peft05-local-base": ("accept", "", 8),
    "06-chatglm-peft09": ("accept", "", 32),
    "08-llama31-bnb4bit-r64-low-alpha": ("accept", "", 64),
    "11-bert-seqcls-modules-to-save": ("refuse", "modules_to_save task_type", 8),
    "12-cosmos-reason2-peft018": ("accept", "", 32),
    "15-diffusion-unet-base-null": ("warn", "auto_mapping", 16),
    "17-paligemma-peft019": ("accept", "", 8),
    "18-tinyllama-peft019": ("accept", "", 8),
    "20-qwen25-coder-peft018": ("accept", "", 8),
    "22-dora-targets-null": ("refuse", "use_dora target_modules", 32),
    "23-rslora-targets-null": ("warn", "target_modules", 64),
    "25-kasa-variant": ("warn", "kasa_config target_modules", 32),
    "27-all-linear-string-null-heavy": ("accept", "", 16),
    "29-ia3": ("refuse", "peft_type", None),
    "31-prompt-tuning": ("refuse", "peft_type", None),
    "33-vera-r256-no-alpha": ("refuse", "peft_type", None),
    "35-paca-own-alpha-key": ("refuse", "peft_type", None),
    "37-mlx-lm-granite": ("refuse", "r", None),
    "39-stub-base-model-only": ("refuse", "r", None),
}

pytestmark = pytest.mark.skipif(not CONFIGS.is_dir(), reason=f"{CONFIGS} is not here")


def test_all_of_them_are_expected() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_real_config(tmp_path: Path, name: str) -> None:
    path = CONFIGS / f"{name}.json"
    expected, subjects, flag = EXPECTED[name]
    found = check_adapter(with_real_config(path)(tmp_path / name), Against(vllm="0.32.0"))
    of_the_config = {finding.subject for finding in found if finding.path.endswith("adapter_config.json")}
    assert (outcome(found), of_the_config) == (expected, set(subjects.split()))
    if flag is not None:
        adapter = PlannedAdapter("a", "sha256:" + "a" * 64, json.loads(path.read_bytes())["r"])
        plan = plan_engine("b", "/p/bin/python", [adapter], [], EngineOptions(8000), blob_path)
        assert plan.argv[plan.argv.index("--max-lora-rank") + 1] == str(flag)
