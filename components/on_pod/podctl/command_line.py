"""The verbs, and the command line that they are called by."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, BinaryIO, Callable, Dict, Mapping, Optional, Sequence

from . import activation, blobs, drift, fetching, files, leaving, preparing, receiving, rollback, secret_files, status
from .documents import Document, read_document
from .names import POD_ROOT, UNITS_DIR
from .said import Refusal, clean, say
from .store import Store

DOCUMENT_VERBS: Dict[str, Callable[[Store, Document], Document]] = {
    "missing": receiving.verb_missing,
    "fetch": fetching.verb_fetch,
    "place": blobs.verb_place,
    "secrets": secret_files.verb_secrets,
    "prepare": preparing.verb_prepare,
    "activate": activation.verb_activate,
}
OPTION_VERBS: Dict[str, Callable[[Store, Any], Document]] = {
    "receive-all": receiving.verb_receive_all,
    "unplace": blobs.verb_unplace,
    "gc": blobs.verb_gc,
    "unsecret": leaving.verb_unsecret,
    "deactivate": leaving.verb_deactivate,
    "intact": drift.verb_intact,
    "rollback": rollback.verb_rollback,
    "status": status.verb_status,
    "remove": leaving.verb_remove,
    "leave": leaving.verb_leave,
    "verify": blobs.verb_verify,
}


def parse(argv: Sequence[str]) -> Any:
    import argparse

    parser = argparse.ArgumentParser(prog="podctl")
    parser.add_argument("--root", default=POD_ROOT)
    parser.add_argument("--units-dir", default=UNITS_DIR)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, function in [*DOCUMENT_VERBS.items(), *OPTION_VERBS.items()]:
        sub = verbs.add_parser(verb, help=(function.__doc__ or "").partition("\n")[0])
        if verb == "unplace":
            sub.add_argument("--stack", required=True)
            sub.add_argument("--base", required=True)
        if verb in ("unsecret", "deactivate", "intact", "rollback", "leave"):
            sub.add_argument("--engine", required=True)
    return parser.parse_args(argv)


def place_of(error: Exception) -> str:
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    return "%s in %s, line %s of podctl" % (type(error).__name__, frame.name, frame.lineno)


def whose(given: Mapping[str, Any]) -> str:
    """For which stack or engine this runs, and from where: for those who have to wait for it."""
    named = [(kind, given[kind]) for kind in ("stack", "engine") if isinstance(given.get(kind), str)]
    words = " of %s %s" % (named[0][0], clean(named[0][1])[:120]) if named else ""
    came_from, user = os.environ.get("SSH_CONNECTION", "").split(), os.environ.get("SUDO_USER")
    if came_from:
        return "%s from %s" % (words, clean(came_from[0])[:60])
    return "%s by %s" % (words, clean(user)[:60]) if user else words  # sudo takes away the other


def main(argv: Sequence[str], stdin: BinaryIO, document: Optional[Document] = None) -> int:
    options = parse(argv)
    options.stdin = stdin
    os.umask(0o022)
    try:
        store = Store(options.root, options.units_dir)
        if options.verb in OPTION_VERBS:
            store.whose = whose(vars(options))
            result = OPTION_VERBS[options.verb](store, options)
        else:
            document = read_document(stdin) if document is None else document
            store.whose = whose(document)
            result = DOCUMENT_VERBS[options.verb](store, document)
    except Refusal as refusal:
        for line in (str(refusal), *refusal.details):
            say(line, limit=4000)
        return 1
    except OSError as error:
        what = "podctl %s failed: %s: %s" % (options.verb, error.filename or "this pod", error.strerror or error)
        say(files.of_the_disk(store.root, error) or what)
        return 1
    except Exception as error:
        # The message of an error nobody foresaw may hold a secret; where it happened does not.
        say("podctl %s failed in a way nobody foresaw: %s" % (options.verb, place_of(error)))
        return 1
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(result, sort_keys=True), flush=True)
    return 0
