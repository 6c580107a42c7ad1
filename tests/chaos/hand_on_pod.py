"""Waits for a step of an `up`, and kills something (runs on a pod, stdlib only).

    hand_on_pod.py AIM DELAY FAULT UNIT STOP

AIM is a verb that a podctl is to run, `installed` (another unit than now is in place) or `-`; FAULT is podctl, session,
engine or `-` (nothing). It prints one JSON line: when, and which processes. It gives up once the file STOP is there.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Dict, List

POLL = 0.03


def commands() -> Dict[int, List[str]]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open("/proc/%s/cmdline" % name, "rb") as file:
                    found[int(name)] = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
            except OSError:
                pass  # it ended
    return found


def is_podctl(words: List[str]) -> bool:
    """The program, or the line that boots it."""
    return bool(words) and "python3" in words[0] and any("/podctl" in word or '"podctl"' in word for word in words[1:])


def runs(words: List[str], verb: str) -> bool:
    return is_podctl(words) and verb in words


def victims(fault: str, unit: str) -> List[int]:
    if fault == "podctl":
        return [pid for pid, words in commands().items() if is_podctl(words)]
    if fault == "session":
        return [pid for pid, words in commands().items() if words and words[0].startswith("sshd: ")
                and "[listener]" not in words[0]]  # fmt: skip
    shown = ["systemctl", "show", "--property=MainPID", "--value", unit]
    pid = int(subprocess.check_output(shown) or 0)
    return [pid] if pid else []


def unit_text(unit: str) -> bytes:
    try:
        with open("/etc/systemd/system/" + unit, "rb") as file:
            return file.read()
    except OSError:
        return b""


def main(aim: str, delay: float, fault: str, unit: str, stop: str) -> None:
    verb = {"upload": "receive-all"}.get(aim, aim)
    before = unit_text(unit)

    def reached() -> bool:
        if aim == "-":
            return True
        if aim == "installed":
            return unit_text(unit) != before
        return any(runs(words, verb) for words in commands().values())

    while not reached():
        if os.path.exists(stop):
            return
        time.sleep(POLL)
    time.sleep(delay)
    killed = victims(fault, unit) if fault != "-" else []
    while fault != "-" and not killed:
        if os.path.exists(stop):
            return
        time.sleep(POLL)
        killed = victims(fault, unit)
    at = time.time()
    for pid in killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    print(json.dumps({"at": at, "killed": len(killed)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])
