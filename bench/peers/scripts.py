"""What a shell can do: rsync and ssh in a script, with and without `-c`, and scp of the bytes alone."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence

from bench.peers.peer import TARGET, UNIT, Peer
from bench.support.site import Site
from bench.support.timing import tell


class RsyncScript(Peer):
    """One login for all of it; the engine restarts where rsync names anything that it changed."""

    name = "rsync script"
    options = "-a"

    def prepare(self) -> None:
        login = " ".join(map(shlex.quote, ["ssh", "-p", str(self.site.machine.port()), *self.site.ssh_options()]))
        login += f" -o ControlMaster=auto -o ControlPath={self.work}/%C -o ControlPersist=60"
        (self.work / "deploy.sh").write_text(
            SCRIPT.replace("OPTIONS", self.options)
            .replace("LOGIN", login)
            .replace("SOURCE", str(self.adapters))
            .replace("TARGET", TARGET)
            .replace("FILE", str(self.unit))
            .replace("UNIT", UNIT)
        )

    def words(self) -> Sequence[str]:
        return ("bash", "deploy.sh")


class RsyncChecksumScript(RsyncScript):
    name = "rsync -c script"
    options = "-ac"


SCRIPT = """set -euo pipefail
ssh='LOGIN'
trap '$ssh -O exit root@127.0.0.1 2>/dev/null || true' EXIT
changed=$(rsync OPTIONS --delete --itemize-changes -e "$ssh" SOURCE/ root@127.0.0.1:TARGET/)
changed+=$(rsync -ac --itemize-changes -e "$ssh" FILE root@127.0.0.1:/etc/systemd/system/UNIT)
if [ -n "$changed" ]; then
  $ssh root@127.0.0.1 'systemctl daemon-reload && systemctl enable --quiet UNIT && systemctl restart UNIT'
fi
"""


class Scp(Peer):
    """No deployment: the time that the bytes alone take."""

    name = "scp"
    options: Sequence[str] = ()

    def prepare(self) -> None:
        self.port = self.site.machine.port()

    def words(self) -> Sequence[str]:
        target = f"root@127.0.0.1:{TARGET}"
        options = [*self.site.ssh_options(self.port), *self.options]
        return ("scp", "-q", "-r", "-P", str(self.port), *options, str(self.adapters), target)


class ScpAes(Scp):
    name = "scp, AES-GCM"
    options = ("-c", "aes128-gcm@openssh.com")


def offer_rsync(site: Site) -> bool:
    """Whether there is rsync on both sides; the pod gets Debian's package."""
    if shutil.which("rsync") is None:
        tell("no rsync here, so that nothing is compared with what needs it: apt-get install rsync")
        return False
    install = "apt-get -qq update && apt-get -qq install -y --no-install-recommends rsync"
    site.machine.run("sh", "-c", f"command -v rsync || ({install})", check=False)
    if not site.machine.run("sh", "-c", "command -v rsync", check=False):
        tell("the pod cannot install rsync, so that nothing is compared with what needs it")
        return False
    return True
