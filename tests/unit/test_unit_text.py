from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from components.core.errors import UserError
from components.core.unit_text import (
    MAX_LINE_BYTES,
    MAX_WORD_BYTES,
    check_line_length,
    environment_word,
    exec_program,
    exec_word,
    plain_text,
)
from tests.unit import unit_text_model as systemd

NONCHARACTERS = "\ufdd0\ufdef\ufffe\uffff\U0001fffe\U0010ffff"

# What a unit can carry: Unicode text without line breaks. The second part is dense in what systemd treats specially.
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n" + NONCHARACTERS)),
    st.lists(st.sampled_from(list("%$\"'\\;#:@-+!|{}= \t\r\x01\x1b\x7fnxuU0a7sé")), max_size=12).map("".join),
).filter(lambda text: not any(ord(char) & 0xFFFE == 0xFFFE or 0xFDD0 <= ord(char) <= 0xFDEF for char in text))


@given(st.lists(TEXT, max_size=5))
@example(["", ";", "#", "%n", "%%", "$HOME", "${HOME}", "$$", "a\\", "\\x41", "'\"", "--x=-1", " ", "\t", "\r"])
def test_every_argument_arrives_as_it_was(arguments: list[str]) -> None:
    line = "ExecStart=/bin/x \\\n    " + " \\\n    ".join([*map(exec_word, arguments), "end"])
    ((name, value),) = systemd.settings(line + "\n")
    assert (name, systemd.command(value)) == ("ExecStart", ["/bin/x", *arguments, "end"])


@given(TEXT.map(lambda text: "".join(char for char in text if char == "\t" or (char >= " " and char != "\x7f"))))
@example("$HOME ${HOME} $$ %n \\ ' \"")
def test_every_variable_arrives_as_it_was(value: str) -> None:
    ((name, text),) = systemd.settings(f"Environment={environment_word('A_1', value)}\n")
    assert (name, systemd.assignment(text)) == ("Environment", ("A_1", value))


@given(TEXT.filter(lambda text: not set(text) & set("$\\\"'\x7f") and all(char >= " " for char in text)))
@example("100% of it/bin/python;@")
def test_every_program_arrives_as_it_was(name: str) -> None:
    ((_, value),) = systemd.settings(f"ExecStart={exec_program('/' + name)}\n")
    assert systemd.command(value) == ["/" + name]


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("--port", "--port"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("", '""'),
        ("two words", '"two words"'),
        ('{"a":1}', "'{\"a\":1}'"),
        ("it's", '"it\'s"'),
        ("""it's "both\"""", '"it\'s \\"both\\""'),
        ("100%", '"100%%"'),
        ("$HOME", '"$$HOME"'),
        ("C:\\x", '"C:\\\\x"'),
        ("a\tb\r", '"a\\x09b\\x0d"'),
        (";", '";"'),
        ("ünï", '"ünï"'),
    ],
)
def test_words_are_quoted_only_as_needed(value: str, word: str) -> None:
    assert exec_word(value) == word


def test_dollars_stand_for_themselves_in_the_environment() -> None:
    assert environment_word("A", "50% of $x") == '"A=50%% of $x"'


@pytest.mark.parametrize("char", ["\n", "\0"])
def test_line_breaks_and_nul_are_refused(char: str) -> None:
    sentence = "holds a line break or a NUL, which a systemd unit cannot pass on"
    with pytest.raises(UserError, match=sentence):
        exec_word(f"a{char}b")
    with pytest.raises(UserError, match=sentence):
        environment_word("A", f"a{char}b")


@pytest.mark.parametrize("char", [*NONCHARACTERS, "\ud800"])
def test_what_is_no_character_is_refused(char: str) -> None:
    with pytest.raises(UserError, match="not a Unicode character, which systemd refuses"):
        exec_word(f"a{char}")


def test_a_faulty_value_is_not_shown_with_its_variable() -> None:
    with pytest.raises(UserError) as raised:
        environment_word("TOKEN", "canary\n")
    assert str(raised.value) == (
        "the environment variable TOKEN holds a line break or a NUL, which a systemd unit cannot pass on"
    )


def test_control_characters_are_refused_in_the_environment() -> None:
    assert environment_word("A", "a\tb") == '"A=a\\x09b"'
    with pytest.raises(UserError, match="the environment variable A has a control character"):
        environment_word("A", "a\x1bb")


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "Ä", "A\n"])
def test_names_of_variables_are_checked(name: str) -> None:
    with pytest.raises(UserError, match="is no name of an environment variable"):
        environment_word(name, "x")


def test_a_program_is_an_absolute_path() -> None:
    with pytest.raises(UserError, match=r"^the program 'python3' must be an absolute path on the pod$"):
        exec_program("python3")


@pytest.mark.parametrize("char", ["$", "\\", '"', "'", "\t", "\r", "\x7f"])
def test_a_program_that_systemd_cannot_run(char: str) -> None:
    with pytest.raises(UserError, match=r"has a quote, a backslash, a \$ or a control character in its path; systemd"):
        exec_program(f"/opt/{char}x")


def test_the_longest_word_and_line() -> None:
    longest = "é" * (MAX_WORD_BYTES // 2) + "a"
    assert exec_word(longest) == f'"{longest}"'
    assert environment_word("A", longest[1:]) == f'"A={longest[1:]}"'
    with pytest.raises(UserError, match=r"is longer than the 131071 bytes Linux passes in one argument$"):
        exec_word(longest + "a")
    with pytest.raises(UserError, match="the environment variable A is longer than the 131071 bytes"):
        environment_word("A", longest)
    check_line_length("é" * (MAX_LINE_BYTES // 2), "the line")
    with pytest.raises(
        UserError, match=r"^the line is 1048577 bytes long and systemd takes at most 1048576; serve fewer"
    ):
        check_line_length("é" * (MAX_LINE_BYTES // 2) + "a", "the line")


def test_shown_text_cannot_break_the_unit() -> None:
    assert plain_text("50%\nExecStart=/bin/evil \\") == "50%%/nExecStart=/bin/evil /"
