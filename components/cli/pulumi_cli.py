"""Asking the pulumi program, for the commands that need what only it knows."""

from __future__ import annotations

import os
import subprocess

from components.core.errors import UserError, os_reason, printable


def ask_pulumi(*words: str, to_ask_for: str) -> str:
    """What a call prints. pulumi finds the project as we do: at or above the working directory."""
    try:
        done = subprocess.run(
            ["pulumi", *words, "--non-interactive"],
            env={**os.environ, "PULUMI_SKIP_UPDATE_CHECK": "true"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        raise UserError(f"there is no pulumi on PATH to ask for {to_ask_for}") from None
    except OSError as error:
        raise UserError(f"pulumi cannot be run ({os_reason(error)})") from None
    if done.returncode != 0:
        said = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.strip()]
        raise UserError(
            f"`pulumi {' '.join(words[:2])}` failed ({printable(said[0]) if said else 'it does not say why'})"
        )
    return done.stdout
