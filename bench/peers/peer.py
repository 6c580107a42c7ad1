"""Another way to the same deployment: adapters into /srv/adapters on the pod, and one systemd unit."""

from __future__ import annotations

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from bench.support.site import Site

TARGET = "/srv/adapters"
UNIT = "peer-vllm.service"


class Peer(ABC):
    """Written as a competent person would; `work` holds its files."""

    name: str

    def __init__(self, site: Site, adapters: Path, unit: Path) -> None:
        """`adapters` is the directory that has them all, `unit` the unit's file."""
        self.site, self.adapters, self.unit = site, adapters, unit
        self.work = site.work / self.name.replace(" ", "-")
        self.work.mkdir()
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Write what it needs."""

    @abstractmethod
    def words(self) -> Sequence[str]:
        """The command that makes the pod so."""

    def run(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "SSH_AUTH_SOCK"}
        environment |= {"HOME": str(self.work), "LC_ALL": "C.UTF-8"}
        done = subprocess.run(
            self.words(), cwd=self.work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"{self.name} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")

    def clear(self) -> None:
        """Take everything off the pod again."""
        self.site.machine.run("systemctl", "disable", "--now", UNIT, check=False)
        self.site.machine.run("rm", "-rf", TARGET, f"/etc/systemd/system/{UNIT}")
        self.site.machine.run("systemctl", "daemon-reload")


def unit_for_peers(site: Site, text: str, digests: dict[str, str], directory: Path) -> Path:
    """The unit that this project rendered, with the adapters where the peers put them."""
    for model, digest in digests.items():
        text = text.replace(f"/var/lib/lora-pods/blobs/sha256/{digest.removeprefix('sha256:')}", f"{TARGET}/{model}")
    # What the secrets' file would bring is nothing here.
    lines = [line for line in text.splitlines() if not line.startswith("EnvironmentFile=")]
    unit = directory / UNIT
    unit.write_text("\n".join(lines) + "\n")
    return unit
