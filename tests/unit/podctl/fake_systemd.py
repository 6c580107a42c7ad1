"""systemd, journald and vLLM in this process: podctl's `run` is pointed here, its HTTP requests are real.

A unit's text says in one line of JSON after `# fake:` what its engine does when it is started:

    serve    {id: root}: answers on `port`, `polls` looks at the unit after its start; `key` is the API key it wants,
             `health` another status for /health, `other` for what there is not, `body` another answer of /v1/models
    answers  {id: how it completes}: a number by which its logprobs are off, several to be used in turn, a list of an
             HTTP status and a body, "dies" to end the engine soon after, "hangs"; an id that is not there is unknown
    crash    its last journal lines: it ends and systemd is about to start it again
    die      its last journal lines: it fails for good
    refuse   systemctl's complaint: it is not started at all
    hang     it runs and never answers
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from components.on_pod.podctl.programs import Ran

PYTHON = "/opt/fake/bin/python"


@dataclass
class FakeUnit:
    enabled: bool = False
    active: str = "inactive"
    sub: str = "dead"
    result: str = "success"
    restarts: int = 0
    invocation: str = ""
    starts: int = 0
    behaviour: dict[str, Any] = field(default_factory=dict)
    server: Server | None = None
    looks: int = 0


class FakeSystemd:
    def __init__(self, units: Path) -> None:
        self.directory = units
        self.units: dict[str, FakeUnit] = {}
        self.calls: list[str] = []
        self.journals: dict[str, list[str]] = {}
        self.lag = 0  # how often journalctl is asked before the last line is there
        self.on_look: list[Any] = []  # called at the next looks at a unit, one each
        self.vllm = ""  # the version that is installed, "" for nobody can tell
        self.gpus: list[str] = []  # what nvidia-smi prints

    def run(self, *argv: str, **_: object) -> Ran:
        if argv[0] == "journalctl":
            return self._journalctl(argv[1:])
        if argv[0] == PYTHON:
            return Ran(0, f"{self.vllm}\n", "")
        if argv[0] == "nvidia-smi":
            return Ran(0, "".join(f"{line}\n" for line in self.gpus), "")
        assert argv[:2] == ("systemctl", "--no-pager"), argv
        verb, *rest = argv[2:]
        name = rest[-1] if rest else ""
        unit = self.units.setdefault(name, FakeUnit()) if name else FakeUnit()
        if verb == "show" and rest[1] == "ExecStart":
            return Ran(0, f"ExecStart={{ path={PYTHON} ; argv[]={PYTHON} -m vllm ; }}\n" if self.vllm else "", "")
        if verb == "show" and rest[1] == "StateChangeTimestampMonotonic":
            return Ran(0, f"StateChangeTimestampMonotonic={int((time.monotonic() - 60) * 1e6)}\n", "")
        if verb == "show":
            return self._show(unit)
        if verb == "is-enabled":
            return Ran(0, "enabled\n", "") if unit.enabled else Ran(1, "disabled\n", "")
        self.calls.append(" ".join([verb, *rest]))
        if verb == "enable":
            unit.enabled = True
            if rest[0] == "--now":
                self._start(name, unit)
        elif verb == "disable":
            unit.enabled = False
            if rest[0] == "--now":
                self._stop(unit)
        elif verb == "reset-failed":
            if unit.active == "failed":
                unit.active, unit.sub = "inactive", "dead"
        elif verb == "--no-block":
            unit.active, unit.sub = "deactivating", "stop-sigterm"
        elif verb == "kill":
            assert unit.active == "deactivating", "else systemd starts it again"
            self._stop(unit)
            unit.active, unit.sub, unit.result = "failed", "failed", "signal"
        elif verb == "restart":
            return self._restart(name, unit)
        else:
            assert verb == "daemon-reload", argv
        return Ran(0, "", "")

    def _show(self, unit: FakeUnit) -> Ran:
        unit.looks += 1
        if unit.server is not None and unit.server.looks_left is not None:
            unit.server.looks_left -= 1
            if unit.server.looks_left == 0:
                self._stop(unit)
                unit.active, unit.sub, unit.result = "failed", "failed", "oom-kill"
        if unit.active == "active" and unit.server is None and unit.looks > unit.behaviour.get("polls", 0):
            self._listen(unit)
        if self.on_look:
            self.on_look.pop(0)(unit)
        properties = {
            "ActiveState": unit.active, "SubState": unit.sub, "NRestarts": unit.restarts, "Result": unit.result,
            "InvocationID": unit.invocation,
        }  # fmt: skip
        return Ran(0, "".join(f"{name}={value}\n" for name, value in properties.items()), "")

    def _restart(self, name: str, unit: FakeUnit) -> Ran:
        refusal = self._read(name).get("refuse")
        if refusal is not None:
            return Ran(1, "", refusal)
        self._stop(unit)
        self._start(name, unit)
        return Ran(0, "", "")

    def _read(self, name: str) -> dict[str, Any]:
        found = re.search(r"# fake: (.*)", (self.directory / name).read_text())
        assert found, name
        behaviour: dict[str, Any] = json.loads(found.group(1))
        return behaviour

    def _start(self, name: str, unit: FakeUnit) -> None:
        unit.behaviour = self._read(name)
        unit.starts += 1
        unit.invocation = f"{name}-{unit.starts}"
        unit.restarts, unit.looks = 0, 0
        lines = [f"Started {name}", *unit.behaviour.get("says", [])]
        unit.active, unit.sub, unit.result = "active", "running", "success"
        if "crash" in unit.behaviour:
            unit.active, unit.sub, unit.result = "activating", "auto-restart", "exit-code"
            lines += unit.behaviour["crash"]
        if "die" in unit.behaviour:
            unit.active, unit.sub, unit.result = "failed", "failed", "oom-kill"
            lines += unit.behaviour["die"]
        self.journals[unit.invocation] = lines

    def _stop(self, unit: FakeUnit) -> None:
        unit.active, unit.sub = "inactive", "dead"
        if unit.server is not None:
            unit.server.shutdown()
            unit.server.server_close()
            unit.server = None

    def _listen(self, unit: FakeUnit) -> None:
        if "serve" in unit.behaviour:
            try:
                unit.server = serve(unit.behaviour)
            except OSError:
                unit.active, unit.sub, unit.result = "failed", "failed", "exit-code"

    def _journalctl(self, argv: Sequence[str]) -> Ran:
        if "--sync" in argv:
            return Ran(0, "", "")
        found = [word.partition("=")[2] for word in argv if word.startswith("_SYSTEMD_INVOCATION_ID=")]
        lines = self.journals.get(found[0], []) if found else ["systemd: the unit's text is wrong"]
        if self.lag:
            self.lag -= 1
            lines = lines[:-1]
        count = int(argv[argv.index("-n") + 1])
        return Ran(0, "".join(line + "\n" for line in lines[-count:]), "")

    def close(self) -> None:
        for unit in self.units.values():
            self._stop(unit)


class Server(ThreadingHTTPServer):
    """`asked` is every completion's request, with the API key as `key`; `looks_left` counts down to its end."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.asked: list[dict[str, Any]] = []
        self.looks_left: int | None = None
        super().__init__(("127.0.0.1", port), handler)

    def complete(self, answer: Any, model: str) -> tuple[int, str]:
        if answer is None:
            return 404, json.dumps({"error": {"message": f"The model `{model}` does not exist."}})
        if answer == "dies":
            self.looks_left = 3
            return 500, json.dumps({"error": {"message": "EngineCore encountered an issue."}})
        if isinstance(answer, list) and isinstance(answer[-1], str):
            status, body = answer
            return status, body
        turn = sum(request["model"] == model for request in self.asked) - 1
        shift = answer[turn % len(answer)] if isinstance(answer, list) else answer
        first = {"token_id:1": -0.5 + shift, "token_id:2": -1.0, f"token_id:{3 + int(shift)}": -4.0}
        words = ["token_id:1", f"token_id:{int(shift)}"]
        return 200, json.dumps({"choices": [{"logprobs": {"tokens": words, "top_logprobs": [first, {}]}}]})


def serve(behaviour: dict[str, Any]) -> Server:
    class Handler(BaseHTTPRequestHandler):
        server: Server

        def do_GET(self) -> None:
            status, body = behaviour.get("health", 200) if self.path == "/health" else behaviour.get("other", 404), ""
            if self.path == "/v1/models":
                status = 200
                body = behaviour.get("body") or json.dumps(
                    {"data": [{"id": model, "root": root} for model, root in behaviour["serve"].items()]}
                )
                if "key" in behaviour and self.headers["Authorization"] != f"Bearer {behaviour['key']}":
                    status, body = 401, ""
            self._reply(status, body)

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.asked.append({**request, "key": self.headers["Authorization"]})
            answer = behaviour.get("answers", {}).get(request["model"])
            if answer == "hangs":
                time.sleep(2)
                return
            self._reply(*self.server.complete(answer, request["model"]))

        def _reply(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = Server(behaviour["port"], Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
