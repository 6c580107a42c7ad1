"""``python -m bootstrap.demo up|down|prepare``; `./dev demo` and `./dev down` call it with pulumi on PATH."""

import argparse
import subprocess
import sys
import urllib.error
from collections.abc import Callable

from bootstrap.demo.prepare import prepare
from bootstrap.demo.up import down, up

VERBS: dict[str, Callable[[str], None]] = {"up": up, "down": down, "prepare": lambda _stack: prepare()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bootstrap.demo")
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("--stack", default="sandbox", help="the stack file to use (%(default)s)")
    options = parser.parse_args()
    try:
        VERBS[options.verb](options.stack)
    except subprocess.CalledProcessError as error:
        # It has said what was wrong itself.
        print(f"demo: `{error.cmd[0]}` failed, so the demo stops here", file=sys.stderr)
        return 1
    except urllib.error.URLError as error:
        print(f"demo: the engine did not answer: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
