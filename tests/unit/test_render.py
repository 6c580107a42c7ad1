from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from components import render
from components.core.engine_options import EngineOptions, PlannedAdapter
from components.core.engine_plan import EnginePlan, plan_engine
from components.core.errors import UserError
from components.core.naming import blob_path, engine_key
from tests.unit import unit_text_model as systemd

BASE = "org/base"
KEY = engine_key("prod", BASE)


def planned(count: int = 0, options: EngineOptions | None = None, python: str = "/opt/vllm/bin/python") -> EnginePlan:
    adapters = [PlannedAdapter(f"m{index:05}", f"sha256:{index:064x}", 8) for index in range(count)]
    return plan_engine(BASE, python, adapters, [], options or EngineOptions(port=8000), blob_path)


def setting(unit: str, wanted: str) -> list[str]:
    return [value for name, value in systemd.settings(unit) if name == wanted]


def test_an_added_adapter_is_two_more_lines_and_the_counts() -> None:
    before = render.render_unit(planned(2), key=KEY).splitlines()
    after = render.render_unit(planned(3), key=KEY).splitlines()
    assert [line for line in after if line not in before] == [
        f"AssertPathExists={blob_path(f'sha256:{2:064x}')}",
        "    --max-loras 3 \\",
        "    --max-cpu-loras 3 \\",
        # The last line of before has gained its continuation.
        f'    \'{{"name":"m00001","path":"{blob_path(f"sha256:{1:064x}")}","base_model_name":"org/base"}}\' \\',
        f'    \'{{"name":"m00002","path":"{blob_path(f"sha256:{2:064x}")}","base_model_name":"org/base"}}\'',
    ]


def test_several_names_have_a_line_each() -> None:
    plan = plan_engine(BASE, "/opt/vllm/bin/python", [], ["b", "a"], EngineOptions(port=8000), blob_path)
    lines = render.render_unit(plan, key=KEY).splitlines()
    at = lines.index("    --served-model-name \\")
    assert lines[at + 1 : at + 5] == ["    org/base \\", "    a \\", "    b \\", "    --host 127.0.0.1 \\"]


@pytest.mark.parametrize(
    ("options", "python", "expected"),
    [
        (EngineOptions(port=8000), "/opt/vllm/bin/python", "yes"),
        (EngineOptions(port=8000), "/home/ops/venv/bin/python", "read-only"),
        (EngineOptions(port=8000, args={"chatTemplate": "/root/t.jinja"}), "/opt/vllm/bin/python", "read-only"),
        (EngineOptions(port=8000, args={"hfOverrides": {"a": "/run/user/0/x"}}), "/opt/vllm/bin/python", "read-only"),
        (EngineOptions(port=8000, env={"HF_HUB_CACHE": "/home/x/hub"}), "/opt/vllm/bin/python", "read-only"),
        (EngineOptions(port=8000, args={"x": "/data/home/x"}), "/opt/vllm/bin/python", "yes"),
    ],
)
def test_homes_are_hidden_unless_the_engine_reads_there(options: EngineOptions, python: str, expected: str) -> None:
    unit = render.render_unit(planned(options=options, python=python), key=KEY)
    assert setting(unit, "ProtectHome") == [expected]


def test_draining_is_not_cut_short() -> None:
    unit = render.render_unit(planned(options=EngineOptions(port=8000, args={"shutdownTimeout": 90})), key=KEY)
    assert setting(unit, "TimeoutStopSec") == ["120"]
    assert setting(unit, "KillMode") == ["mixed"]  # a worker that is told to stop ends at once


def test_no_engine_starts_without_its_secrets_file() -> None:
    """A `-` before the path would let it start without its API key where the file is missing."""
    unit = render.render_unit(planned(), key=KEY)
    assert setting(unit, "EnvironmentFile") == [f"/var/lib/lora-pods/secrets/{KEY}.env"]


def test_nothing_starts_besides_the_engine() -> None:
    cpu = render.render_unit(planned(options=EngineOptions(port=8000, device="cpu")), key=KEY)
    assert [name for name, _ in systemd.settings(cpu) if name.startswith("Exec")] == ["ExecStart"]
    gpu = render.render_unit(planned(), key=KEY)
    # Root's own, and let be where the machine has no such program: it makes a device node and ends.
    assert setting(gpu, "ExecStartPre") == ["-+/usr/bin/nvidia-modprobe -u -c=0"]


def test_too_many_adapters_for_one_unit() -> None:
    assert render.render_unit(planned(6000), key=KEY)
    with pytest.raises(
        UserError, match=r"^the command line of the engine for 'org/base' is \d+ bytes long and systemd"
    ):
        render.render_unit(planned(7000), key=KEY)


def test_a_value_systemd_cannot_carry_is_refused() -> None:
    options = EngineOptions(port=8000, args={"chatTemplate": "a\nb"})
    with pytest.raises(UserError, match="chat-template holds a line break or a NUL"):
        render.render_unit(planned(options=options), key=KEY)


@pytest.mark.parametrize("key", ["", "a b", "a/b", "a%n", "../x", "-x", "é", "a\n"])
def test_a_key_that_cannot_name_a_unit(key: str) -> None:
    with pytest.raises(UserError, match="cannot name a systemd unit; use a simpler stack name"):
        render.render_unit(planned(), key=key)


def test_a_name_the_template_does_not_know_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine.service.j2").write_text("Description={{ nobody }}\n")
    monkeypatch.setattr(render, "TEMPLATES", tmp_path)
    with pytest.raises(UndefinedError, match="'nobody' is undefined"):
        render.render_unit(planned(), key=KEY)


def test_the_base_stands_in_the_description_as_text_only() -> None:
    plan = replace(planned(), base="x\n[Service]\nExecStart=/bin/evil %n \\")
    assert setting(render.render_unit(plan, key=KEY), "Description") == [
        "vLLM for x/n[Service]/nExecStart=/bin/evil %%n / (lora-pods)"
    ]
