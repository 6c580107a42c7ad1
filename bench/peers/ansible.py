"""Ansible: a playbook with `copy`, and one with `synchronize`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from bench.peers.peer import TARGET, UNIT, Peer
from bench.peers.venv import peers_venv


class Ansible(Peer):
    task: str

    def prepare(self) -> None:
        site = self.site
        host = {
            "ansible_host": "127.0.0.1",
            "ansible_port": site.machine.port(),
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(site.key),
            "ansible_ssh_common_args": f"-o UserKnownHostsFile={site.known_hosts()} -o IdentitiesOnly=yes",
            "ansible_python_interpreter": "/usr/bin/python3",
        }
        (self.work / "inventory.json").write_text(json.dumps({"all": {"hosts": {"pod": host}}}))
        (self.work / "ansible.cfg").write_text(
            "[defaults]\ninventory = inventory.json\ngathering = explicit\n[ssh_connection]\npipelining = True\n"
        )
        (self.work / "site.yml").write_text(
            PLAYBOOK.replace("TASK", self.task)
            .replace("SOURCE", str(self.adapters))
            .replace("TARGET", TARGET)
            .replace("FILE", str(self.unit))
            .replace("UNIT", UNIT)
        )

    def words(self) -> Sequence[str]:
        return (str(peers_venv() / "ansible-playbook"), "site.yml")


class AnsibleCopy(Ansible):
    name = "ansible copy"
    task = "ansible.builtin.copy: {src: SOURCE/, dest: TARGET/}"


class AnsibleSynchronize(Ansible):
    name = "ansible synchronize"
    task = "ansible.posix.synchronize: {src: SOURCE/, dest: TARGET/, delete: true}"


PLAYBOOK = """- hosts: pod
  tasks:
    - ansible.builtin.file: {path: TARGET, state: directory}
    - TASK
      notify: restart
    - ansible.builtin.copy: {src: FILE, dest: /etc/systemd/system/UNIT}
      notify: restart
    - ansible.builtin.systemd: {name: UNIT, enabled: true, daemon_reload: true}
  handlers:
    - name: restart
      ansible.builtin.systemd: {name: UNIT, state: restarted, daemon_reload: true}
"""
