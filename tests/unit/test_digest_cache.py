import hashlib
import json
import multiprocessing
import os
import re
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from components.core import digest_cache, memory, meter
from components.core.adapter import Adapter, AdapterFiles, read_adapter, read_located
from components.core.bundle import Member, bundle_members, digest_bundle
from components.core.check import remembered
from components.core.check.adapter_check import Against, check_adapter, check_files
from components.core.check.base_model import BaseFacts, read_base_model
from components.core.check.remembered import check_all
from components.core.digest_cache import BundleFacts, DigestCache, default_path
from components.core.errors import UserError
from components.core.findings import Finding, fault
from components.core.sizes import shown_size
from tests.support.adapters import CONFIG, lora_shapes, safetensors_bytes, write_adapter

SECOND = 1_000_000_000

# An audit hook can never be taken away again: one for all tests, silent until a test listens.
_listening: list[tuple[str, str]] | None = None


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if _listening is not None and event in ("open", "os.scandir", "os.listdir"):
        _listening.append((event, str(arguments[0])))


sys.addaudithook(_hear)


@contextmanager
def opened_below(directory: Path) -> Iterator[list[str]]:
    """What is opened or listed in a directory meanwhile: names relative to it, once per opening."""
    global _listening
    heard: list[str] = []
    _listening = []
    try:
        yield heard
    finally:
        heard.extend(os.path.relpath(path, directory) for _, path in _listening if path.startswith(str(directory)))
        _listening = None


def later() -> int:
    """A clock by which every file in a test is old enough to be remembered."""
    return time.time_ns() + 10 * SECOND


def plain_digest(directory: Path) -> str:
    return digest_bundle(bundle_members(read_adapter(directory)))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter")


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "cache" / "digests.sqlite3", clock=later)


BOTH = ["adapter_config.json", "adapter_config.json", "adapter_model.safetensors", "adapter_model.safetensors"]


def is_hit(cache: DigestCache, directory: Path) -> bool:
    """Describes an adapter, and tells whether that opened none of its files."""
    with opened_below(directory) as opened:
        facts = cache.describe(directory)
    assert facts.digest == plain_digest(directory)
    return opened == []


# --- answers ----------------------------------------------------------------------------------------------


def test_what_is_told(cache: DigestCache, adapter: Path) -> None:
    expected = BundleFacts(
        digest=plain_digest(adapter),
        size=4096,
        rank=4,
        modules=("q_proj", "v_proj"),
        parameters=128,
        base="example/base",
    )
    assert [cache.describe(adapter), cache.describe(adapter)] == [expected, expected]


def test_a_hit_opens_and_lists_nothing(cache: DigestCache, adapter: Path) -> None:
    for litter in ("optimizer.pt", "._adapter_config.json", ".DS_Store"):
        (adapter / litter).touch()
    with opened_below(adapter) as first:
        cache.describe(adapter)
    with opened_below(adapter) as second:
        cache.describe(adapter)
    assert (sorted(first), second) == (BOTH, [])


def test_litter_that_comes_later_changes_nothing(cache: DigestCache, adapter: Path) -> None:
    cache.describe(adapter)
    (adapter / "optimizer.pt").touch()
    assert is_hit(cache, adapter)


def test_another_cache_object_remembers(cache: DigestCache, adapter: Path, tmp_path: Path) -> None:
    cache.describe(adapter)
    assert is_hit(DigestCache(tmp_path / "cache" / "digests.sqlite3"), adapter)


def test_a_link_to_the_directory_is_the_same_adapter(cache: DigestCache, adapter: Path) -> None:
    (adapter.parent / "current").symlink_to(adapter.name)
    cache.describe(adapter)
    with opened_below(adapter) as opened:
        facts = cache.describe(adapter.parent / "current")
    assert (facts.digest, opened) == (plain_digest(adapter), [])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes any bytes as a name")
def test_a_path_that_is_not_unicode(cache: DigestCache, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / os.fsdecode(b"caf\xe9\n"))
    cache.describe(directory)
    assert is_hit(cache, directory)


