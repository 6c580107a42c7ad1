"""Whether an engine is ready and serves what is declared; if not, why."""

from __future__ import annotations

import contextlib
import json
import re
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from . import files, programs, secret_files, waiting
from .documents import Document, field, number
from .names import unit_name
from .programs import State, Trial
from .said import say
from .store import Store


def listens(url: str) -> bool:
    """Whether a program takes connections there; one that is too busy to answer does."""
    import socket
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 80), timeout=2).close()
    except socket.timeout:
        return True
    except OSError:
        return False
    return True


def get(url: str, path: str, key: Optional[str]) -> Tuple[int, bytes]:
    """GET without proxies or redirects. -> (status, body); (0, b"") where nothing answers."""
    return request(url, path, key, None, 5, attended=False)


def request(
    url: str,
    path: str,
    key: Optional[str],
    body: Optional[Document],
    seconds: float,
    attended: bool,
    certificate: Optional[str] = None,
) -> Tuple[int, bytes]:
    """GET, or POST of a JSON body, without proxies or redirects, in `seconds` at most.

    An `attended` one ends when nobody waits for it any more. With a `certificate` (PEM) it is HTTPS, and who shows
    another one is not asked. -> (status, body); (0, b"") where nothing answers.
    """
    import http.client
    import socket
    import threading
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    data = None if body is None else json.dumps(body).encode("utf-8")
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=seconds)
    if certificate is not None:
        connection = pinned_connection(parts.hostname or "", parts.port or 443, seconds)
    ended = threading.Event()

    def watch(sock: socket.socket) -> None:
        # A timeout of the socket's is for each read alone, and one byte now and then would never end.
        due = time.monotonic() + seconds
        while not ended.wait(min(waiting.POLL_SECONDS, seconds)):
            if time.monotonic() >= due or (attended and waiting.deserted()):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                return

    try:
        connection.connect()
        if certificate is not None and shown_certificate(connection) != der_of(certificate):
            return 0, b""
        threading.Thread(target=watch, args=(connection.sock,), daemon=True).start()
        connection.putrequest("GET" if data is None else "POST", parts.path.rstrip("/") + path)
        if key:
            connection.putheader("Authorization", b"Bearer " + key.encode("utf-8"))
        if data is not None:
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(len(data)))
        connection.endheaders(data)
        response = connection.getresponse()
        return response.status, response.read(64 * files.PIECE)
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        ended.set()
        connection.close()


def pinned_connection(host: str, port: int, seconds: float) -> Any:
    """HTTPS to a proxy of ours on this machine, which its certificate does not name: who it is, its bytes tell."""
    import http.client
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=seconds, context=context)


def shown_certificate(connection: Any) -> Optional[bytes]:
    shown: Optional[bytes] = connection.sock.getpeercert(True)
    return shown


def der_of(chain: str) -> bytes:
    """The first certificate of a chain."""
    import ssl

    end = "-----END CERTIFICATE-----"
    return ssl.PEM_cert_to_DER_cert(chain.partition(end)[0] + end)


def unready(document: Document, key: Optional[str]) -> str:
    """What keeps the engine from being ready, "" if it is."""
    url = field(document, "ready.url", str)
    status, _ = get(url, "/health", key)
    if status != 200:
        return "/health answers %d" % status if status else "nothing answers at %s" % url
    served, fault = served_models(url, key)
    return fault or other_models(field(document, "ready.models", dict), served)


def served_models(url: str, key: Optional[str]) -> Tuple[Mapping[str, Any], str]:
    """({id: root} as an engine lists its models, "") or ({}, why it does not)."""
    status, body = get(url, "/v1/models", key)
    if status == 0:
        return {}, "nothing answers at %s" % url
    if status == 401:
        return {}, "/v1/models refuses the API key in the secrets" if key else "/v1/models wants an API key"
    if status != 200:
        return {}, "/v1/models answers %d" % status
    try:
        return {str(model["id"]): model.get("root") for model in json.loads(body.decode("utf-8"))["data"]}, ""
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, "/v1/models answers something else than a list of models"


def other_models(models: Mapping[str, Any], served: Mapping[str, Any]) -> str:
    """How what is served differs from what is declared, "" if it does not."""
    absent, extra = sorted(set(models) - set(served)), sorted(set(served) - set(models))
    if absent:
        return "/v1/models does not list %s" % absent[0]
    if extra:
        return "/v1/models lists %s, which is not declared" % extra[0]
    for model, root in sorted(models.items()):
        if root is not None and served[model] != root:
            return "/v1/models lists %s from %s instead of %s" % (model, served[model], root)
    return ""


INTERRUPTED = "the run that wanted it was interrupted"


def why_over(state: State, trial: Trial, attended: bool) -> str:
    """Why nothing more is to be expected of a trial, "" while it goes on."""
    if state.sub == "auto-restart" or state.restarts > trial.state.restarts:
        return "the engine ended (%s) and would be started over and over" % (state.result or state.active)
    if state.active in ("failed", "inactive"):
        return "the engine ended (%s)" % (state.result or state.active)
    if state.invocation != trial.state.invocation:
        return "the unit was started again by somebody else"
    if attended and waiting.deserted():
        return INTERRUPTED
    return ""


