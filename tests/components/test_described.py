"""What is known of a stack where adapters are absent, stale in the lock, or at fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulumi
import pytest

from components.core.digest_cache import DigestCache
from components.core.lock import LockEntry, short_digest
from components.described import Described
from components.settings import SettingsError, secrecy_faults, unknown_key_faults
from components.stack_files import read_lock, write_lock
from tests.components.graph import register
from tests.components.test_settings import ENGINE, POD, PRIVATE_KEY, Config
from tests.support.adapters import seeded_adapter
from tests.support.closed import close

BASE = "example/base"  # what the adapters say they were trained from
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 32,
}
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 159000000\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "Pulumi.yaml").write_text("name: lora-pods\nruntime: python\nstackConfigDir: stacks\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "stacks").mkdir()
    for number in (1, 2, 3):
        seeded_adapter(tmp_path / "adapters" / f"v{number}", seed=number)
    return tmp_path


def pod(engine: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {**POD, "base": BASE, "engine": {**(engine or ENGINE), **more}}


def stack_file(count: int = 3, **more: Any) -> Config:
    models = [{"id": f"acme-v{n}", "base": BASE, "adapter": f"../adapters/v{n}"} for n in range(1, count + 1)]
    return Config({"pods": [pod()], "models": models, "sshPrivateKey": PRIVATE_KEY, **more})


def lock(project: Path, count: int = 3) -> dict[str, LockEntry]:
    entries = {}
    for n in range(1, count + 1):
        facts = DigestCache().describe(project / "adapters" / f"v{n}")
        entries[f"acme-v{n}"] = LockEntry.of(facts, f"../adapters/v{n}", BASE)
    write_lock(project / "stacks", "acme", entries)
    return entries


def described(config: Config) -> Described:
    key = "lora-pods:sshPrivateKey"
    pulumi.runtime.set_all_config({key: PRIVATE_KEY}, [key])
    try:
        return Described(config, "acme")
    finally:
        pulumi.runtime.set_all_config({}, [])


def faults(config: Config) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        described(config)
    return caught.value.faults


def removed(directory: Path) -> None:
    shutil.rmtree(directory)


def without_weights(directory: Path) -> None:
    (directory / "adapter_model.safetensors").unlink()


def an_lfs_pointer(directory: Path) -> None:
    (directory / "adapter_model.safetensors").write_text(LFS_POINTER)


def an_annex_pointer(directory: Path) -> None:
    (directory / "adapter_model.safetensors").write_text(f"/annex/objects/SHA256E-s159--{'a' * 64}.safetensors\n")


def dvc_alone(directory: Path) -> None:
    without_weights(directory)
    (directory / "adapter_model.safetensors.dvc").write_text("outs:\n- md5: a\n  path: adapter_model.safetensors\n")


def a_link_to_nothing(directory: Path) -> None:
    without_weights(directory)
    (directory / "adapter_model.safetensors").symlink_to("../.git/annex/objects/gone")


ABSENT = [removed, without_weights, an_lfs_pointer, an_annex_pointer, a_link_to_nothing, dvc_alone]


@pytest.mark.parametrize("lose", ABSENT)
def test_the_lock_stands_in_for_absent_bytes(project: Path, lose: Callable[[Path], None]) -> None:
    """The very same resources: whatever Pulumi is told, it is told with and without the bytes."""
    lock(project)
    secrets: dict[str, Any] = {"apiKey": "a", "hfToken": "b"}
    whole = register(stack_file(**secrets))
    for n in (1, 2, 3):
        lose(project / "adapters" / f"v{n}")
    assert register(stack_file(**secrets)) == whole
    found = described(stack_file())
    assert found.notes == (
        "stacks/acme.lock.yaml stands in for adapters that are not on this machine: acme-v1, acme-v2, acme-v3. "
        "They were checked when they were locked, not here",
    )
    assert found.warnings == ()


def test_with_all_bytes_and_a_fitting_lock_there_is_nothing_to_say(project: Path) -> None:
    for _ in range(2):
        found = described(stack_file())
        assert (found.notes, found.warnings) == ((), ())
        lock(project)


@pytest.mark.parametrize(
    ("lose", "reason"),
    [
        (removed, "no such directory"),
        (without_weights, "holds no adapter_model.safetensors"),
        (an_lfs_pointer, "its adapter_model.safetensors is a Git LFS pointer"),
        (an_annex_pointer, "its adapter_model.safetensors is a git-annex pointer"),
        (dvc_alone, "holds no adapter_model.safetensors"),
        (a_link_to_nothing, "its adapter_model.safetensors is a link to nothing"),
    ],
)
def test_absent_without_an_entry(project: Path, lose: Callable[[Path], None], reason: str) -> None:
    lose(project / "adapters" / "v2")
    place = f"models[1].adapter: acme-v2 at ../adapters/v2: {reason}, and"
    cure = "put the adapter there, or run `lora lock -s acme` where it is and commit the lock"
    assert faults(stack_file()) == (f"{place} there is no stacks/acme.lock.yaml to stand in for it; {cure}",)
    write_lock(project / "stacks", "acme", {})
    # What else the lock lacks would be a warning: the bytes of those are here.
    assert faults(stack_file()) == (f"{place} stacks/acme.lock.yaml has no entry for it; {cure}",)


@pytest.mark.parametrize("changed", [{"adapter": "../adapters/v9"}, {"base": "example/other"}])
def test_an_entry_of_another_adapter_does_not_stand_in(project: Path, changed: dict[str, str]) -> None:
    entries = lock(project)
    write_lock(project / "stacks", "acme", {**entries, "acme-v2": LockEntry(**{**vars(entries["acme-v2"]), **changed})})
    removed(project / "adapters" / "v2")
    (fault,) = faults(stack_file())
    assert fault.startswith("models[1].adapter: acme-v2 at ../adapters/v2: no such directory, and")
    assert "stacks/acme.lock.yaml has another path or base for it" in fault


def test_a_faulty_adapter_is_its_own_error_whatever_the_lock_says(project: Path) -> None:
    lock(project)
    (project / "adapters" / "v1" / "adapter_model.safetensors").write_bytes(b"\1")
    (project / "adapters" / "v2" / "adapter_model.safetensors").rename(
        project / "adapters" / "v2" / "adapter_model.bin"
    )
    for name in ("a", "b"):
        (project / "adapters" / "v3" / name).mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (project / "adapters" / "v3" / file).rename(project / "adapters" / "v3" / "a" / file)
    told = faults(stack_file())
    assert len(told) == 3
    assert "adapter_model.safetensors" in told[0]
    assert "convert adapter_model.bin" in told[1]
    assert not any(str(project) in fault for fault in told)
    assert "these folders in it do: a" in told[2]


def test_the_bytes_win_and_the_stale_lock_is_one_line(project: Path) -> None:
    old = lock(project)
    seeded_adapter(project / "adapters" / "v1", seed=11)
    del old["acme-v3"]
    write_lock(project / "stacks", "acme", {**old, "gone": old["acme-v2"]})
    new = DigestCache().describe(project / "adapters" / "v1").digest
    found = described(stack_file())
    assert found.bundles["acme-v1"].digest == new
    third = short_digest(found.bundles["acme-v3"].digest)
    stale = (
        f"stacks/acme.lock.yaml says otherwise of 3 adapters: acme-v1 {short_digest(old['acme-v1'].digest)} → "
        f"{short_digest(new)}, acme-v3 {third} (not in it), gone (no longer in the stack)"
    )
    assert found.warnings == (
        f"{stale}. The adapters on this machine count; write the lock anew with `lora lock -s acme`",
    )
    assert faults(stack_file(requireLock=True)) == (
        f"requireLock: {stale}; write it anew with `lora lock -s acme` and commit it, or bring back what it names",
    )


def test_requireLock_wants_a_lock(project: Path) -> None:
    assert faults(stack_file(requireLock=True)) == (
        "requireLock: there is no stacks/acme.lock.yaml; write it with `lora lock -s acme` and commit it",
    )
    assert described(stack_file(requireLock=True, models=[])).warnings == ()
    lock(project)
    removed(project / "adapters" / "v2")
    assert described(stack_file(requireLock=True)).warnings == ()


def test_a_hundred_of_a_kind_are_one_short_line(project: Path) -> None:
    for n in range(4, 101):
        shutil.copytree(project / "adapters" / "v3", project / "adapters" / f"v{n}")
    entries = lock(project, 100)
    write_lock(
        project / "stacks",
        "acme",
        {model: LockEntry(**{**vars(entry), "digest": f"sha256:{'0' * 64}"}) for model, entry in entries.items()},
    )
    (warning,) = described(stack_file(100)).warnings
    assert warning.startswith("stacks/acme.lock.yaml says otherwise of 100 adapters: acme-v1 000000000000 → ")
    assert "and 95 more" in warning
    assert len(warning) < 500

    (project / "stacks" / "acme.lock.yaml").unlink()
    shutil.rmtree(project / "adapters")
    (fault,) = faults(stack_file(100))
    assert fault.startswith("models[0, 1, 2, 3, 4 and 95 more].adapter: ")
    assert len(fault) < 900


def test_a_lock_with_faults_is_a_fault_among_the_others(project: Path) -> None:
    lock(project)
    path = project / "stacks" / "acme.lock.yaml"
    path.write_text(path.read_text().replace("sha256:", "sha1:", 1))
    removed(project / "adapters" / "v3")
    told = faults(stack_file(pods=[pod(maxLoras=0)]))
    assert [fault.partition(": ")[0] for fault in told] == ["pods[0].engine.maxLoras", "stacks/acme.lock.yaml"]
    assert "models.acme-v1.digest: must be sha256:" in told[1]


# --- the check of the adapters --------------------------------------------------------------------------------------


def test_faults_of_all_adapters_come_with_all_others_and_with_the_warnings(project: Path) -> None:
    seeded_adapter(project / "adapters" / "v2", seed=2, config={"base_model_name_or_path": "another/base"})
    seeded_adapter(project / "adapters" / "v3", seed=3, config={"use_dora": True})
    with pytest.raises(SettingsError) as caught:
        described(stack_file(pods=[pod(maxLoras=0)], requireLock=True))
    first, *lines = str(caught.value).splitlines()
    assert first == "the stack has 3 faults; nothing was touched:"
    starts = [
        "  pods[0].engine.maxLoras: ",
        "  models[2].adapter: acme-v3: a",
        "  requireLock: there is no stacks/acme.lock.yaml",
        "  warning: models[1].adapter: acme-v2: a",
    ]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts
    assert "adapter_config.json: use_dora: " in lines[1]
    assert "adapter_config.json: base_model_name_or_path: " in lines[3]


def test_a_hundred_with_the_same_fault_are_one_line(project: Path) -> None:
    for n in range(1, 101):
        seeded_adapter(project / "adapters" / f"v{n}", seed=n, config={"use_dora": True})
    (fault,) = faults(stack_file(100))
    assert fault.startswith(
        "models[0, 1, 2, 3, 4 and 95 more].adapter: acme-v1, acme-v2, acme-v3, acme-v4, acme-v5 and 95 more: "
        "adapter_config.json: use_dora: "
    )
    assert len(fault) < 500


def test_warnings_alone_stop_nothing(project: Path) -> None:
    for n in (1, 2):
        seeded_adapter(project / "adapters" / f"v{n}", seed=n, config={"base_model_name_or_path": "another/base"})
    (warning,) = described(stack_file()).warnings
    assert warning.startswith("models[0, 1].adapter: acme-v1, acme-v2: adapter_config.json: base_model_name_or_path: ")


@pytest.mark.parametrize("spelling", ["loraTargetModules", "lora_target_modules", "lora-target-modules", "lora-target"])
def test_the_modules_that_the_engine_adapts_are_known_to_the_check(project: Path, spelling: str) -> None:
    warned = described(stack_file(pods=[pod(args={spelling: ["q_proj", "v_proj"]})])).warnings
    assert [warning for warning in warned if "no flag lora-target;" not in warning] == []
    (told,) = faults(stack_file(pods=[pod(args={spelling: ["o_proj"]})]))
    assert told.startswith("models[0, 1, 2].adapter: ")
    assert "--lora-target-modules lets vLLM adapt o_proj" in told


def test_every_fault_of_the_arguments_is_told_with_its_pod(project: Path) -> None:
    pinned = {"python": None, "vllm": {"version": "0.33.0"}}
    args = {"maxNumSeq": 64, "enforceEager": "yes", "port": 1}
    assert faults(stack_file(pods=[pod(**pinned, args=args)])) == (
        "pods[0].engine: engine.args.port cannot be set here: set engine.port beside engine.args",
        "pods[0].engine: engine.args.enforceEager must be true or false",
        "pods[0].engine: engine.args.maxNumSeq: vLLM 0.33.0 has no flag max-num-seq; did you mean max-num-seqs?",
    )
    assert described(stack_file(pods=[pod(args={"maxNumSeq": 64})])).warnings == (
        "pods[0].engine: args.maxNumSeq: vLLM 0.33, the nearest whose flags are known here, has no flag max-num-seq; "
        "did you mean max-num-seqs?",
    )


def test_a_path_that_cannot_be_looked_at_is_a_fault_among_the_others(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "closed").mkdir()
    close(project / "closed", monkeypatch)
    long = "x" * 300
    models = [
        {"id": "acme-v1", "base": BASE, "adapter": "../closed/v1"},
        {"id": "acme-v2", "base": BASE, "adapter": f"../{long}"},
        {"id": "acme-v3", "base": "gone", "adapter": "../adapters/v3"},
    ]
    for named, reason in (("../closed/base", "permission denied"), (long, "file name too long")):
        told = faults(stack_file(pods=[{**pod(), "baseConfig": named}], models=models))
        assert [fault.partition(": ")[0] for fault in told] == [
            "pods[0].baseConfig",
            "models[0].adapter",
            "models[1].adapter",
            "models[2].base",
        ]
        assert told[0].endswith(f": cannot be read ({reason}).")
        assert told[1].endswith("acme-v1: ../closed/v1: cannot be read (permission denied).")
        assert told[2].endswith(": cannot be read (file name too long).")


def test_what_a_volume_holds_of_the_base_may_be_out_of_sight(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "closed").mkdir()
    (project / "loop").mkdir()
    (project / "loop" / "config.json").symlink_to("config.json")
    close(project / "closed", monkeypatch)
    for base, source, reason in (
        ("/models/x", "../closed", "permission denied"),
        ("/models/" + "x" * 300, "..", "file name too long"),
        ("/models/loop", "..", "a loop of links"),
    ):
        served = {"base": base, "sandbox": {"volumes": {"/models": source}}}
        (told,) = faults(stack_file(pods=[served], models=[]))
        assert told.startswith("pods[0].sandbox.volumes: /models/")
        assert told.endswith(f": cannot be read ({reason}).")
    # What is surely not there is nobody's fault: the base may come from elsewhere.
    described(stack_file(pods=[{"base": "/models/none", "sandbox": {"volumes": {"/models": ".."}}}], models=[]))


def test_a_closed_folder_beside_no_weights(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_weights(project / "adapters" / "v2")
    (project / "adapters" / "v2" / "lost+found").mkdir()
    close(project / "adapters" / "v2" / "lost+found", monkeypatch)
    (told,) = faults(stack_file())
    assert told.startswith("models[1].adapter: acme-v2 at ../adapters/v2: holds no adapter_model.safetensors, and ")


def test_the_base_itself_is_known_where_its_config_is_at_hand(project: Path) -> None:
    base = project / "base" / "config.json"
    served = {**pod(), "baseConfig": "../base"}
    assert [fault.partition(": ")[0] for fault in faults(stack_file(pods=[served]))] == ["pods[0].baseConfig"]
    base.parent.mkdir()
    base.write_text(json.dumps(LLAMA))
    assert described(stack_file(pods=[served])).warnings == ()
    base.write_text(json.dumps({**LLAMA, "hidden_size": 64}))
    told = faults(stack_file(pods=[served]))
    assert told
    assert all(fault.startswith("models[0, 1, 2].adapter: ") for fault in told)
    base.write_text("{")
    (told_of_it,) = faults(stack_file(pods=[served]))
    assert told_of_it.startswith("pods[0].baseConfig: ../base: not JSON (")
    assert told_of_it.endswith("; name the config.json of the base model.")


def test_a_vllm_that_is_not_known_is_one_warning_a_pod(project: Path) -> None:
    (warning,) = described(stack_file(pods=[pod({"vllm": {"version": "99.1.0"}})])).warnings
    assert warning.startswith("pods[0].engine.vllm.version: vLLM 99.1.0 is newer than ")
    assert described(stack_file(pods=[pod({"vllm": {"version": "0.32.0"}})])).warnings == ()
    assert described(stack_file(0, pods=[pod({"vllm": {"version": "99.1.0"}})])).warnings == ()


def test_what_only_the_lock_knows_is_not_checked(project: Path) -> None:
    for n in (1, 2, 3):
        seeded_adapter(project / "adapters" / f"v{n}", seed=n, config={"use_dora": True})
    lock(project)
    shutil.rmtree(project / "adapters")
    assert described(stack_file()).warnings == ()


def test_what_was_not_asked_of_the_lock_is_not_written(project: Path) -> None:
    described(stack_file())
    assert read_lock(project / "stacks", "acme") is None


def test_a_slip_in_a_key_is_told_by_the_program_as_by_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    others = ("Lora-pods:models", "aws:region", "other:secret")
    monkeypatch.setenv("PULUMI_CONFIG", json.dumps(dict.fromkeys(("lora-pods:modles", *others), "x")))
    faults = secrecy_faults(Config({}))
    assert faults == list(unknown_key_faults(["modles", *others]))
    assert [fault.partition(": ")[0] for fault in faults] == ["Lora-pods:models", "modles"]