# --- changes ----------------------------------------------------------------------------------------------


def rewrite_in_place(directory: Path) -> None:
    """Same size, same inode, same mtime: only ctime tells."""
    path = directory / "adapter_model.safetensors"
    status = path.stat()
    with path.open("r+b") as file:
        file.write(safetensors_bytes(lora_shapes(), fill=7))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (status.st_size, status.st_mtime_ns, status.st_ino)


def replace_by_rename(directory: Path) -> None:
    path = directory / "adapter_model.safetensors"
    status = path.stat()
    (directory / "new").write_bytes(safetensors_bytes(lora_shapes(), fill=8))
    os.utime(directory / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    (directory / "new").replace(path)


def change_config(directory: Path) -> None:
    write_adapter(directory, {**CONFIG, "lora_alpha": 17})


def change_link(directory: Path) -> None:
    (directory / "other").write_bytes(safetensors_bytes(lora_shapes(), fill=9))
    (directory / "adapter_model.safetensors").unlink()
    (directory / "adapter_model.safetensors").symlink_to("other")


def touch(directory: Path) -> None:
    os.utime(directory / "adapter_config.json", ns=(1, 1))


@pytest.mark.parametrize(
    ("change", "same_digest"),
    [
        (rewrite_in_place, False),
        (replace_by_rename, False),
        (change_config, False),
        (change_link, False),
        (touch, True),
    ],
)
def test_a_change_is_noticed_and_then_remembered(
    cache: DigestCache, adapter: Path, change: Callable[[Path], None], same_digest: bool
) -> None:
    before = cache.describe(adapter)
    change(adapter)
    with opened_below(adapter) as opened:
        after = cache.describe(adapter)
    assert len(opened) == 4
    assert after.digest == plain_digest(adapter)
    assert (after == before) is same_digest
    assert is_hit(cache, adapter)


def test_a_link_that_leads_elsewhere_is_noticed(cache: DigestCache, adapter: Path) -> None:
    change_link(adapter)
    first = cache.describe(adapter)
    (adapter / "third").write_bytes(safetensors_bytes(lora_shapes(), fill=10))
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.safetensors").symlink_to("third")
    second = cache.describe(adapter)
    assert second.digest == plain_digest(adapter) != first.digest


def test_the_real_path_counts_even_where_all_else_is_equal(cache: DigestCache, adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "one")
    (adapter / "two").hardlink_to(adapter / "one")
    (adapter / "adapter_model.safetensors").symlink_to("one")
    cache.describe(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.safetensors").symlink_to("two")
    assert not is_hit(cache, adapter)


def test_an_adapter_that_went_away(cache: DigestCache, adapter: Path) -> None:
    cache.describe(adapter)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(UserError, match=r"holds no adapter_config\.json; "):
        cache.describe(adapter)


def test_other_rules_find_the_answer_anew(cache: DigestCache, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.describe(adapter)
    monkeypatch.setattr(digest_cache, "_rules", lambda: "another version of the program")
    assert not is_hit(cache, adapter)
    assert is_hit(cache, adapter)
    monkeypatch.undo()
    assert is_hit(cache, adapter)


def imported_from(name: str) -> set[str]:
    """Modules of core that a module needs, itself among them."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            text = (Path(digest_cache.__file__).parent / name).read_text()
            waiting += [
                f"{found.replace('.', '/')}.py"
                for found in re.findall(r"^from components\.core\.([\w.]+) import", text, re.M)
            ]
    return seen


def test_every_module_that_describes_an_adapter_is_among_the_rules() -> None:
    assert imported_from("adapter.py") | imported_from("bundle.py") | {"digest_cache.py"} == set(
        digest_cache.BUNDLE_RULES
    )


def test_the_rules_are_the_sources() -> None:
    core = Path(digest_cache.__file__).parent
    sources = b"".join((core / name).read_bytes() for name in digest_cache.BUNDLE_RULES)
    assert digest_cache._rules() == hashlib.sha256(sources).hexdigest()
    modules = [*core.glob("*.py"), *(core / "check").glob("*.py")]
    everything = b"".join(
        path.read_bytes() for path in sorted(modules, key=lambda path: path.relative_to(core).as_posix())
    )
    assert remembered._rules() == hashlib.sha256(everything).hexdigest()


# --- the racy rule ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("newest", "seconds_later", "remembered"),
    [
        ("mtime", 2 * SECOND, False),
        ("mtime", 2 * SECOND + 1, True),
        ("mtime", 0, False),
        ("mtime", -5 * SECOND, False),
        ("ctime", 2 * SECOND, False),
        ("ctime", 2 * SECOND + 1, True),
    ],
)
def test_what_was_written_just_now_is_not_remembered(
    tmp_path: Path, adapter: Path, newest: str, seconds_later: int, remembered: bool
) -> None:
    weights = adapter / "adapter_model.safetensors"
    if newest == "mtime":
        future = time.time_ns() + 1000 * SECOND
        os.utime(weights, ns=(future, future))
        stamp = weights.stat().st_mtime_ns
    else:
        for path in adapter.iterdir():
            os.utime(path, ns=(1, 1))
        stamp = max(path.stat().st_ctime_ns for path in adapter.iterdir())
    cache = DigestCache(tmp_path / "digests.sqlite3", clock=lambda: stamp + seconds_later)
    cache.describe(adapter)
    assert is_hit(cache, adapter) is remembered


def test_the_real_clock_does_not_trust_a_new_file(tmp_path: Path, adapter: Path) -> None:
    cache = DigestCache(tmp_path / "digests.sqlite3")
    cache.describe(adapter)
    assert not is_hit(cache, adapter)


# --- how far it is ----------------------------------------------------------------------------------------


def test_hashing_shows_itself_and_says_nothing_where_nothing_is_read(
    tmp_path: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(meter, "SAY_SECONDS", 0.0)
    cache = DigestCache(tmp_path / "cache.sqlite3", lambda: time.time_ns() + 10 * SECOND, said.append)
    cache.describe(adapter)
    size = sum(path.stat().st_size for path in (adapter / "adapter_config.json", adapter / "adapter_model.safetensors"))
    where = "/".join(adapter.parts[-2:])
    assert said[0].startswith(f"hashing {where}: ")
    assert f" of {shown_size(size)}, " in said[0]
    assert said[-1] == f"hashed {shown_size(size)} in 0 s"
    said.clear()
    cache.describe(adapter)
    assert said == []


# --- files that change while they are read ----------------------------------------------------------------


def writing_while_hashing(monkeypatch: pytest.MonkeyPatch, directory: Path, times: int) -> list[int]:
    """Makes a writer rewrite the weights right after each of the first ``times`` hashings."""
    done: list[int] = []

    def hash_and_write(members: list[Member], counted: Callable[[int], None]) -> str:
        digest = digest_bundle(members, counted)
        done.append(len(done))
        if len(done) <= times:
            write_adapter(directory, CONFIG, safetensors_bytes(lora_shapes(), fill=100 + len(done)))
        return digest

    monkeypatch.setattr(digest_cache, "digest_bundle", hash_and_write)
    return done


def test_a_change_while_hashing_is_tried_once_more(
    cache: DigestCache, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashings = writing_while_hashing(monkeypatch, adapter, times=1)
    assert cache.describe(adapter).digest == plain_digest(adapter)
    assert len(hashings) == 2


def test_a_file_that_keeps_changing_is_an_error(
    cache: DigestCache, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashings = writing_while_hashing(monkeypatch, adapter, times=2)
    with pytest.raises(UserError) as caught:
        cache.describe(adapter)
    assert str(caught.value) == (f"{adapter}: changed while it was being read; run again when nothing writes to it.")
    assert len(hashings) == 2
    monkeypatch.undo()
    assert not is_hit(cache, adapter)


def test_a_half_written_file_is_not_judged(cache: DigestCache, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (adapter / "adapter_model.safetensors").read_bytes()
    (adapter / "adapter_model.safetensors").write_bytes(whole[:20])

    def read_and_finish(files: AdapterFiles) -> Adapter:
        try:
            return read_located(files)
        finally:
            if files.weights.stat().st_size == 20:
                files.weights.write_bytes(whole)

    monkeypatch.setattr(digest_cache, "read_located", read_and_finish)
    assert cache.describe(adapter).digest == plain_digest(adapter)


def test_a_faulty_file_at_rest_is_read_once(cache: DigestCache, adapter: Path) -> None:
    write_adapter(adapter, b"{")
    with opened_below(adapter) as opened, pytest.raises(UserError, match=r"not JSON"):
        cache.describe(adapter)
    assert opened == ["adapter_config.json"]


# --- many -------------------------------------------------------------------------------------------------


def test_order_faults_and_repeats(cache: DigestCache, tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "one")
    two = write_adapter(tmp_path / "two", {**CONFIG, "r": 8})
    faulty = write_adapter(tmp_path / "faulty", b"[]")
    answers = cache.describe_all([two, faulty, one, tmp_path / "none", two])
    assert [answer.rank if isinstance(answer, BundleFacts) else str(answer) for answer in answers] == [
        8,
        f"{faulty}/adapter_config.json: not a JSON object; PEFT's save_pretrained writes one.",
        4,
        f"{tmp_path}/none: no such directory.",
        8,
    ]
    with opened_below(tmp_path) as opened:
        cache.describe_all([two, faulty, one, tmp_path / "none", two])
    assert [path for path in opened if not path.startswith(("faulty", "cache"))] == []


def test_none() -> None:
    assert DigestCache(Path("/nowhere/x.sqlite3")).describe_all([]) == []


def test_a_thousand_hits_take_few_queries(cache: DigestCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directories = [write_adapter(tmp_path / "many" / str(number)) for number in range(1000)]
    first = cache.describe_all(directories)
    statements: list[str] = []
    real_connect = sqlite3.connect

    def connect(path: Path, timeout: float) -> sqlite3.Connection:
        connection = real_connect(path, timeout=timeout)
        connection.set_trace_callback(lambda text: statements.append(text.split()[0]))
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect)
    with opened_below(tmp_path / "many") as opened:
        assert cache.describe_all(directories) == first
    assert opened == []
    assert statements == ["PRAGMA", "PRAGMA", "CREATE", "SELECT", "SELECT"]


def test_the_database_does_not_grow_without_end(
    cache: DigestCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "ROWS_KEPT", 3)
    for number in range(5):
        cache.describe(write_adapter(tmp_path / str(number)))
    with closing(sqlite3.connect(tmp_path / "cache" / "digests.sqlite3")) as database:
        kept = [row[0] for row in database.execute("SELECT question FROM answers ORDER BY rowid")]
    assert kept == [f'"{tmp_path}/{number}"' for number in (2, 3, 4)]


# --- checks -----------------------------------------------------------------------------------------------


def check(cache: DigestCache, directory: Path, against: Against = Against()) -> list[Finding]:  # noqa: B008
    (found,) = check_all(cache, [(directory, cache.describe_all([directory])[0], against)])
    assert found == check_adapter(directory, against)
    return found


def is_known(cache: DigestCache, directory: Path, against: Against) -> bool:
    """Checks an adapter, and tells whether that opened none of its files."""
    facts = cache.describe_all([directory])[0]
    with opened_below(directory) as opened:
        check_all(cache, [(directory, facts, against)])
    return opened == []


def base_model(directory: Path, hidden: int) -> BaseFacts:
    directory.mkdir(exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": hidden}
    (directory / "config.json").write_text(json.dumps(config))
    return read_base_model(directory)


def test_a_checked_adapter_is_not_opened_again(cache: DigestCache, adapter: Path, tmp_path: Path) -> None:
    write_adapter(adapter, {**CONFIG, "use_dora": True, "base_model_name_or_path": "a/b"})
    against = Against(base="c/d")
    first = check(cache, adapter, against)
    assert [finding.rule for finding in first] == ["dora", "wrong-base"]
    assert is_known(cache, adapter, against)
    assert is_known(DigestCache(tmp_path / "cache" / "digests.sqlite3"), adapter, against)
    assert check(cache, adapter, against) == first


def test_whatever_it_is_checked_against_counts(cache: DigestCache, adapter: Path, tmp_path: Path) -> None:
    asked = [
        Against(),
        Against(base="example/base"),
        Against(base="other/base"),
        Against(vllm="0.31.0"),
        Against(vllm="0.32.0"),
        Against(lora_target_modules=("q_proj",)),
        Against(base_model=base_model(tmp_path / "base", 8)),
        Against(base_model=base_model(tmp_path / "base", 16)),
    ]
    assert [is_known(cache, adapter, against) for against in asked] == [False] * len(asked)
    assert [is_known(cache, adapter, against) for against in asked] == [True] * len(asked)
    for against in asked:
        check(cache, adapter, against)


@pytest.mark.parametrize("change", [rewrite_in_place, replace_by_rename, change_config])
def test_a_changed_adapter_is_checked_anew(cache: DigestCache, adapter: Path, change: Callable[[Path], None]) -> None:
    check(cache, adapter)
    change(adapter)
    assert not is_known(cache, adapter, Against())
    assert is_known(cache, adapter, Against())


def test_other_check_rules_check_anew(cache: DigestCache, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(cache, adapter)
    monkeypatch.setattr(remembered, "_rules", lambda: "another version of the program")
    assert not is_known(cache, adapter, Against())
    assert is_hit(cache, adapter)


def test_the_same_adapter_elsewhere_is_told_with_its_own_path(cache: DigestCache, tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "one", {**CONFIG, "r": 0})
    two = write_adapter(tmp_path / "two", {**CONFIG, "r": 0})
    assert [finding.path for finding in check(cache, one)] == [f"{one}/adapter_config.json"]
    assert is_known(cache, two, Against())
    assert [finding.path for finding in check(cache, two)] == [f"{two}/adapter_config.json"]


def test_what_comes_to_lie_beside_is_noticed_without_opening(cache: DigestCache, adapter: Path) -> None:
    check(cache, adapter)
    (adapter / "adapter_model.bin").touch()
    assert is_known(cache, adapter, Against())
    assert [finding.rule for finding in check(cache, adapter)] == ["two-weights"]


def test_an_adapter_without_a_digest_is_checked_live(cache: DigestCache, tmp_path: Path) -> None:
    broken = write_adapter(tmp_path / "broken", b"{", {"m.q.lora_magnitude_vector": [4]})
    assert {"not-json", "dora"} <= {finding.rule for finding in check(cache, broken)}
    assert check(cache, tmp_path / "none")[0].message == "no such directory."


def test_an_error_that_the_check_does_not_find_is_the_finding(cache: DigestCache, adapter: Path) -> None:
    plain, faulty = UserError(f"{adapter}: too large."), fault("PLACE", "changing", "changed.")
    found = check_all(cache, [(adapter, plain, Against()), (adapter, faulty, Against())])
    assert found == [
        [Finding(str(adapter), "error", "unreadable", "", "too large.")],
        [Finding("PLACE", "error", "changing", "", "changed.")],
    ]


def test_many_are_checked_in_order(cache: DigestCache, tmp_path: Path) -> None:
    directories = [write_adapter(tmp_path / str(number), {**CONFIG, "r": number}) for number in (0, 4)]
    directories.insert(1, tmp_path / "none")
    items = [
        (path, facts, Against(vllm="0.32.0"))
        for path, facts in zip(directories, cache.describe_all(directories), strict=True)
    ]
    for _ in range(2):
        assert [[finding.rule for finding in found] for found in check_all(cache, [*items, items[0]])] == [
            ["rank"],
            ["directory"],
            [],
            ["rank"],
        ]
    assert check_all(cache, []) == []


def test_an_adapter_that_changed_since_it_was_described_is_not_remembered(cache: DigestCache, adapter: Path) -> None:
    facts = cache.describe(adapter)
    write_adapter(adapter, {**CONFIG, "use_dora": True})
    (found,) = check_all(cache, [(adapter, facts, Against())])
    assert [finding.rule for finding in found] == ["dora"]
    write_adapter(adapter, CONFIG)
    assert check(cache, adapter) == []


def test_what_another_content_led_to_is_not_remembered_for_this_one(
    cache: DigestCache, adapter: Path, tmp_path: Path
) -> None:
    old = cache.describe(adapter)
    write_adapter(adapter, {**CONFIG, "use_dora": True})
    cache.describe(adapter)
    check_all(cache, [(adapter, old, Against())])
    assert check(cache, write_adapter(tmp_path / "old")) == []


def test_what_is_swapped_in_while_it_is_checked_is_not_remembered(
    cache: DigestCache, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = cache.describe(adapter)

    def swap_and_check(files: AdapterFiles, against: Against) -> list[Finding]:
        write_adapter(adapter, {**CONFIG, "use_dora": True})
        return check_files(files, against)

    monkeypatch.setattr(remembered, "check_files", swap_and_check)
    check_all(cache, [(adapter, facts, Against())])
    monkeypatch.undo()
    write_adapter(adapter, CONFIG)
    assert check(cache, adapter) == []


def test_an_adapter_that_went_away_since_it_was_described(cache: DigestCache, adapter: Path) -> None:
    facts = cache.describe(adapter)
    (adapter / "adapter_config.json").unlink()
    (found,) = check_all(cache, [(adapter, facts, Against())])
    assert [finding.rule for finding in found] == ["no-config"]


def test_a_check_while_the_clock_is_too_close_is_not_remembered(tmp_path: Path, adapter: Path) -> None:
    cache = DigestCache(tmp_path / "digests.sqlite3")
    check(cache, adapter)
    assert not is_known(cache, adapter, Against())


@pytest.mark.parametrize("value", [None, 7, b"\xff", "[]", '[["a", "b"]]'])
@pytest.mark.parametrize("column", ["question", "answer", "seal"])
def test_a_damaged_check_costs_only_time(
    cache: DigestCache, adapter: Path, tmp_path: Path, column: str, value: object
) -> None:
    write_adapter(adapter, {**CONFIG, "use_dora": True})
    right = check(cache, adapter)
    path = tmp_path / "cache" / "digests.sqlite3"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE copied AS SELECT * FROM answers")
        database.execute("DROP TABLE answers")
        database.execute("CREATE TABLE answers (rules, question, answer, seal, UNIQUE(rules, question))")
        database.execute("INSERT INTO answers SELECT * FROM copied")
        changed = database.execute(f"UPDATE answers SET {column} = ? WHERE rules = ?", (value, remembered._rules()))
        assert changed.rowcount == 1
    assert check(cache, adapter) == right


# --- databases in a bad way -------------------------------------------------------------------------------


def no_database(path: Path) -> None:
    path.write_bytes(b"this is no database, and longer than a header of one hundred bytes" * 10)


def truncated(path: Path) -> None:
    os.truncate(path, 5000)


def overwritten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100] + b"\xff" * 20_000)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def removed(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [no_database, truncated, overwritten, emptied, removed])
def test_a_damaged_database_is_replaced(
    cache: DigestCache, adapter: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    cache.describe(adapter)
    damage(tmp_path / "cache" / "digests.sqlite3")
    assert not is_hit(cache, adapter)
    assert is_hit(cache, adapter)


def test_damage_anywhere_never_gives_a_wrong_answer(cache: DigestCache, adapter: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache" / "digests.sqlite3"
    right = cache.describe(adapter)
    sound = path.read_bytes()
    for position in range(0, len(sound), 37):
        damaged = bytearray(sound)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        assert cache.describe(adapter) == right, position


def test_a_forged_digest_in_a_sound_database_is_not_believed(cache: DigestCache, adapter: Path, tmp_path: Path) -> None:
    right = cache.describe(adapter)
    with closing(sqlite3.connect(tmp_path / "cache" / "digests.sqlite3")) as database, database:
        changed = database.execute("UPDATE answers SET answer = replace(answer, ?, ?)", (right.digest[-8:], "0" * 8))
        assert changed.rowcount == 1
    assert cache.describe(adapter) == right


@pytest.mark.parametrize("value", [None, 7, b"\xff", "text"])
@pytest.mark.parametrize("column", ["question", "answer", "seal"])
def test_odd_values_are_not_believed(
    cache: DigestCache, adapter: Path, tmp_path: Path, column: str, value: object
) -> None:
    right = cache.describe(adapter)
    path = tmp_path / "cache" / "digests.sqlite3"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("ALTER TABLE answers RENAME TO sound")
        database.execute("CREATE TABLE answers (rules, question, answer, seal, UNIQUE(rules, question))")
        database.execute("INSERT INTO answers SELECT * FROM sound")
        database.execute(f"UPDATE answers SET {column} = ?", (value,))
    assert cache.describe(adapter) == right


def directory_in_its_place(path: Path) -> None:
    path.mkdir(parents=True)


def file_above(path: Path) -> None:
    path.parent.write_text("a file")


def other_table(path: Path) -> None:
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE answers (something)")


def locked(path: Path) -> None:
    path.parent.mkdir()
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("CREATE TABLE other (x)")
    database.execute("BEGIN EXCLUSIVE")
    _kept_open.append(database)


_kept_open: list[sqlite3.Connection] = []


@pytest.mark.parametrize("spoil", [directory_in_its_place, file_above, other_table, locked])
def test_a_database_that_cannot_be_used_is_done_without(
    cache: DigestCache, adapter: Path, tmp_path: Path, spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "BUSY_SECONDS", 0.01)
    spoil(tmp_path / "cache" / "digests.sqlite3")
    assert not is_hit(cache, adapter)
    assert not is_hit(cache, adapter)
    while _kept_open:
        _kept_open.pop().close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_directory(tmp_path: Path, adapter: Path) -> None:
    (tmp_path / "read-only").mkdir(mode=0o500)
    cache = DigestCache(tmp_path / "read-only" / "digests.sqlite3", clock=later)
    assert not is_hit(cache, adapter)
    assert not is_hit(cache, adapter)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_a_directory_nobody_may_write_to(adapter: Path) -> None:
    cache = DigestCache(Path("/proc/lora-pods/digests.sqlite3"), clock=later)
    assert not is_hit(cache, adapter)


def test_nobody_has_a_home(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert default_path() is None
    assert not is_hit(DigestCache(clock=later), adapter)


def test_the_default_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "lora-pods" / "digests.sqlite3"
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert default_path() == Path("/home/someone/.cache/lora-pods/digests.sqlite3")


def test_the_cache_is_private(cache: DigestCache, adapter: Path, tmp_path: Path) -> None:
    cache.describe(adapter)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


# --- two programs at once ---------------------------------------------------------------------------------


def describe_often(database: Path, expected: dict[str, str], rounds: int, spoil: bool) -> None:
    """Run in a process of its own: leaves with an exit status of 1 on any error or wrong answer."""
    for number in range(rounds):
        if spoil and number % 5 == 0 and database.exists():
            database.write_bytes(b"spoilt" * 100)
        answers = DigestCache(database, clock=later).describe_all([Path(path) for path in expected])
        digests = [answer.digest if isinstance(answer, BundleFacts) else answer for answer in answers]
        if digests != list(expected.values()):
            raise SystemExit(f"round {number}: {digests}")


@pytest.mark.parametrize("spoil", [False, True], ids=["sound", "spoilt again and again"])
def test_programs_at_once_never_fail_nor_mislead(tmp_path: Path, spoil: bool) -> None:
    directories = [write_adapter(tmp_path / str(number), {**CONFIG, "r": number + 1}) for number in range(8)]
    expected = {str(directory): plain_digest(directory) for directory in directories}
    context = multiprocessing.get_context("spawn")
    database = tmp_path / "cache" / "digests.sqlite3"
    processes = [
        context.Process(target=describe_often, args=(database, expected, 30, spoil and number == 0))
        for number in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
