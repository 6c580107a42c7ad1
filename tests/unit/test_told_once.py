"""What holds for many models is one line."""

from components.core.check.told_once import Checked, told_once
from components.core.findings import Finding
from components.core.listing import listed, shared_place


def dora(directory: str) -> Finding:
    return Finding(f"{directory}/adapter_config.json", "error", "dora", "use_dora", "is true; train without it.")


def test_lists_stay_short() -> None:
    assert listed(["a"]) == "a"
    assert listed(list("abcde")) == "a, b, c, d, e"
    assert listed(range(100)) == "0, 1, 2, 3, 4 and 95 more"
    assert shared_place([f"models[{n}]" for n in (10, 2, 1)]) == "models[1, 2, 10]"
    assert shared_place([]) == ""


def test_one_finding_names_its_file_and_no_folder_of_this_machine() -> None:
    checked = [Checked("acme-v1", "models[2]", [dora("/a/v1")])]
    assert told_once(checked, "error") == [
        "models[2].adapter: acme-v1: adapter_config.json: use_dora: is true; train without it."
    ]
    assert told_once(checked, "warning") == []


def test_a_hundred_of_a_kind_are_one_line_and_other_things_others() -> None:
    checked = [Checked(f"acme-v{n}", f"models[{n}]", [dora(f"/a/v{n}")]) for n in range(100)]
    other = Finding("/a/v7", "error", "gone", "", "cannot be read.")
    checked[7] = Checked("acme-v7", "models[7]", [other, *checked[7].findings])
    assert told_once(reversed(checked), "error") == [
        "models[0, 1, 2, 3, 4 and 95 more].adapter: acme-v0, acme-v1, acme-v2, acme-v3, acme-v4 and 95 more: "
        "adapter_config.json: use_dora: is true; train without it.",
        "models[7].adapter: acme-v7: /a/v7: cannot be read.",
    ]


def test_the_same_of_two_directories_is_one_line() -> None:
    checked = [
        Checked(m, f"models[{n}]", [Finding(f"/a/{m}", "warning", "x", "", "is odd.")]) for n, m in enumerate("ab")
    ]
    assert told_once(checked, "warning") == ["models[0, 1].adapter: a, b: is odd."]
