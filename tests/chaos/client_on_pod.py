"""A client of the engine: asks one question after the other and writes down each answer (runs on a pod, stdlib only).

    client_on_pod.py FILE UNIT

What it asks is in FILE, read anew whenever it changes: the models, and the keys, any of which may be the engine's.
Where it gets no answer, or none that it can use, it writes down as well what systemd says of UNIT at that moment.
"""

import http.client
import json
import os
import subprocess
import sys
import time
from typing import Any, Dict, Tuple

PAUSE = 0.2


def ask(model: str, key: str) -> Tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=20)
    try:
        headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
        body = json.dumps({"model": model, "prompt": "hello", "max_tokens": 16})
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8")
    finally:
        connection.close()


def answered(model: str, key: str) -> Tuple[int, str]:
    try:
        status, body = ask(model, key)
        return status, str(json.loads(body)["choices"][0]["text"]) if status == 200 else body[:200]
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
        return 0, "%s: %s" % (type(error).__name__, error)


def state(unit: str) -> str:
    """As `active 123`, the second being the engine's process."""
    shown = ["systemctl", "show", "--property=ActiveState,MainPID", unit]
    told = subprocess.run(shown, stdout=subprocess.PIPE, check=False, universal_newlines=True).stdout
    found = dict(line.split("=", 1) for line in told.splitlines())
    return "%s %s" % (found.get("ActiveState"), found.get("MainPID"))


def main(path: str, unit: str) -> None:
    asked: Dict[str, Any] = {}
    seen, number, fits = 0, 0, ""
    while True:
        changed = os.stat(path).st_mtime_ns
        if changed != seen:
            with open(path, encoding="utf-8") as file:
                seen, asked = changed, json.load(file)
        model = asked["models"][number % len(asked["models"])]
        number += 1
        began = time.time()
        status, said = 401, ""
        for key in sorted(asked["keys"], key=fits.__ne__):
            status, said = answered(model, key)
            if status != 401:
                fits = key
                break
        line = {"began": began, "ended": time.time(), "model": model, "status": status, "said": said}
        line["engine"] = "" if status == 200 else state(unit)
        print(json.dumps(line), flush=True)
        time.sleep(PAUSE)


if __name__ == "__main__":
    main(*sys.argv[1:])
