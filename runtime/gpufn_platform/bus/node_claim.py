"""One agent, runner and builder per node name on the whole bus: two of a kind would do everything twice.

Each process answers on a subject of its node. A starting process sends a request there first; if no process is
subscribed, the bus responds at once.
"""

from __future__ import annotations

import contextlib
import os
import platform

from gpufn_core.errors import BusUnavailable, Conflict
from gpufn_core.home import Home
from gpufn_core.protocol import subjects
from gpufn_platform.bus.connection import Bus, Message

_TIMEOUT_S = 0.5  # the server may still list a process on a lost host, which does not respond


async def claim_node(bus: Bus, role: str, node: str, home: Home) -> None:
    """Claim `node` for `role` (agent, runner or builder). Raises Conflict, which names the location of the other
    process."""
    subject = subjects.on_node(role, node)
    with contextlib.suppress(BusUnavailable):  # also if no process is subscribed
        response = await bus.request(subject, timeout_s=_TIMEOUT_S)
        location = response.payload.decode(errors="replace")
        raise Conflict(f"Another {role} runs as node {node}, {location}: stop it, or set a different GPUFN_NODE here.")
    own_location = f"on {platform.node()} with GPUFN_HOME={home.root}, process {os.getpid()}".encode()

    def report_location(message: Message) -> None:
        with contextlib.suppress(BusUnavailable):
            bus.publish(message.reply, own_location)

    bus.subscribe(subject, report_location)
