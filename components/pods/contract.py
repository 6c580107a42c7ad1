"""What every kind of pod yields, whatever it is: the rest of the program knows no other difference."""

from __future__ import annotations

from dataclasses import dataclass

import pulumi

from components.remote import Connection

PATIENCE = 60


@dataclass(frozen=True)
class Machine:
    """A machine that can be reached.

    `identity` changes when it is another machine under the same address, or one that was switched on again by us, so
    that everything is made so, and proven, again.
    `endpoint` is the engine's OpenAI URL as this laptop reaches it; where the engine listens on the pod's loopback
    only, as the pod does. `resource` is set where the machine itself is one of ours, and all on it goes with it.
    `ready` is what has to be there before it can be reached, and `patience` how many seconds it is given to answer.
    `incarnation` is set where the way to it says nothing of it: when it changes, the machine is (re)starting, and is
    waited for.
    """

    connection: Connection
    identity: pulumi.Input[str]
    endpoint: pulumi.Output[str]
    resource: pulumi.Resource | None = None
    ready: tuple[pulumi.Resource, ...] = ()
    patience: int = PATIENCE
    incarnation: pulumi.Input[str] | None = None
