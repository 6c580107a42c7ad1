"""The first word with a pod: is it there, is it the one that was pinned, does it let us in?

The command plugin tries every failure again, a wrong host key as long as a booting sshd, and tells them apart in the
words of its SSH library. So the connection is made here first, where each cause has its own sentence.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pulumi
from pulumi.dynamic import CreateResult, DiffResult, ReadResult, Resource, UpdateResult

from components.core.errors import UserError, printable
from components.core.naming import POD_ROOT, unit_name
from components.on_pod.boot import podctl_source
from components.pods.contract import PATIENCE, Machine
from components.pods.credentials import private_key_text
from components.provider import Provider, run
from components.remote import leave_line, podctl_line

if TYPE_CHECKING:
    from components.ssh import Address, Greeting

# What a refresh of earlier releases recorded of a pod that is not as it was left; now it is `drift`, one by one.
OTHER = "not as the last activation left it"
LEAVING_PATIENCE = 30.0
NEVER_REACHED = "switched off before it was ever reached"
# A refresh goes on without what does not answer.
REFRESH_PATIENCE = 10
# What the command plugin says of a host key that is not the pinned one (golang.org/x/crypto/ssh, FixedHostKey).
MISMATCH = "ssh: host key mismatch"
_said: set[str] = set()


class ReachedPodProvider(Provider):
    """Create and update connect; an unchanged connection is not tried. A refresh looks again.

    What it finds is `drift` then: what -> how it is instead of as it was left. It is among the inputs as well, since
    Pulumi takes what a program does not say for a difference: so each has its own line, in the refresh and in the next
    preview. Nothing of this holds while the machine is switched off: what is known of it stays as it is.
    """

    def create(self, props: dict[str, Any]) -> CreateResult:
        if _off(props):
            outs = {**props, "machine": NEVER_REACHED, "plugin_host_key": props["connection"]["hostKey"]}
        else:
            outs = self._reached(props)
        return CreateResult(props["connection"]["address"], outs)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> UpdateResult:
        if _off(_news):
            return UpdateResult({**_olds, "running": False})
        reached = self._reached(_news)
        # Here, since asyncssh takes a third of a second to load.
        from components.ssh import Address

        before, now = Address.of(_olds["connection"]), Address.of(_news["connection"])
        if before.address != now.address and (before.host_key != now.host_key or not now.host_key):
            print(f"{now} takes the place of {before}. Where that lives, {_left_on(before, _olds)}")
        return UpdateResult(reached)

    def delete(self, _id: str, _props: dict[str, Any]) -> None:
        """Takes off the pod all that the stack has there for this engine.

        A pod that is gone holds nobody up: the stack forgets it, and says what it may have left.
        """
        if _off(_props):
            return
        from components.ssh import Address, Gone

        address = Address.of(_props["connection"])
        key = private_key_text(_props["connection"]["credential"], self.settings())
        try:
            left = run(_leave(address, key, _props["engine"])).get("left")
            if left and isinstance(left, list):
                users = printable(", ".join(map(str, left)), 2000)
                print(f"{address} stays as it is, for others still use it: {users}")
        except Gone as gone:
            print(f"warning: {gone.what}, so it is forgotten as it is. Where it lives, {_left_on(address, _props)}")

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> DiffResult:
        if _off(_olds) or _off(_news):
            return DiffResult(changes=_off(_olds) != _off(_news))
        found = _olds.get("drift") or {}
        # Without --diff, Pulumi shows that there is a difference, and not which.
        for what, how in found.items():
            _say(f"drift of {_olds['engine']}: {what}: {how}")
        drifted = bool(found) or _olds["machine"] == OTHER
        other = any(_olds.get(key) != _news.get(key) for key in ("connection", "incarnation"))
        return DiffResult(changes=other or drifted)

    def read(self, id_: str, props: dict[str, Any]) -> ReadResult:
        if _off(props):
            return ReadResult(id_, props)
        try:
            found, key = self._drift(props)
        except UserError as error:
            _say(f"warning: the pod of {props['engine']} was not looked at: {error}")
            return ReadResult(id_, props)
        kept = {name: value for name, value in props.items() if name != "drift"}
        told = {"drift": found} if found else {}
        inputs = {**kept, "machine": None, "plugin_host_key": None}
        return ReadResult(id_, {**kept, **told, "plugin_host_key": key}, inputs={**inputs, **told})

    def _drift(self, props: Mapping[str, Any]) -> tuple[dict[str, str], str]:
        """What is not as it was left, and the host key that the command plugin is shown."""
        from components.ssh import OtherHostKey

        question = podctl_line(props["connection"]["user"], "intact", ["--engine", props["engine"]])
        try:
            greeting = self._greeting(props, REFRESH_PATIENCE, question)
        except OtherHostKey as error:
            return {"host key": str(error)}, props["plugin_host_key"]
        before = props["machine"].split()[0]
        if props["machine"] != OTHER and before != greeting.machine_id:
            now, before = printable(greeting.machine_id, 40), printable(before, 40)
            other = f"is another one, {now} in /etc/machine-id instead of {before}"
            return {"machine": other}, greeting.plugin_host_key
        found = greeting.answer.get("drift")
        if not isinstance(found, dict):
            found = {"podctl": "is not on the pod, or is another release's, or cannot be run there"}
        told = {printable(what): printable(how, 500) for what, how in found.items()}
        return told, greeting.plugin_host_key

    def _reached(self, props: Mapping[str, Any]) -> dict[str, Any]:
        greeting = self._greeting(props, float(props.get("patience", PATIENCE)), "true")
        machine = f"{greeting.machine_id} reached {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}"
        return {**props, "machine": machine, "plugin_host_key": greeting.plugin_host_key}

    def _greeting(self, props: Mapping[str, Any], patience: float, question: str) -> Greeting:
        # Here, since asyncssh takes a third of a second to load and a preview reaches no pod.
        from components.ssh import Address, greet

        described = props["connection"]
        key = private_key_text(described["credential"], self.settings())
        return run(greet(Address.of(described), key, question, patience))


def tells_both_keys(name: str, pod: pulumi.Resource) -> pulumi.ErrorHook:
    """For the commands on a pod that another machine took the place of: their plugin names neither key.

    The name stands in the state of each resource that has the hook.
    """

    async def tell(args: pulumi.ErrorHookArgs) -> bool:
        if MISMATCH not in args.errors[0]:
            return False
        # Here, since asyncssh takes a third of a second to load.
        from components.ssh import Address, OtherHostKey, shown_to_go

        inputs = args.new_inputs or args.old_inputs or {}
        met: Any = await pulumi.Output.from_input(inputs["connection"]).future()
        address = Address(met["host"], int(met["port"]), met["user"], met["hostKey"])
        with suppress(UserError):
            shown = await shown_to_go(address)
            if shown != address.host_key:
                pulumi.log.error(str(OtherHostKey(address, address.host_key, shown)), resource=pod)
        return False

    return pulumi.ErrorHook(name, tell)


async def _leave(address: Address, key: str, engine: str) -> dict[str, Any]:
    from components.ssh import open_session

    async with open_session(address, key, LEAVING_PATIENCE) as session:
        return await session.stream(leave_line(address.user, engine), [podctl_source().encode()])


def _left_on(address: Address, props: Mapping[str, Any]) -> str:
    engine, sudo = props["engine"], "" if address.user == "root" else "sudo "
    return (
        f"{unit_name(engine)} serves on there, from {POD_ROOT}; to take both off, log in as {address.user} and run: "
        f"{sudo}python3 {POD_ROOT}/bin/podctl leave --engine {engine}"
    )


def _say(line: str) -> None:
    """Once in a preview or an update: Pulumi shows what a provider of this kind writes to standard error."""
    if line not in _said:
        _said.add(line)
        print(line, file=sys.stderr, flush=True)


def _off(props: Mapping[str, Any]) -> bool:
    return props.get("running") is False


class ReachedPod(Resource, module="lora-pods", name="ReachedPod"):
    """A pod that answered. `machine` differs whenever everything has to be made so again.

    `plugin_host_key` is the host key that the command plugin will be shown. A machine has several, and the plugin's
    library asks for one kind before the others, whichever was pinned (golang.org/x/crypto/ssh 0.58: ECDSA, then RSA,
    then Ed25519). The pinned key vouches for that one.
    """

    machine: pulumi.Output[str]
    plugin_host_key: pulumi.Output[str]

    def __init__(self, name: str, engine: str, machine: Machine, running: bool, opts: pulumi.ResourceOptions) -> None:
        props: dict[str, Any] = {
            "engine": engine,
            "connection": machine.connection.described(),
            "machine": None,
            "plugin_host_key": None,
        }
        # What is as usual is left out, so that it is no difference from what earlier releases recorded.
        if machine.patience != PATIENCE:
            props["patience"] = machine.patience
        if machine.incarnation is not None:
            props["incarnation"] = machine.incarnation
        if not running:
            props["running"] = False
        super().__init__(ReachedPodProvider(), name, props, opts)
