r"""Words of a systemd unit file, quoted so that systemd hands on exactly the string that was planned.

The rules are those of systemd.service(5) "COMMAND LINES", systemd.syntax(7) "QUOTING" and systemd.unit(5) "SPECIFIERS":
words are split at white space; quotes of both kinds group, and C escapes work inside either; `%` starts a
specifier everywhere; `$` starts a variable in command lines only. Where the manual is silent the source
of systemd 252 was asked (`src/basic/utf8.c`, `src/basic/env-util.c`, `src/basic/fileio.c`).
"""

from __future__ import annotations

import re

from components.core.errors import UserError, printable

MAX_LINE_BYTES = 1024 * 1024
"""`LONG_LINE_MAX` of systemd, for one logical line with its continuations joined: beyond it the unit is refused."""

MAX_WORD_BYTES = 128 * 1024 - 1
"""`MAX_ARG_STRLEN` of Linux less the closing NUL: execve(2) refuses a longer argument or NAME=value."""

_PLAIN = re.compile(r"[A-Za-z0-9_./:=,+@-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def exec_word(value: str) -> str:
    """Return `value` as one word of `ExecStart=`, not its first.

    Raises UserError where no quoting helps: NUL, newline, characters that are not Unicode text, more than 128 KiB.
    """
    _check(value, f"the argument {printable(value, 60)!r}")
    return _quoted(value.replace("%", "%%").replace("$", "$$"))


def exec_program(path: str) -> str:
    """Return an absolute path as the first word of `ExecStart=`, where fewer characters are allowed than in the others.

    Raises UserError for a relative path, for quotes, backslashes and control characters (`string_is_safe` in
    src/basic/string-util.c refuses the unit), for `$` (`$$` is not `$` there), and for what `exec_word` refuses.
    """
    what = f"the program {printable(path, 60)!r}"
    _check(path, what)
    if not path.startswith("/"):
        raise UserError(f"{what} must be an absolute path on the pod")
    if _CONTROL.search(path) or set(path) & set("\\\"'$"):
        raise UserError(
            f"{what} has a quote, a backslash, a $ or a control character in its path; systemd cannot run it"
        )
    return _quoted(path.replace("%", "%%"))


def environment_word(name: str, value: str) -> str:
    """Return `NAME=value` as one word of `Environment=`.

    Raises UserError for a name that is not `[A-Za-z_][A-Za-z0-9_]*`, for control characters other than tab (before 248
    systemd drops such an assignment with no more than a warning), and for what `exec_word` refuses.
    """
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{printable(name, 60)!r} is no name of an environment variable: letters, digits and _ only, no digit first"
        )
    what = f"the environment variable {name}"
    _check(f"{name}={value}", what)
    if _CONTROL.search(value.replace("\t", "")):
        raise UserError(f"{what} has a control character in its value, which not every systemd passes on")
    return _quoted(f"{name}={value}".replace("%", "%%"))


def plain_text(value: str) -> str:
    """Return `value` for a setting that is only shown (`Description=`); what cannot be shown is replaced."""
    return printable(value).replace("\\", "/").replace("%", "%%")


def check_line_length(logical_line: str, what: str) -> None:
    """Raise UserError, beginning with `what`, if systemd could refuse the line, given with its continuations."""
    size = len(logical_line.encode())
    if size > MAX_LINE_BYTES:
        raise UserError(
            f"{what} is {size} bytes long and systemd takes at most {MAX_LINE_BYTES}; "
            "serve fewer models from this pod (a second pod for the rest)"
        )


def _check(value: str, what: str) -> None:
    if "\n" in value or "\0" in value:
        raise UserError(f"{what} holds a line break or a NUL, which a systemd unit cannot pass on")
    if any(_is_no_text(ord(char)) for char in value):
        raise UserError(f"{what} holds a code point that is not a Unicode character, which systemd refuses")
    if len(value.encode()) > MAX_WORD_BYTES:
        raise UserError(f"{what} is longer than the {MAX_WORD_BYTES} bytes Linux passes in one argument")


def _is_no_text(code: int) -> bool:
    """Surrogates and non-characters: `unichar_is_valid` in src/basic/utf8.c drops the line that holds one."""
    return 0xD800 <= code <= 0xDFFF or 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE


def _quoted(text: str) -> str:
    if _PLAIN.fullmatch(text):
        return text
    text = text.replace("\\", "\\\\")
    text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
    if '"' in text and "'" not in text:
        return f"'{text}'"
    return '"' + text.replace('"', '\\"') + '"'
