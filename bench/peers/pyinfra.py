"""pyinfra: a deploy with `files.sync`."""

from __future__ import annotations

from collections.abc import Sequence

from bench.peers.peer import TARGET, UNIT, Peer
from bench.peers.venv import peers_venv


class PyinfraSync(Peer):
    name = "pyinfra files.sync"

    def prepare(self) -> None:
        site = self.site
        data = {
            "ssh_hostname": "127.0.0.1",
            "ssh_port": site.machine.port(),
            "ssh_user": "root",
            "ssh_key": str(site.key),
            "ssh_known_hosts_file": str(site.known_hosts()),
        }
        (self.work / "inventory.py").write_text(f"pods = [('pod', {data!r})]\n")
        (self.work / "deploy.py").write_text(
            DEPLOY.replace("SOURCE", str(self.adapters))
            .replace("TARGET", TARGET)
            .replace("FILE", str(self.unit))
            .replace("UNIT", UNIT)
        )

    def words(self) -> Sequence[str]:
        return (str(peers_venv() / "pyinfra"), "-y", "inventory.py", "deploy.py")


DEPLOY = """from pyinfra.operations import files, systemd

adapters = files.sync(src="SOURCE", dest="TARGET", delete=True)
unit = files.put(src="FILE", dest="/etc/systemd/system/UNIT")
systemd.service(
    service="UNIT", running=True, enabled=True, restarted=True, daemon_reload=True,
    _if=lambda: adapters.did_change() or unit.did_change(),
)
"""
