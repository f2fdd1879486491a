"""One agent, one runner and one builder per node's name on the whole bus: two of a kind would do each thing twice.

Each answers where it runs. One that starts asks first; where nobody listens the bus says so at once.
"""

from __future__ import annotations

import contextlib
import os
import platform

from gpufn_core.errors import BusUnavailable, Conflict
from gpufn_core.home import Home
from gpufn_core.protocol import subjects
from gpufn_platform.bus.connection import Bus, Message

_ANSWER_S = 0.5  # a process whose host has gone may still be listed, and says nothing


async def claim_node(bus: Bus, role: str, node: str, home: Home) -> None:
    """`role`: agent, runner or builder. Raises Conflict, which says where the other one is."""
    subject = subjects.on_node(role, node)
    with contextlib.suppress(BusUnavailable):  # also when nobody listens
        answer = await bus.request(subject, timeout_s=_ANSWER_S)
        other = answer.payload.decode(errors="replace")
        raise Conflict(f"Another {role} runs as node {node}, {other}: stop it, or give this one its own GPUFN_NODE.")
    own = f"on {platform.node()} with GPUFN_HOME={home.root}, process {os.getpid()}".encode()

    def answer_where(message: Message) -> None:
        with contextlib.suppress(BusUnavailable):
            bus.publish(message.reply, own)

    bus.subscribe(subject, answer_where)