def await_ready(
    store: Store, engine: str, document: Document, trial: Trial, attended: bool = False, loaded: bool = False
) -> str:
    """Waits until the engine is ready. -> "", or why it is not and will not be.

    One that was proven before (`loaded`) and answers now lists what it will go on listing: that is not waited for. An
    `attended` trial is over when nobody waits for it any more: Pulumi forgets an activation that it did not see
    the end of, so what served before has to be what serves after.
    """
    unit, redact = unit_name(engine), secret_files.redactor(store, engine)
    key = secret_files.read_secrets(store, engine).get("VLLM_API_KEY")
    limit = number(document, "ready.timeoutSeconds")
    began = time.monotonic()
    due = began + waiting.SAY_SECONDS
    if trial.complaint:
        # Type=exec: a program that cannot be started fails its job, and that text only says where to look.
        ended = trial.complaint.startswith("Job for ")
        return "its program could not be started" if ended else trial.complaint.splitlines()[0]
    while True:
        fault = unready(document, key)
        # After the answer: another program's answer on this port is no proof of this unit.
        state = programs.unit_state(unit)
        over = why_over(state, trial, attended)
        if over:
            return over
        if not fault and state.active == "active":
            return ""
        if loaded and fault.startswith(("/v1/models does not list", "/v1/models lists")):
            return fault
        now = time.monotonic()
        if now > began + limit:
            return "after %d seconds it was still not ready: %s" % (limit, fault or "the unit is %s" % (state,))
        if now > due:
            last = redact((programs.journal(unit, trial, 1) or ["nothing in its journal yet"])[-1])
            # A terminal shows the beginning: who logs, when and where in vLLM's sources would be all of it.
            last = re.sub(r"^(\([^()]*\) )?[A-Z]+ \d\d-\d\d [\d:]+ (\[[^][]*\] )?", "", last)[:160]
            waited = "%d of %d s, %s, %s" % (now - began, limit, state, redact(fault)[:120])
            say("%s (waiting for %s: %s)" % (last, unit, waited))
            due = now + waiting.pause_of(now - began)
        time.sleep(waiting.poll_of(now - began))


ERROR_LINE = re.compile(r"\b(ERROR|CRITICAL|FATAL|error:|\w*(Error|Exception)\b: |out of memory|Failed|status=)")
# vLLM's lines: "(EngineCore pid=123) ERROR 11-30 02:50:41 [core.py:1044] ValueError: ...", or without the middle.
PROCESS = re.compile(r"^(\([^()]*\) ?)+")
LOGGED = re.compile(r"^[A-Z]+ [\d-]+ [\d:.]+ \[[^\]]*\] ")
HARMLESS = re.compile(r"^(DEBUG|INFO|WARNING)\b")
CAUSE = re.compile(r"^[\w.]*(Error|Exception): .+|^[^:]*: error: .+|\bFailed (to locate executable|at step) .+")
WRAPPER = re.compile(r": (Engine ?[Cc]ore |WorkerProc initialization failed)")  # says that another process failed


def settled_journal(unit: str, trial: Trial) -> List[str]:
    """The journal once it stopped growing: journald may lag behind the unit's end."""
    programs.run("journalctl", "--sync", seconds=10)
    lines: List[str] = []
    same = 0
    for _ in range(10):
        again = programs.journal(unit, trial, 2000)
        same = same + 1 if again == lines and lines else 0
        if same == 2:
            break
        lines = again
        time.sleep(waiting.POLL_SECONDS)
    return lines


def without_usage(lines: Sequence[str]) -> List[str]:
    """Leaves out what argparse prints before it says what is wrong: all options of vLLM, hundreds of lines."""
    kept = []
    usage = False
    for line in lines:
        bare = PROCESS.sub("", line)
        usage = bare.startswith("usage: ") or (usage and bare.startswith(" "))
        if not usage:
            kept.append(line)
    return kept


def explain(store: Store, engine: str, trial: Trial) -> Tuple[str, List[str]]:
    """(the cause the journal names or "", the lines that tell why a trial failed)."""
    redact = secret_files.redactor(store, engine)
    lines = [redact(line)[:300] for line in without_usage(settled_journal(unit_name(engine), trial))]
    seen: Dict[str, str] = {}
    causes: List[str] = []
    wrappers: List[str] = []
    for line in lines:
        bare = PROCESS.sub("", line)
        if HARMLESS.match(bare):
            continue  # vLLM quotes errors that might come in warnings, at every start
        if ERROR_LINE.search(line):
            seen.setdefault(re.sub(r"^.*?\] |\d+", "", line), line)
        cause = CAUSE.search(LOGGED.sub("", bare))
        if cause:
            (wrappers if WRAPPER.search(cause.group(0)) else causes).append(cause.group(0))
    details = ["errors in its journal:", *("  " + line for line in list(seen.values())[:12])] if seen else []
    details += ["last lines of its journal:", *("  " + line for line in lines[-15:])] if lines else []
    return (causes or wrappers or [""])[-1], details
