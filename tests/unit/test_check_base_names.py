"""What is said of the base an adapter names: warnings only, and nobody's private path."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.check.base_names import base_findings

QWEN = "Qwen/Qwen2.5-7B-Instruct"


def rule(trained_on: object, base: str | None) -> str | None:
    found = list(base_findings(trained_on, base))
    assert all(each.severity == "warning" and each.subject == "base_model_name_or_path" for each in found)
    return found[0].rule if found else None


@pytest.mark.parametrize(
    ("trained_on", "base", "expected"),
    [
        (QWEN, QWEN, None),
        ("qwen/qwen2.5-7b-instruct/", QWEN, None),
        (QWEN, None, None),
        ("", QWEN, None),
        (" ", QWEN, None),
        (None, QWEN, None),
        (7, QWEN, None),
        ([QWEN], QWEN, None),
        # The same model under another roof.
        ("unsloth/Qwen2.5-7B-Instruct", QWEN, "other-owner"),
        ("unsloth/Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B", "other-owner"),
        ("/home/alice/ckpt/Qwen2.5-7B-Instruct", QWEN, None),
        ("/root/.cache/huggingface/hub/models--Qwen--Qwen2.5-7B-Instruct/snapshots/a09a354/", QWEN, None),
        ("C:\\Users\\alice\\Qwen2.5-7B-Instruct", QWEN, None),
        ("C:\\hub\\models--Qwen--Qwen2.5-7B", QWEN, "wrong-base"),
        ("/hub/models--Qwen/models--Qwen--Qwen2.5-7B-Instruct", QWEN, None),
        ("/hub/models--gpt2", QWEN, "local-base"),
        # Endless for an expression that tries every way to read it.
        ("models--a" * 100_000 + " ", QWEN, "wrong-base"),
        ("models--" + "-" * 900_000 + " ", QWEN, "wrong-base"),
        (QWEN, "/models/Qwen2.5-7B-Instruct", None),
        (QWEN, "/models/qwen25-7b-instruct-v2", None),
        ("/home/alice/base", "/models/smollm2", None),
        # Quantised siblings.
        ("unsloth/Qwen2.5-7B-Instruct-bnb-4bit", QWEN, "quantised-sibling"),
        ("unsloth/Qwen2.5-7B-Instruct-unsloth-bnb-4bit", QWEN, "quantised-sibling"),
        (QWEN, "Qwen/Qwen2.5-7B-Instruct-AWQ", "quantised-sibling"),
        (QWEN, "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "quantised-sibling"),
        (QWEN, "RedHatAI/Qwen2.5-7B-Instruct-FP8-dynamic", "quantised-sibling"),
        (QWEN, "neuralmagic/Qwen2.5-7B-Instruct-quantized.w4a16", "quantised-sibling"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "quantised-sibling"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "meta-llama/Llama-3.1-8B-Instruct", "quantised-sibling"),
        # Others.
        ("Qwen/Qwen2.5-7B", QWEN, "wrong-base"),
        ("Qwen/Qwen2.5-72B-Instruct", QWEN, "wrong-base"),
        ("unsloth/Qwen2.5-14B-Instruct-bnb-4bit", QWEN, "wrong-base"),
        ("meta-llama/Llama-3.1-8B-Instruct", QWEN, "wrong-base"),
        ("bert-base-uncased", QWEN, "wrong-base"),
        ("meta-llama/Llama-3.1-8B", "/models/smollm2", "wrong-base"),
        ("/home/alice/ckpt/base", QWEN, "local-base"),
        ("../base", QWEN, "local-base"),
        ("C:\\ckpt", QWEN, "local-base"),
    ],
)
def test_names(trained_on: object, base: str | None, expected: str | None) -> None:
    assert rule(trained_on, base) == expected


@pytest.mark.parametrize(
    ("trained_on", "words"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "by its name of another family than"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "by its name of another size than"),
        ("Qwen/Qwen2.5-7B", "is Qwen/Qwen2.5-7B, and not Qwen/Qwen2.5-7B-Instruct that is to serve it; make sure"),
    ],
)
def test_how_they_differ(trained_on: str, words: str) -> None:
    (finding,) = base_findings(trained_on, QWEN)
    assert words in finding.message


folders = st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=12, max_size=20)


@given(
    parts=st.lists(folders, min_size=2, max_size=4),
    root=st.sampled_from(["/", "~/", "./", "../", "C:\\", "\\\\server\\", "/home/alice/"]),
    base=st.sampled_from([QWEN, "/models/smollm2", "gpt2"]),
)
def test_a_path_is_never_shown(parts: list[str], root: str, base: str) -> None:
    separator = "\\" if "\\" in root else "/"
    for finding in base_findings(root + separator.join(parts), base):
        assert not any(part in finding.message for part in [*parts, "alice"])


@given(trained_on=st.text() | st.none() | st.integers(), base=st.text() | st.none())
def test_any_two_names_give_warnings_fit_to_be_shown(trained_on: object, base: str | None) -> None:
    rule(trained_on, base)
    assert all(str(finding).isprintable() for finding in base_findings(trained_on, base))
