"""The lock as a file: what is written is read again, and what others did to it is told in words."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from components.core.errors import UserError
from components.core.lock import LockEntry, lock_text
from components.settings import MODEL_ID
from components.stack_files import LockError, read_lock, stack_config, write_lock

ENTRY = LockEntry(
    digest=f"sha256:{'ab' * 32}",
    adapter="../adapters/acme/v1",
    base="Qwen/Qwen2.5-7B-Instruct",
    size=159_000_000,
    rank=16,
    modules=("q_proj", "v_proj"),
    parameters=39_976_960,
)
WRITTEN = f"""\
# What each adapter of this stack is, for machines that do not have them. Written by `lora lock -s acme`: commit it, \
do not edit it.
models:
  acme-v1:
    digest: sha256:{"ab" * 32}
    adapter: ../adapters/acme/v1
    base: Qwen/Qwen2.5-7B-Instruct
    size: 159000000
    rank: 16
    modules: [q_proj, v_proj]
    parameters: 39976960
"""
ids = st.one_of(
    st.sampled_from(
        ["1e3", "no", "null", "007", "0x1f", "1_000", "y", "ON", "true", "1.5", "2024-01-01", "0", "12e03"]
    ),
    st.from_regex(MODEL_ID, fullmatch=True).filter(lambda text: len(text) <= 96),
)
# What Pulumi, or a trainer's JSON, can hand over: any text that UTF-8 can carry.
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
counts = st.integers(1, 10**18 - 1)
entries = st.builds(
    LockEntry,
    digest=st.binary(min_size=32, max_size=32).map(lambda raw: f"sha256:{raw.hex()}"),
    adapter=texts,
    base=texts,
    size=counts,
    rank=counts,
    modules=st.lists(texts, max_size=4).map(tuple),
    parameters=st.integers(0, 10**18 - 1),
)


def written(directory: Path, text: str) -> LockError:
    (directory / "acme.lock.yaml").write_text(text)
    with pytest.raises(LockError) as caught:
        read_lock(directory, "acme")
    return caught.value


@pytest.fixture
def stacks(tmp_path: Path) -> Path:
    (tmp_path / "stacks").mkdir()
    return tmp_path / "stacks"


def test_the_text() -> None:
    assert lock_text("acme", {"acme-v1": ENTRY}) == WRITTEN


@given(lock=st.dictionaries(ids, entries, max_size=4))
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, lock: dict[str, LockEntry]) -> None:
    directory = tmp_path_factory.mktemp("stacks")
    write_lock(directory, "acme", lock)
    assert read_lock(directory, "acme") == lock
    text = (directory / "acme.lock.yaml").read_text(encoding="utf-8")
    # Also by a reader that guesses types: every text is quoted where that is needed.
    document = yaml.safe_load(text)["models"]
    assert document == {model: {**vars(entry), "modules": list(entry.modules)} for model, entry in lock.items()}
    assert list(document) == sorted(lock)
    assert len(text.splitlines()) == (1 + 1 + 8 * len(lock))


def test_a_change_is_one_line_and_git_shows_whose_it_is(stacks: Path) -> None:
    lock = {f"acme-v{n}": ENTRY for n in range(1, 6)}
    write_lock(stacks, "acme", lock)
    subprocess.run(["git", "init", "-q", "."], cwd=stacks, check=True)
    subprocess.run(["git", "add", "."], cwd=stacks, check=True)
    for changed in (
        {"digest": f"sha256:{'cd' * 32}"},
        {"adapter": "../elsewhere"},
        {"base": "other/base"},
    ):
        write_lock(stacks, "acme", {**lock, "acme-v3": LockEntry(**{**vars(ENTRY), **changed})})
        diff = subprocess.run(["git", "diff"], cwd=stacks, check=True, capture_output=True, text=True).stdout
        lines = [line for line in diff.splitlines() if line[0] in "+-" and line[:3] not in ("+++", "---")]
        assert len(lines) == 2, diff
        assert "\n   acme-v3:\n" in diff


def test_what_is_the_same_is_not_written_again_and_a_link_stays_one(stacks: Path, tmp_path: Path) -> None:
    assert write_lock(stacks, "acme", {"acme-v1": ENTRY})
    path = stacks / "acme.lock.yaml"
    before = path.stat()
    assert not write_lock(stacks, "acme", {"acme-v1": ENTRY})
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    path.rename(tmp_path / "real.yaml")
    path.symlink_to(tmp_path / "real.yaml")
    assert write_lock(stacks, "acme", {})
    assert path.is_symlink()
    assert (tmp_path / "real.yaml").read_text().endswith("models: {}\n")
    assert [each.name for each in stacks.iterdir()] == ["acme.lock.yaml"], "nothing is left aside"


def test_a_lock_that_cannot_be_written_is_one_sentence(stacks: Path) -> None:
    (stacks / "acme.lock.yaml").mkdir()
    with pytest.raises(UserError, match=r"^stacks/acme\.lock\.yaml: cannot be written \("):
        write_lock(stacks, "acme", {"acme-v1": ENTRY})
    assert [each.name for each in stacks.iterdir()] == ["acme.lock.yaml"]


def test_no_lock(stacks: Path) -> None:
    assert read_lock(stacks, "acme") is None


def test_every_fault_has_its_path(stacks: Path) -> None:
    text = (
        WRITTEN.replace("rank: 16", "rank: -1").replace("[q_proj, v_proj]", "q_proj").replace("size: 159", "size: 0o")
    )
    error = written(stacks, text.replace(f"sha256:{'ab' * 32}", "sha256:AB") + "  b: {digest: x}\n  c: 1\nextra: 1\n")
    assert list(error.faults) == [
        "stacks/acme.lock.yaml: unknown key extra; known here: models"
    ]  # the rest follows once that is gone
    error = written(stacks, text.replace(f"sha256:{'ab' * 32}", "sha256:AB") + "  b: {digest: x, size: 1}\n  c: 1\n")
    assert list(error.faults) == [
        "stacks/acme.lock.yaml: models.acme-v1.digest: must be sha256: and 64 hex digits in lower case, "
        "not 'sha256:AB'",
        "stacks/acme.lock.yaml: models.acme-v1.size: must be a whole number, as `lora lock` writes it, not '0o000000'",
        "stacks/acme.lock.yaml: models.acme-v1.rank: must be a whole number, as `lora lock` writes it, not '-1'",
        "stacks/acme.lock.yaml: models.acme-v1.modules: must be a list of names",
        "stacks/acme.lock.yaml: models.b: adapter, base, rank, modules, parameters missing",
        "stacks/acme.lock.yaml: models.c: must be a mapping of digest, adapter, base, size, rank, modules, parameters",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be a mapping of models"),
        ("- a\n", "must be a mapping of models"),
        ("models:\n", "models: must map model ids to what their adapters are"),
        ("models: {a\n", "not YAML: "),
        ("\x1b[2J", "not YAML: "),
        ("models: {}\nmodels: {}\n", "not YAML: models stands there twice (line 2); write it anew"),
        ("models:\n  ? [a]\n  : b\n", "not YAML: a list or a mapping cannot be a key (line 2)"),
        ("a: &a [*a]\n", "not YAML: a lock has no aliases (line 1)"),
        ("a: [[[[[[[[[]]]]]]]]]\n", "is nested too deeply for a lock"),
        ("x:\n - &a [1]\n - &b [*a, *a]\n", "not YAML: a lock has no aliases (line 2)"),
        (f"models: {{a: {{size: {'9' * 4000}}}}}\n", "missing"),
        ("[" * 100_000, "not YAML: "),
        ("models:\n  !!python/object/apply:os.system ['true']\n", "models: must map"),
        (WRITTEN + WRITTEN[WRITTEN.index("  acme-v1") :], "not YAML: acme-v1 stands there twice (line 11)"),
        (
            WRITTEN.replace("    size:", "<<<<<<< HEAD\n    size: 2\n=======\n    size:").replace(
                "    rank", ">>>>>>> b\n    rank"
            ),
            "holds the markers of a merge conflict (line 7); write it anew where the adapters are: `lora lock -s acme`",
        ),
    ],
    ids=lambda value: repr(value[:30]),
)  # fmt: skip
def test_what_is_no_lock(stacks: Path, text: str, said: str) -> None:
    (fault,) = written(stacks, text).faults
    assert fault.startswith("stacks/acme.lock.yaml: ")
    assert said in fault
    assert fault.isprintable()
    assert len(fault) < 400


def test_what_is_no_file_to_read(stacks: Path) -> None:
    path = stacks / "acme.lock.yaml"
    path.write_bytes(b"models: {\xff}")
    with pytest.raises(LockError, match="not UTF-8"):
        read_lock(stacks, "acme")
    with path.open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(LockError, match="larger than 16 MiB"):
        read_lock(stacks, "acme")
    path.unlink()
    path.mkdir()
    with pytest.raises(LockError, match="not a plain file"):
        read_lock(stacks, "acme")


def test_a_stack_file_is_read_as_pulumi_reads_it(stacks: Path) -> None:
    (stacks / "Pulumi.acme.yaml").write_text(
        "encryptionsalt: v1:x\n"
        "config:\n"
        "  lora-pods:apiKey: {secure: AAAA}\n"
        "  lora-pods:models:\n"
        "    - &first {id: no, base: on, n: 1e3, t: true, h: 0x10, d: 12, f: .5}\n"
        "    - {<<: *first, id: yes}\n"
        "  other:models: 1\n"
    )
    first = {"id": "no", "base": "on", "n": 1000.0, "t": True, "h": 16, "d": 12, "f": 0.5}
    config = stack_config(stacks, "acme", "lora-pods")
    assert config["models"] == [first, {**first, "id": "yes"}]
    assert config["apiKey"] == {"secure": "AAAA"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("config:\n  a: 1\n  a: 2\n", "a stands there twice (line 3)"),
        ("config: [\n", "not YAML"),
        ("config: [a]\n", "config: must be a mapping"),
        ("config:\n  lora-pods:a: 1\n  'lora-pods:a': 2\n", "lora-pods:a stands there twice (line 3)"),
        ("config: {b: 1}\nconfig: {b: 2}\n", "config stands there twice (line 2)"),
        ("config: {b: [{c: 1, c: 2}]}\n", "c stands there twice (line 1)"),
        ("config: {lora-pods:a: 1, a: 2}\n", "config: a stands there twice, with and without lora-pods:"),
        ("some text\n", "must be a mapping with the key config"),
        ("- config: {}\n", "must be a mapping with the key config"),
        ("Config: {a: 1}\n", "Config: unknown key; known here: config, environment, encryptionsalt, encryptedkey, "),
        ("environment: [team]\nconfig: {lora-pods:pods: []}\n", "environment: may bring lora-pods:models, which "),
        ("a: !!int ''\n", "holds a value that cannot be read as YAML"),
        ("a: 2024-13-99\n", "holds a value that cannot be read as YAML"),
        ("a: !!python/name:os.system\n", "not YAML"),
        ("[" * 5000, "cannot be read as YAML"),
    ],
)
def test_a_stack_file_that_is_none(stacks: Path, text: str, said: str) -> None:
    (stacks / "Pulumi.acme.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        stack_config(stacks, "acme", "lora-pods")
    assert str(caught.value).startswith("stacks/Pulumi.acme.yaml: ")
    assert said in str(caught.value)


def test_a_link_to_nowhere_is_no_absence(stacks: Path) -> None:
    (stacks / "acme.lock.yaml").symlink_to("nowhere")
    (stacks / "Pulumi.acme.yaml").symlink_to("nowhere")
    with pytest.raises(LockError, match=r"^stacks/acme\.lock\.yaml: a link to a file that is not there$"):
        read_lock(stacks, "acme")
    with pytest.raises(UserError, match=r"^stacks/Pulumi\.acme\.yaml: a link to a file that is not there$"):
        stack_config(stacks, "acme", "lora-pods")


def test_an_environment_that_cannot_bring_models(stacks: Path) -> None:
    (stacks / "Pulumi.acme.yaml").write_text("environment: [team]\nconfig: {lora-pods:models: []}\n")
    assert stack_config(stacks, "acme", "lora-pods") == {"models": []}


def test_a_stack_that_is_not_there(stacks: Path) -> None:
    (stacks / "Pulumi.globex.yaml").write_text("config: {}\n")
    with pytest.raises(UserError, match=r"^stacks/Pulumi\.acme\.yaml: no such file; the stacks here are: globex$"):
        stack_config(stacks, "acme", "lora-pods")
    with pytest.raises(UserError, match=r"'\.\./acme' is no stack's name"):
        stack_config(stacks, "../acme", "lora-pods")
