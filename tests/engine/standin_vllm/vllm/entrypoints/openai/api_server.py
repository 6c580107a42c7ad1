"""The stand-in's server: ``python -m vllm.entrypoints.openai.api_server`` (stdlib only, Python >= 3.8).

It starts, fails and answers where vLLM 0.32 does, and says in each answer which model answered and the
SHA-256 of the adapter's weights as they were at launch. What a test can ask of it beyond vLLM:

- environment ``STANDIN_START_SECONDS``: how long loading takes before it listens
- environment ``STANDIN_FAIL``: a text to fail to start with
- ``standin_fail`` in an adapter's config: the same, when that adapter is loaded
- ``standin_equals_base`` in an adapter's config: its tokens and logprobs are the base's, as vLLM's are where the names
  of the tensors have a wrong prefix (which do the same here)
- ``standin_delay_seconds`` in a request: how long its answer takes
- ``GET /standin/argv``: the process's argv, id, and the names (never the values) of its environment
"""

import hashlib
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Dict, List

from ... import __version__
from .adapters import Loaded, load_all
from .arguments import Arguments, parse

# vLLM 0.32, entrypoints/serve/middleware/authenticate.py
GUARDED_PREFIXES = ("/v1", "/v2", "/inference")


class Server(ThreadingHTTPServer):
    """Holds what was loaded."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, arguments: Arguments, adapters: Dict[str, Loaded]) -> None:
        self.arguments = arguments
        self.adapters = adapters
        key = os.environ.get("VLLM_API_KEY")
        self.api_keys = arguments.api_keys or ([key] if key else [])
        super().__init__((arguments.host, arguments.port), Handler)


class Handler(BaseHTTPRequestHandler):
    """The endpoints."""

    server: Server

    def do_GET(self) -> None:
        if not self._authorised():
            return
        if self.path == "/health":
            self._reply(200, b"")
        elif self.path == "/version":
            self._json(200, {"version": __version__})
        elif self.path == "/v1/models":
            self._json(200, {"object": "list", "data": self._cards()})
        elif self.path == "/standin/argv":
            self._json(200, {"argv": _argv(), "environment": sorted(os.environ), "pid": os.getpid()})
        else:
            self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        if not self._authorised():
            return
        try:
            request = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))))
        except ValueError:
            self._error(400, "BadRequestError", "The request's body is not JSON.", None)
            return
        if self.path == "/v1/chat/completions":
            prompt = str(request["messages"][-1]["content"])
        elif self.path == "/v1/completions":
            prompt = str(request["prompt"])
        else:
            self._json(404, {"detail": "Not Found"})
            return
        names = self.server.arguments.served_names
        model = request.get("model") or names[0]
        if model not in names and model not in self.server.adapters:
            self._error(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
            return
        print(f"Received request for {model}", flush=True)
        time.sleep(float(request.get("standin_delay_seconds", 0)))
        answer = self._completion(model, prompt, chat=self.path.startswith("/v1/chat"))
        if self.path == "/v1/completions" and request.get("logprobs") is not None:
            adapter = self.server.adapters.get(model)
            weights = adapter.sha256 if adapter and adapter.applies else "none"
            answer["choices"][0]["logprobs"] = _logprobs(weights, prompt, request.get("max_tokens", 16))
        self._json(200, answer)

    def _completion(self, model: str, prompt: str, chat: bool) -> Dict[str, Any]:
        adapter = self.server.adapters.get(model)
        text = f"model={model} weights={adapter.sha256 if adapter else 'none'} prompt={prompt}"
        choice: Dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        choice.update({"message": {"role": "assistant", "content": text}} if chat else {"text": text})
        tokens = len(text.split())
        return {
            "id": f"cmpl-{time.time_ns()}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(prompt.split()),
                "completion_tokens": tokens,
                "total_tokens": tokens + len(prompt.split()),
            },
        }

    def _cards(self) -> List[Dict[str, Any]]:
        # Shape: vLLM 0.32, entrypoints/serve/engine/protocol.py ModelCard; order: models/serving.py
        arguments = self.server.arguments
        cards = [_card(name, arguments.model, None, arguments.max_model_len) for name in arguments.served_names]
        return cards + [
            _card(name, adapter.path, adapter.parent, None) for name, adapter in self.server.adapters.items()
        ]

    def _authorised(self) -> bool:
        keys = self.server.api_keys
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        if keys and self.path.startswith(GUARDED_PREFIXES) and (scheme.lower() != "bearer" or given not in keys):
            self._json(401, {"error": "Unauthorized"})
            return False
        return True

    def _error(self, status: int, kind: str, message: str, param: Any) -> None:
        self._json(status, {"error": {"message": message, "type": kind, "param": param, "code": status}})

    def _json(self, status: int, body: Dict[str, Any]) -> None:
        self._reply(status, json.dumps(body).encode(), "application/json")

    def _reply(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _card(name: str, root: str, parent: Any, max_model_len: Any) -> Dict[str, Any]:
    now = int(time.time())
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": now,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": now,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [permission],
    }


def _logprobs(weights: str, prompt: str, count: int) -> Dict[str, Any]:
    """What the same weights always say to a prompt, tokens by their ids (vLLM's ``return_tokens_as_token_ids``)."""
    tops = []
    for position in range(count):
        digest = hashlib.sha256(f"{weights} {position} {prompt}".encode()).digest()
        tops.append({f"token_id:{byte + 256 * rank}": -rank - byte / 1024 for rank, byte in enumerate(digest[:5])})
    return {
        "text_offset": [0] * count,
        "tokens": [next(iter(top)) for top in tops],
        "token_logprobs": [next(iter(top.values())) for top in tops],
        "top_logprobs": tops,
    }


def _argv() -> List[str]:
    with open("/proc/self/cmdline", "rb") as stream:
        return [os.fsdecode(word) for word in stream.read().split(b"\0")[:-1]]


def start(argv: List[str]) -> Server:
    """Loads everything, then listens. Raises like vLLM where something does not load."""
    arguments = parse(argv)
    print(f"vLLM API server version {__version__} (stand-in)", flush=True)
    if "STANDIN_FAIL" in os.environ:
        raise RuntimeError(os.environ["STANDIN_FAIL"])
    if arguments.model.startswith("/") and not os.path.isfile(os.path.join(arguments.model, "config.json")):
        raise ValueError(f"Invalid repository ID or local directory specified: '{arguments.model}'")
    adapters = load_all(arguments)
    time.sleep(float(os.environ.get("STANDIN_START_SECONDS", "0")))
    return Server(arguments, adapters)


def main() -> None:
    """Serves until SIGTERM or SIGINT, and then lets the requests in flight take ``--shutdown-timeout`` more seconds."""
    server = start(sys.argv[1:])

    def stop(_signal: int, _frame: Any) -> None:
        # shutdown waits for serve_forever, which this handler interrupts: another thread has to call it.
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    print(f"Uvicorn running on http://{server.arguments.host}:{server.server_port}", flush=True)
    server.serve_forever(poll_interval=0.05)
    server.server_close()
    deadline = time.monotonic() + server.arguments.shutdown_timeout
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


if __name__ == "__main__":
    main()
