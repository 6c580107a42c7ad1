"""The tables that ./dev bench prints: medians, ratios and verdicts, and what is read out of other programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import digests, slow_link
from bench.__main__ import PROGRAMS, main
from bench.digests import of_openssl
from bench.peers.peer import without_our_places
from bench.preview_many import growth
from bench.support.bare import kinds_of
from bench.support.machine import version_of
from bench.support.options import Options
from bench.support.processes import high_water, sum_of_reads
from bench.support.table import Figure, Goal, Row, Table, shown
from bench.updates import CHANGED, FIRST, SAME, rows


def test_a_table_says_what_is_compared_and_what_came_of_it() -> None:
    table = Table("Copies", "This against that.", versions={"scp": "9.2"})
    ours, theirs = Figure([2.0, 1.0, 9.0], "s"), Figure([4.0, 5.0, 4.5], "s")
    table.add(
        Row("all of it", ours, "scp", theirs, Goal(at_most=0.4)),
        Row("the same", ours, "scp", theirs, Goal(at_least=0.5)),
        Row("memory", Figure([123.4], "MB"), goal=Goal(at_most=400, of="alone")),
        Row("ready", ours, "by hand", Figure([1.0], "s"), Goal(at_most=0.5, of="more")),
        Row("reported", ours, "scp", theirs),
    )
    assert table.markdown("two cores", "./dev bench copies") == (
        "## Copies\n"
        "\n"
        "This against that.\n"
        "\n"
        "| what | here | against | there | here ÷ there | to reach |  |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| all of it | 2.00 s (1.00–9.00) | scp | 4.50 s (4.00–5.00) | 0.44 | ≤ 0.4 | NOT reached |\n"
        "| the same | 2.00 s (1.00–9.00) | scp | 4.50 s (4.00–5.00) | 0.44 | ≥ 0.5 | NOT reached |\n"
        "| memory | 123 MB |  |  |  | ≤ 400 MB | reached |\n"
        "| ready | 2.00 s (1.00–9.00) | by hand | 1.00 s | 2.00 | ≤ +0.5 s | NOT reached |\n"
        "| reported | 2.00 s (1.00–9.00) | scp | 4.50 s (4.00–5.00) | 0.44 |  |  |\n"
        "\n"
        "two cores, scp 9.2. `./dev bench copies`. Medians (least–most).\n"
    )


@pytest.mark.parametrize(
    ("goal", "here", "there", "reached"),
    [
        (Goal(at_most=1.15), 1.15, 1.0, True),
        (Goal(at_most=1.15), 1.16, 1.0, False),
        (Goal(at_least=0.7), 70, 100, True),
        (Goal(at_least=0.7), 69, 100, False),
        (Goal(at_most=5, of="more"), 65, 60, True),
        (Goal(at_most=5, of="more"), 66, 60, False),
        (Goal(at_most=0, of="alone"), 0, None, True),
        (Goal(at_most=0, of="alone"), 1, None, False),
    ],
)
def test_a_goal_is_reached_at_its_bound(goal: Goal, here: float, there: float | None, reached: bool) -> None:
    other = None if there is None else Figure([there], "s")
    assert Row("x", Figure([here], "s"), "y", other, goal).reached is reached


def test_the_median_of_the_engines_start_is_taken_off() -> None:
    assert (Figure([10, 12, 11], "s") - Figure([1, 9, 2], "s")).values == [8, 10, 9]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.468, "0.47"), (8.8, "8.80"), (46.62, "46.6"), (1592.4, "1,592")]
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert shown(value) == text


def test_what_is_read_out_of_openssl() -> None:
    said = "The 'numbers' are in 1000s of bytes per second processed.\ntype  1048576 bytes\nsha256        1699081.48k\n"
    assert of_openssl(said) == pytest.approx(1699.08148)


def test_the_growth_is_milliseconds_for_each_adapter_more() -> None:
    seconds = {10: Figure([3.0], "s"), 100: Figure([4.8], "s")}
    assert growth(seconds, 10, 100).median == pytest.approx(20)


def test_reads_and_mappings_of_a_file_are_summed() -> None:
    trace = (
        '12 read(3</a/weights>, ""..., 4096) = 4096\n'
        '12 pread64(3</a/weights>, ""..., 100, 8) = 100\n'
        '12 read(3</a/weights>, "", 4096) = 0\n'
        "12 read(3</a/weights>, 0x1, 4096) = -1 EAGAIN (Resource temporarily unavailable)\n"
        "13 mmap(NULL, 5000, PROT_READ, MAP_SHARED, 3</a/weights>, 0) = 0x7f\n"
        '13 read(4</b/weights>, ""..., 4096) = 7\n'
    )
    assert sum_of_reads(trace, ["/a/weights", "/b/weights", "/c"]) == {"/a/weights": 9196, "/b/weights": 7, "/c": 0}


def test_the_peak_of_a_process_is_in_its_status() -> None:
    assert high_water("VmPeak:\t 9000 kB\nVmHWM:\t  84 kB\n") == 84 * 1024
    assert high_water("State:\tZ (zombie)\n") == 0


def test_the_bare_program_has_as_many_resources_of_each_kind() -> None:
    types = (
        *("pulumi:pulumi:Stack", "pulumi:providers:command", "lora-pods:index:Deployment"),
        *("pulumi-python:dynamic/lora-pods:AdapterBundle", "pulumi-python:dynamic/lora-pods:ReachedPod"),
        "command:remote:Command",
    )
    state = {"deployment": {"resources": [{"type": kind} for kind in types]}}
    assert kinds_of(state) == {"component": 1, "dynamic": 2, "command": 1}


def test_what_an_update_is_compared_with() -> None:
    stories = {FIRST: [30.0], SAME: [5.0], CHANGED: [8.0]}
    theirs = dict.fromkeys(["ansible copy", "rsync script", "rsync -c script"], stories)
    made = rows({**stories, "engine": [2.0], "floor": [4.0]}, theirs, {"scp": [14.0], "scp, AES-GCM": [13.0]}, 1400)
    assert [row.cells()[1:] for row in made if row.goal] == [
        ("50.0 MB/s", "scp", "100 MB/s", "0.50", "≥ 0.7", "NOT reached"),
        ("28.0 s", "ansible copy", "30.0 s", "0.93", "≤ 1", "reached"),
        ("5.00 s", "ansible copy", "5.00 s", "1.00", "≤ 1", "reached"),
        ("6.00 s", "ansible copy", "8.00 s", "0.75", "≤ 1", "reached"),
        ("6.00 s", "rsync -c script", "8.00 s", "0.75", "≤ 1.3", "reached"),
    ]


def test_the_peers_unit_is_ours_with_other_places() -> None:
    hexdigest = "ab" * 32
    ours = (
        f"AssertPathExists=/var/lib/lora-pods/blobs/sha256/{hexdigest}\n"
        "EnvironmentFile=/var/lib/lora-pods/secrets/x.env\n"
        f"ExecStart=python --lora-modules {{/var/lib/lora-pods/blobs/sha256/{hexdigest}}}\n"
    )
    assert without_our_places(ours, {"acme-v1": f"sha256:{hexdigest}"}) == (
        "AssertPathExists=/srv/adapters/acme-v1\nExecStart=python --lora-modules {/srv/adapters/acme-v1}\n"
    )


def test_every_program_says_which_images_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--images"]) == 0
    assert capsys.readouterr().out == "sandbox standin\n"
    assert main(["--images", "digests", "lora_check"]) == 0
    assert capsys.readouterr().out == "\n"


def test_a_program_that_fails_loses_no_other_ones_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(_: Options) -> Table:
        raise RuntimeError("the link was cut, and `up` did not notice")

    monkeypatch.setattr(slow_link, "run", fails)
    monkeypatch.setattr(digests, "run", lambda _: Table("Digests", "How fast."))
    assert main(["slow_link", "digests", "--output", str(tmp_path / "tables.md")]) == 1
    out, err = capsys.readouterr()
    assert "## Digests\n" in out
    assert "slow_link: failed: RuntimeError: the link was cut, and `up` did not notice\n" in err
    assert "## Digests\n" in (tmp_path / "tables.md").read_text()


def test_a_program_that_is_missing_has_no_version() -> None:
    assert version_of(["lora-pods-no-such-program", "--version"]) == "missing"


def test_an_unknown_program_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["previews"])
    assert ended.value.code == 2
    assert f"no program named previews; there are {', '.join(PROGRAMS)}" in capsys.readouterr().err
