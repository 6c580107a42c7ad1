r"""How systemd reads the words of a unit file, written from the manual only, to test our quoting against.

systemd.syntax(7): lines ending in a backslash are joined (the backslash read as a space), comment lines in between are
dropped; quotes of both kinds; the escapes of its table. systemd.unit(5): `%%` is a percent sign. systemd.service(5)
"COMMAND LINES": `$$` is a dollar sign, `$NAME` and `${NAME}` are variables.
`tests/engine/test_unit_on_systemd.py` asks the real one.
"""

from __future__ import annotations

import re

_ESCAPES = {
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\\": "\\",
    '"': '"',
    "'": "'",
    "s": " ",
}
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|([0-3][0-7]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})")


def settings(unit: str) -> list[tuple[str, str]]:
    """Every `Name=value` of the unit in order, continuation lines joined."""
    found = []
    logical = ""
    for line in re.split(r"[\n\r\0]", unit):
        if line.lstrip().startswith(("#", ";")):
            continue
        if line.endswith("\\"):
            logical += line[:-1] + " "
            continue
        logical += line
        if "=" in logical:
            name, value = logical.split("=", 1)
            found.append((name.strip(), value.strip()))
        logical = ""
    return found


def command(value: str) -> list[str]:
    """The argv of one `ExecStart=` value."""
    program, *arguments = [_specifiers(word) for word in words(value)]
    return [program, *map(_dollars, arguments)]


def assignment(value: str) -> tuple[str, str]:
    """The name and value of an `Environment=` setting that holds exactly one."""
    (word,) = words(value)
    name, text = _specifiers(word).split("=", 1)
    return name, text


def words(value: str) -> list[str]:
    found = []
    word: str | None = None
    quote = ""
    at = 0
    while at < len(value):
        char = value[at]
        at += 1
        if char == "\\":
            text, length = _escape(value[at:])
            word = (word or "") + text
            at += length
        elif quote:
            if char == quote:
                quote = ""
            else:
                word = (word or "") + char
        elif char in "\"'":
            quote = char
            word = word or ""
        elif char in " \t":
            if word is not None:
                found.append(word)
            word = None
        elif char == ";" and word is None and value[at : at + 1] in ("", " ", "\t"):
            raise AssertionError("a bare semicolon starts another command")
        else:
            word = (word or "") + char
    assert not quote, "unbalanced quotes"
    return found if word is None else [*found, word]


def _escape(rest: str) -> tuple[str, int]:
    if rest[:1] in _ESCAPES:
        return _ESCAPES[rest[0]], 1
    match = _CODE.match(rest)
    assert match, f"no escape of systemd's: \\{rest[:4]}"
    hexadecimal, octal, *wide = match.groups()
    code = int(octal, 8) if octal else int(hexadecimal or wide[0] or wide[1], 16)
    assert code, "NUL cannot be escaped"
    return chr(code), match.end()


def _specifiers(word: str) -> str:
    assert "%" not in word.replace("%%", ""), f"a specifier in {word!r}"
    return word.replace("%%", "%")


def _dollars(word: str) -> str:
    assert "$" not in word.replace("$$", ""), f"a variable in {word!r}"
    return word.replace("$$", "$")
