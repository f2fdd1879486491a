"""One agent per node's name on the whole bus: two would each start every worker of it.

An agent answers who it is. One that starts asks first; where nobody listens the bus says so at once.
"""

from __future__ import annotations

import contextlib
import os
import platform

from gpufn.bus.connection import Bus, Message
from gpufn.errors import BusUnavailable, Conflict
from gpufn.home import Home
from gpufn.protocol import subjects

_ANSWER_S = 0.5  # an agent whose host has gone may still be listed, and says nothing


async def claim(bus: Bus, node: str, home: Home) -> None:
    """Raises Conflict, which says where the other agent is."""
    with contextlib.suppress(BusUnavailable):  # also when nobody listens
        answer = await bus.request(subjects.agent(node), timeout_s=_ANSWER_S)
        other = answer.payload.decode(errors="replace")
        raise Conflict(f"Another agent runs as node {node}, {other}: stop it, or give this one its own GPUFN_NODE.")
    own = f"on {platform.node()} with GPUFN_HOME={home.root}, process {os.getpid()}".encode()

    def tell(message: Message) -> None:
        with contextlib.suppress(BusUnavailable):
            bus.publish(message.reply, own)

    bus.subscribe(subjects.agent(node), tell)
