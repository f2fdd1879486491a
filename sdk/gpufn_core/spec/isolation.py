"""How a function's workers are isolated: the tiers, and which network they have."""

from __future__ import annotations

import enum


class Isolation(enum.StrEnum):
    PROCESS = "process"  # a process with the rights of the platform's user
    SANDBOX = "sandbox"  # a process in a sandbox with all parts; refused where the kernel lacks one
    CONTAINER = "container"
    GVISOR = "gvisor"
    VM = "vm"


class Network(enum.StrEnum):
    FULL = "full"  # the network of the node
    EGRESS = "egress"  # the internet, but no private network and not the node
    NONE = "none"


LEAST = (Isolation.PROCESS, Isolation.SANDBOX, Isolation.CONTAINER)  # the tiers that a team can require, in order
# A worker reaches its runner by a Unix socket of the node. Kata's virtual machines show its file, but a kernel does not
# connect to another one's socket.
NO_RUNTIME = frozenset({Isolation.VM})
IN_CONTAINER = frozenset({Isolation.CONTAINER, Isolation.GVISOR, Isolation.VM})
OWN_RUNTIME = frozenset({Isolation.GVISOR})  # containers that need a runtime of Docker that nodes may lack
OWN_NETWORK = frozenset({Network.EGRESS, Network.NONE})  # networks that a node must be able to set up
AS_PROCESS = frozenset({Isolation.PROCESS, Isolation.SANDBOX})


def contradiction(isolation: Isolation | None, network: Network | None, *, has_image: bool, egress: bool) -> str:
    """Return why the options exclude each other, and the remedy; "" if they can.

    >>> contradiction(Isolation.VM, None, has_image=False, egress=False)
    "isolation='vm': a virtual machine cannot connect to the socket of its node's runner; use 'gvisor' or 'container'"
    """
    in_container = has_image or isolation in IN_CONTAINER
    asked = "" if isolation is None else f"isolation={isolation.value!r}"
    reasons = {
        f"{asked}: a virtual machine cannot connect to the socket of its node's runner; use 'gvisor' or "
        "'container'": isolation in NO_RUNTIME,
        f"{asked} and image=... contradict each other: an image runs in a container": has_image
        and isolation in AS_PROCESS,
        "egress=... and network=... set the same: write network='egress' instead of egress=True": egress
        and network is not None,
        f"network={network and network.value!r} needs a sandbox or a container: remove {asked}": network in OWN_NETWORK
        and isolation is Isolation.PROCESS,
        "a container has no access to the node's own network: write network='egress'": network is Network.FULL
        and in_container,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
