"""The proxy: what stands before an engine that other machines reach.

vLLM listens on loopback then, at a port of its own, and nginx at the public one: a unit, its configuration and, where
it speaks TLS, a certificate, which come in the engine's document as `proxy` and are kept with its generations. Where
only they change (a renewed certificate), the engine is left alone.
"""

from __future__ import annotations

import os
import re
import time
from typing import Dict, Optional, Set

from . import files, programs, proof, secret_files, waiting
from .documents import Document, field, optional
from .names import proxy_name, unit_name
from .programs import Trial
from .said import Refusal
from .store import Store

PROXY_SECONDS = 20.0  # for a proxy to answer as it should, once its engine does


def proxy_unit_file(store: Store, engine: str) -> str:
    return os.path.join(store.units_dir, proxy_name(engine))


def ports_of(document: Document) -> Set[int]:
    proxy = document.get("proxy")
    return {document["port"], *([proxy["port"]] if proxy else [])}


def check_proxy(engine: str, document: Document) -> None:
    if optional(document, "proxy", dict) is None:
        return
    if field(document, "proxy.unit.name", str) != proxy_name(engine):
        raise Refusal("the proxy of engine %s must be named %s" % (engine, proxy_name(engine)))
    field(document, "proxy.unit.text", str)
    field(document, "proxy.config", str)
    field(document, "proxy.port", int)
    secure = optional(document, "proxy.certificate", str) is not None
    if not field(document, "proxy.url", str).startswith("https://" if secure else "http://"):
        raise Refusal("the document's proxy.url must begin with https:// where it has a certificate, else with http://")


def proxy_files(store: Store, engine: str, document: Document) -> Dict[str, Optional[bytes]]:
    """What the files of a document's proxy are to hold; None for those that are not to be."""
    proxy = document.get("proxy") or {}
    texts = {
        proxy_unit_file(store, engine): proxy["unit"]["text"] if proxy else None,
        store.path("proxies", engine + ".conf"): proxy.get("config"),
        store.path("proxies", engine + ".crt"): proxy.get("certificate"),
    }
    return {path: None if text is None else text.encode("utf-8") for path, text in texts.items()}


def proxy_stands(store: Store, engine: str, document: Document) -> bool:
    """Whether a document's proxy is there and runs; where it has none, whether there is none."""
    if any(files.read_file(path) != data for path, data in proxy_files(store, engine, document).items()):
        return False
    if not document.get("proxy"):
        return True
    unit = proxy_name(engine)
    return programs.unit_state(unit).active == "active" and programs.is_enabled(unit)


def start_proxy(store: Store, engine: str, document: Document) -> None:
    """Puts a document's proxy there and starts it, unless it stands already: connections to it outlive its engine."""
    if proxy_stands(store, engine, document):
        return
    unit = proxy_name(engine)
    for path, data in proxy_files(store, engine, document).items():
        if data is None:
            files.unlink(path)
        else:
            files.write_file(path, data)
    programs.enable(unit)
    programs.systemctl("reset-failed", unit)
    programs.systemctl_job("restart", unit)


def remove_proxy(store: Store, engine: str) -> None:
    paths = list(proxy_files(store, engine, {}))
    if not any(map(os.path.exists, paths)):
        return
    programs.systemctl_job("disable", "--now", proxy_name(engine))
    programs.systemctl("reset-failed", proxy_name(engine))
    for path in paths:
        files.unlink(path)
    files.remove_if_empty(store.path("proxies"))
    programs.systemctl("daemon-reload")


def renew_proxy(store: Store, engine: str, before: Document, document: Document) -> None:
    """Gives an engine that runs on the proxy of `document`, or back the one of `before`."""
    if proxy_stands(store, engine, document):
        return
    start_proxy(store, engine, document)
    fault = proxy_fault(store, engine, document)
    if fault:
        start_proxy(store, engine, before)
        again = proxy_fault(store, engine, before)
        now = (
            "the one from before does not come back either: %s" % again if again else "the one from before stands again"
        )
        raise Refusal("%s runs on as it is, but %s; %s" % (unit_name(engine), fault, now))


def proxy_fault(store: Store, engine: str, document: Document) -> str:
    """What is wrong with a document's proxy, once its engine answers; "" if nothing is or there is none."""
    if not document.get("proxy"):
        return ""
    unit, since = proxy_name(engine), time.time() - PROXY_SECONDS
    key = secret_files.read_secrets(store, engine).get("VLLM_API_KEY")
    if not key:
        return "a proxy lets in whoever comes, since there is no API key: set lora-pods:apiKey"
    began = time.monotonic()
    while True:
        fault = lets_in(document["proxy"], key)
        state = programs.unit_state(unit)
        if not fault and state.active == "active":
            return ""
        over = state.active in ("failed", "inactive") or state.sub == "auto-restart"
        if over or time.monotonic() > began + PROXY_SECONDS:
            last = programs.journal(unit, Trial(state, since, ""), 50)
            said = [line for line in last if re.search(r"\[emerg\]|Failed at step", line)] or last
            more = ": %s" % secret_files.redactor(store, engine)(said[-1])[:300] if said and over else ""
            if over and any("Failed at step EXEC" in line for line in said):
                more += " (nginx is gone: `apt-get install --reinstall nginx` on the pod, then run this again)"
            return "its proxy %s is %s: %s%s" % (unit, state, fault or "it ended", more)
        time.sleep(waiting.poll_of(time.monotonic() - began))


def lets_in(proxy: Document, key: str) -> str:
    """How a proxy differs from what it should be to who has the key, and to who has not; "" if it does not."""
    url, certificate = proxy["url"], proxy.get("certificate")
    # Of vLLM's own routes /version is one that needs no key and that every release has.
    for path, given, wanted in (("/v1/models", key, 200), ("/v1/models", None, 401), ("/version", key, 404)):
        status, _ = proof.request(url, path, given, None, 5, attended=False, certificate=certificate)
        if not status:
            return "nothing answers at %s%s" % (url, " with its certificate" if certificate else "")
        if status != wanted:
            whose = "with" if given else "without"
            return "%s%s answers %d %s the API key, and should %d" % (url, path, status, whose, wanted)
    return ""
