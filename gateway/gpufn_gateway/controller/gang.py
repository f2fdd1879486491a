"""The record that the assignments of a new gang share: its ranks, and where rank 0 listens."""

from __future__ import annotations

import secrets
from typing import Final

from gpufn_core.domain.worker import Gang, Rank
from gpufn_gateway.controller.state.world import World

# A gang takes two successive ports of rank 0's node. They are below the ports that Linux assigns to outgoing
# connections.
PORTS: Final = range(29400, 30400, 2)


def new_gang(world: World, ranks: tuple[Rank, ...]) -> Gang:
    report = world.nodes[ranks[0].node].report
    address = "" if report is None else report.address
    used = {gang.port for gang, _ in world.gangs() if gang.address == address}
    # At random, because a program that the controller does not know may use a port: the next gang takes another one.
    port = secrets.choice([port for port in PORTS if port not in used] or PORTS)
    return Gang(ranks, address, port, secrets.token_hex(16))
