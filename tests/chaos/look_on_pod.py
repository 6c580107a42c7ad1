"""What is on a pod, as one JSON line (runs on a pod, stdlib only).

look_on_pod.py ROOT UNIT STACK [KEY]    with the API key, also what the engine serves, and what is left once gc has run
"""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from typing import Any, Dict, List

BLOB = re.compile(r"blobs/sha256/([0-9a-f]{64})")
# Other programs made what is in these.
NOT_OURS = ("venvs", "python", "tools", "cache")
WEEK = 8 * 86400


def text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def names(path: str) -> List[str]:
    return sorted(os.listdir(path)) if os.path.isdir(path) else []


def podctl(root: str, verb: str) -> Any:
    words = [sys.executable, root + "/bin/podctl", verb]
    ran = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False, universal_newlines=True)
    return json.loads(ran.stdout) if ran.returncode == 0 else {"failed": ran.stderr.strip()}


def hidden(root: str) -> List[str]:
    found = []
    for where, directories, files in os.walk(root):
        if where == root:
            directories[:] = [name for name in directories if name not in NOT_OURS]
        found += [os.path.relpath(os.path.join(where, n), root) for n in (*directories, *files) if n.startswith(".")]
    return found


def generations(root: str) -> Dict[str, Dict[str, Any]]:
    found = {}
    for engine in names(root + "/units"):
        for n in names("%s/units/%s" % (root, engine)):
            at = "%s/units/%s/%s" % (root, engine, n)
            found[engine + "/" + n] = {
                "proven": os.path.exists(at + "/proven"),
                "blobs": sorted(set(BLOB.findall(text(at + "/unit")))),
            }
    return found


def state(root: str, unit: str, stack: str) -> Dict[str, Any]:
    refs = "%s/refs/%s" % (root, stack)
    return {
        "unit": text("/etc/systemd/system/" + unit),
        "refs": {name: text(refs + "/" + name) for name in names(refs) if not name.startswith(".")},
        "blobs": [name for name in names(root + "/blobs/sha256") if not name.startswith(".")],
        "staging": names(root + "/staging"),
        "generations": generations(root),
    }


def request(path: str, key: str, body: Any = None) -> Any:
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request("http://127.0.0.1:8000" + path, data, headers)
    with urllib.request.urlopen(asked, timeout=20) as answer:
        return json.load(answer)


def served(key: str) -> Dict[str, str]:
    found = {}
    for card in request("/v1/models", key)["data"]:
        answer = request("/v1/completions", key, {"model": card["id"], "prompt": "hello", "max_tokens": 16})
        found[card["id"]] = answer["choices"][0]["text"]
    return found


def age(directory: str) -> None:
    for name in names(directory):
        os.utime(os.path.join(directory, name), (time.time() - WEEK,) * 2)


def main(root: str, unit: str, stack: str, key: str = "") -> None:
    if not key:
        print(json.dumps({**state(root, unit, stack), "verified": podctl(root, "verify")}))
        return
    podctl(root, "gc")
    found = {**state(root, unit, stack), "verified": podctl(root, "verify"), "served": served(key)}
    age(root + "/staging")
    podctl(root, "gc")
    found["stagingAfterAWeek"] = names(root + "/staging")
    found["blobsAfterAWeek"] = names(root + "/blobs/sha256")
    found["hidden"] = hidden(root) + [n for n in names("/etc/systemd/system") if n.startswith(".lora-pods")]
    found["building"] = [name for name in names(root + "/venvs") if name.endswith(".building")]
    pid = subprocess.check_output(["systemctl", "show", "--property=MainPID", "--value", unit], universal_newlines=True)
    found["argv"] = text("/proc/%s/cmdline" % pid.strip()).split("\0")[:-1]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
