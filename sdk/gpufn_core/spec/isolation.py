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
    EGRESS = "egress"  # other machines, but no loopback address of the node
    NONE = "none"


LEAST = (Isolation.PROCESS, Isolation.SANDBOX, Isolation.CONTAINER)  # the tiers that a team can require, in order
NO_RUNTIME = frozenset({Isolation.GVISOR, Isolation.VM})  # names without an implementation in this release
AS_PROCESS = frozenset({Isolation.PROCESS, Isolation.SANDBOX})


def contradiction(isolation: Isolation | None, network: Network | None, *, has_image: bool, egress: bool) -> str:
    """Return why the options cannot be had together, and what to do; "" if they can.

    >>> contradiction(Isolation.GVISOR, None, has_image=False, egress=False)
    "isolation='gvisor': this release of gpufn has no runtime for it; use 'container' or 'sandbox'"
    """
    in_container = has_image or isolation is Isolation.CONTAINER
    asked = "" if isolation is None else f"isolation={isolation.value!r}"
    reasons = {
        f"{asked}: this release of gpufn has no runtime for it; use 'container' or 'sandbox'": isolation in NO_RUNTIME,
        f"{asked} and image=... contradict each other: an image runs in a container": has_image
        and isolation in AS_PROCESS,
        "egress=... and network=... set the same: write network='egress' instead of egress=True": egress
        and network is not None,
        f"network='none' needs a sandbox or a container: remove {asked}": network is Network.NONE
        and isolation is Isolation.PROCESS,
        "network='egress' needs a container, because a sandbox has the node's network or none: set "
        "isolation='container', or network='full' or 'none'": network is Network.EGRESS and not in_container,
        "a container has no access to the node's own network: write network='egress'": network is Network.FULL
        and in_container,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
