"""Which version's rules an adapter is checked by, and what is said of versions nobody here has read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.core.vllm_loader import NEWEST, OLDEST, loader_rules, version_warning


@pytest.mark.parametrize("version", [None, OLDEST, NEWEST, "0.32.0", "0.10.1.1", "0.8.5.post1", "0.33.0rc1"])
def test_known_versions_are_not_warned_of(version: str | None) -> None:
    assert version_warning(version) is None


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.33.1", "vLLM 0.33.1 is newer than 0.33.0"),
        ("1.0.0", "vLLM 1.0.0 is newer than 0.33.0"),
        ("0.6.4", "vLLM 0.6.4 is older than 0.6.5"),
        ("nightly\n", r"nightly\n is no release of vLLM"),
    ],
)
def test_other_versions_are_warned_of(version: str, words: str) -> None:
    warning = version_warning(version)
    assert warning is not None
    assert warning.startswith(words)


def test_an_unknown_version_has_the_nearest_rules() -> None:
    assert loader_rules(None).version == NEWEST
    newest = loader_rules("9.0")
    assert (newest.legal_ranks, newest.refuses_variants) == ((1, 8, 16, 32, 64, 128, 256, 320, 512), True)
    assert loader_rules("nightly") == loader_rules(None)


# The first release with each rule, and the last without, as the source distributions have them.
@pytest.mark.parametrize(
    ("field", "before", "since"),
    [
        ("reads_rslora", "0.6.5", "0.6.6"),
        ("takes_fused_experts", "0.11.0", "0.11.1"),
        ("skips_base_embeddings", "0.11.2", "0.12.0"),
        ("drains", "0.17.1", "0.18.0"),
        ("limits_target_modules", "0.18.1", "0.19.0"),
        ("full_modules", "0.30.0", "0.31.0"),
        ("reads_patterns", "0.31.0", "0.32.0"),
        ("refuses_variants", "0.31.0", "0.32.0"),
    ],
)
def test_when_a_rule_came(field: str, before: str, since: str) -> None:
    assert not getattr(loader_rules(before), field)
    assert getattr(loader_rules(since), field)


@pytest.mark.parametrize(
    ("version", "ranks"),
    [
        ("0.7.3", (8, 16, 32, 64, 128, 256)),
        ("0.8.0", (8, 16, 32, 64, 128, 256, 320, 512)),
        ("0.11.1", (1, 8, 16, 32, 64, 128, 256, 320, 512)),
    ],
)
def test_legal_ranks(version: str, ranks: tuple[int, ...]) -> None:
    assert loader_rules(version).legal_ranks == ranks


@given(version=st.text())
def test_any_text_has_rules(version: str) -> None:
    assert loader_rules(version).version.isprintable()
    assert (version_warning(version) or "").isprintable()
