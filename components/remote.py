"""Running podctl on a pod: the only owner of the command plugin.

Every command means "make it so": Pulumi runs the same text for a create and an update, and the pod is told what to
reach by one JSON document on standard input. So nothing here has triggers, and nothing is replaced: a changed
connection (a rotated key, a re-rented machine) runs the verb again, and it finds out by itself what is left to do.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pulumi

from components.core.naming import POD_ROOT, podctl_path
from components.on_pod.boot import BOOT, podctl_source, shell

if TYPE_CHECKING:
    from pulumi_command.remote import Command as Command
else:
    # Pulumi evaluates the annotations of components at run time.
    Command = pulumi.Resource

# Pods were reached before (pods/reach.py), so this is for a connection lost since: about five seconds of the plugin's
# own growing pauses, and DIAL_SECONDS an attempt more where a machine swallows packets.
DIAL_ATTEMPTS = 8
DIAL_SECONDS = 10


@dataclass(frozen=True)
class Connection:
    """How a pod is reached. `host_key` is the pinned one ("" accepts any), `plugin_host_key` what the command plugin is
    shown.

    `credential` says where the private key is found; it is no secret itself.
    """

    address: pulumi.Input[str]
    port: pulumi.Input[int]
    user: str
    host_key: pulumi.Input[str]
    credential: str
    private_key: pulumi.Output[str]
    plugin_host_key: pulumi.Input[str] | None = None

    def described(self) -> dict[str, pulumi.Input[Any]]:
        """All of it but the key, for inputs of the resources that reach the pod by themselves."""
        return {
            "address": self.address,
            "port": self.port,
            "user": self.user,
            "hostKey": self.host_key,
            "credential": self.credential,
        }


@cache
def podctl_sha256() -> str:
    return hashlib.sha256(podctl_source().encode()).hexdigest()


def podctl_line(user: str, verb: str, arguments: Sequence[str] = ()) -> str:
    """The shell line that calls the podctl which `prepare` put on the pod; other users than root go through sudo."""
    return shell(user, ["python3", podctl_path(podctl_sha256()), verb, *arguments])


def _undo_line(user: str, verb: str, arguments: Sequence[str]) -> str:
    """Like `podctl_line`; a machine that has no podctl (any more) has nothing of ours to undo.

    Standard input is read to its end in any case: the plugin fails with "EOF" where a command ends before.
    """
    there = f"[ -e {shlex.quote(podctl_path(podctl_sha256()))} ]"
    return f"if {there}; then {podctl_line(user, verb, arguments)}; else cat >/dev/null; fi"


def leave_line(user: str, engine: str) -> str:
    """The shell line that takes an engine off a pod, by the podctl on standard input: nothing there need be whole.

    A machine without our directory has nothing of ours, and perhaps neither python3 nor sudo.
    """
    leave = shell(user, ["python3", "-", "leave", "--engine", engine])
    return f"if [ -e {shlex.quote(POD_ROOT)} ]; then {leave}; else cat >/dev/null; echo '{{\"removed\": true}}'; fi"


def pod_command(
    name: str,
    connection: Connection,
    verb: str,
    document: pulumi.Input[Mapping[str, Any]],
    *,
    undo: tuple[str, Sequence[str]],
    opts: pulumi.ResourceOptions,
    secret: bool = False,
    logged: bool = True,
) -> Command:
    """Run `podctl VERB` with `document` on standard input, at create and at every update.

    `undo` is the verb, with its arguments, that a delete runs. `secret` encrypts the document in the state. Progress
    and refusals, which podctl writes to standard error, reach the console where `logged`.
    """
    return _command(name, connection, podctl_line(connection.user, verb), document, undo, opts, secret, logged)


def boot_command(
    name: str,
    connection: Connection,
    document: Mapping[str, Any],
    *,
    undo: tuple[str, Sequence[str]],
    opts: pulumi.ResourceOptions,
) -> Command:
    """Run `podctl prepare` on a pod that has no podctl yet: the document carries its source."""
    carried = {"podctl": podctl_source(), "sha256": podctl_sha256(), **document}
    # The source would fill a preview's diff with every release; what podctl is told apart from it is short.
    hidden = pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(hide_diffs=["stdin"]))
    text = BOOT if connection.user == "root" else shell(connection.user, ["sh", "-c", BOOT])
    return _command(name, connection, text, carried, undo, hidden, False, True)


def result(command: Command) -> pulumi.Output[dict[str, Any]]:
    """The JSON line that podctl answered with. podctl never prints a secret, also where it was told one."""

    def parsed(line: str) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise pulumi.RunError("podctl's answer is no JSON object: does a .bashrc or a forced command print there?")
        return found

    return pulumi.Output.unsecret(command.stdout).apply(parsed)


def told(command: Command) -> pulumi.Output[dict[str, Any]]:
    """The document that a command last succeeded with; unknown in a preview of a run that will run it again."""
    both = pulumi.Output.all(command.stdout, command.stdin)

    def parsed(both: Sequence[Any]) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(both[1])
        return document

    return both.apply(parsed)


def _command(
    name: str,
    connection: Connection,
    text: str,
    document: pulumi.Input[Mapping[str, Any]],
    undo: tuple[str, Sequence[str]],
    opts: pulumi.ResourceOptions,
    secret: bool,
    logged: bool,
) -> Command:
    # Here, since the providers' process imports this module and declares no resources.
    from pulumi_command import remote

    stdin: pulumi.Output[str] = pulumi.Output.json_dumps(document, sort_keys=True)
    if secret:
        stdin = pulumi.Output.secret(stdin)
    return remote.Command(
        name,
        connection=remote.ConnectionArgs(
            host=connection.address,
            port=connection.port,
            user=connection.user,
            host_key=(connection.plugin_host_key or connection.host_key) if connection.host_key != "" else None,
            private_key=connection.private_key,
            dial_error_limit=DIAL_ATTEMPTS,
            per_dial_timeout=DIAL_SECONDS,
        ),
        create=text,
        delete=_undo_line(connection.user, *undo),
        stdin=stdin,
        add_previous_output_in_env=False,
        logging=remote.Logging.STDERR if logged else remote.Logging.NONE,
        # Where somebody forces a replacement, the new command must not be undone by the old one's delete.
        opts=pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(delete_before_replace=True)),
    )
