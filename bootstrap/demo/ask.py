"""Asks models questions over the engine's OpenAI-compatible API."""

import json
import urllib.request


def ask(endpoint: str, model: str, question: str, timeout_seconds: float = 300) -> str:
    """The most likely answer of ``model``; ``endpoint`` ends in ``/v1``. Raises OSError (urllib's)."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 48,
    }
    request = urllib.request.Request(
        f"{endpoint}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_seconds) as response:
        answer = json.load(response)
    return str(answer["choices"][0]["message"]["content"]).strip()
