"""Fifty adapters on five pods: how often each pod's sshd is dialled, with the limits that sshd has by itself."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Client, Key
from tests.engine.test_command_plugin import as_root, free_port, make_key, public_key, sshd_program
from tests.support.stacks import Checkout

pytestmark = pytest.mark.pod

PODS, ADAPTERS = 5, 50
# An sshd in namespaces of its own, with a /var/lib that is empty and programs that stand in for systemd and vLLM.
HOST_SCRIPT = """
set -e
mount -t tmpfs -o mode=0755 tmpfs /run
cp -r "$1" /run/pod
chmod -R o+rX /run/pod/bin
mkdir -p /run/sshd /run/systemd/system
mount -t tmpfs -o mode=0755 tmpfs /var/lib
mount -t tmpfs -o mode=0700 tmpfs /root
"$2" -D -e -f /run/pod/sshd_config &
read -r _ || true
"""
# MaxStartups is sshd's own: 10:30:100.
SSHD_CONFIG = """
ListenAddress {address}
Port {port}
HostKey /run/pod/host_key
PidFile none
AuthorizedKeysFile /run/pod/authorized_keys
StrictModes no
PermitRootLogin prohibit-password
UsePAM no
UseDNS no
LogLevel VERBOSE
SetEnv PATH=/run/pod/bin:/usr/sbin:/usr/bin:/sbin:/bin
"""
PROGRAMS = {
    "systemctl": "case $* in *is-system-running*) echo running;; esac",
    "vllm-python": "echo 0.33.0",
    # All of podctl but the engine.
    "python3": """case $* in
*activate) cat >/dev/null; echo '{"restarted": true}';;
*) exec /usr/bin/python3 "$@";;
esac""",
}


class SshPod:
    def __init__(self, directory: Path, number: int, authorized: str) -> None:
        self.address, self.port = f"127.0.0.{10 + number}", free_port()
        files = directory / f"pod-{number}"
        (files / "bin").mkdir(parents=True)
        for name, script in PROGRAMS.items():
            (files / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
            (files / "bin" / name).chmod(0o755)
        make_key(files / "host_key")
        self.host_key = public_key(files / "host_key")
        (files / "authorized_keys").write_text(authorized + "\n")
        (files / "sshd_config").write_text(SSHD_CONFIG.format(address=self.address, port=self.port))
        self.said: list[str] = []
        words = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        self.process = subprocess.Popen(
            [*as_root(), *words, "sh", "-c", HOST_SCRIPT, "sh", str(files), sshd_program()],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()
        give_up = time.monotonic() + 20
        while not any("Server listening" in line for line in self.said):
            assert time.monotonic() < give_up, self.said
            time.sleep(0.05)

    def _listen(self) -> None:
        assert self.process.stderr is not None
        self.said.extend(iter(self.process.stderr.readline, ""))

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, line)) for line in self.said)

    def declared(self) -> dict[str, Any]:
        host = {"address": self.address, "port": self.port, "hostKey": self.host_key}
        return {
            "base": f"org/base-{self.address}",
            "host": host,
            "engine": {"python": "/run/pod/bin/vllm-python", "device": "cpu"},
        }

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


@pytest.fixture
def pods(tmp_path: Path, key: Key) -> Iterator[list[SshPod]]:
    started: list[SshPod] = []
    try:
        for number in range(PODS):
            started.append(SshPod(tmp_path / "pods", number, key.public))
        yield started
    finally:
        for pod in started:
            pod.close()


def test_no_login_is_dropped(checkout: Checkout, key: Key, pods: list[SshPod]) -> None:
    client = Client(checkout.stack("acme"), key, [])
    for number in range(ADAPTERS):
        client.pods = [pods[number % PODS].declared()]
        client.add(f"m-{number:02}", seed=number)
    client.pods = [pod.declared() for pod in pods]
    client.configure(sshPrivateKey=key.private)

    run = client.up()

    assert run.counts["create"] == ADAPTERS + PODS * 9 + 1
    for pod in pods:
        assert pod.count("drop connection|MaxStartups|Too many") == 0
        # Reached, and its host key asked for; prepare, upload, place, secrets, activate.
        assert pod.count("^Connection from") == 7
        assert pod.count("^Accepted publickey") == 6
    assert client.up().changes == {}
    assert [pod.count("^Connection from") for pod in pods] == [7] * PODS
