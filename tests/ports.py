"""Ports that a test chooses before a process listens on them.

They are below those that Linux gives to outgoing connections: a client that dials a port without a listener could
otherwise connect to itself, and a connection could take the port first. Each test process has its own part of the
range, because two processes that draw from one range sometimes get the same port.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
from typing import Final

_FIRST, _END = 10_000, 29_000  # the ports of gangs begin at 29,400
_PROCESSES: Final = 16
_EACH: Final = (_END - _FIRST) // _PROCESSES
_number: Final = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PROCESSES
# Another run of the tests on this machine probably begins elsewhere.
_offsets: Final = itertools.count(random.SystemRandom().randrange(_EACH))


def successive_ports(count: int) -> range:
    """Return ports that nothing uses, and that no earlier call in this process returned lately."""
    while True:
        offset = next(_offsets) % _EACH
        ports = range(_FIRST + _number * _EACH + offset, _FIRST + _number * _EACH + offset + count)
        for _ in range(count - 1):
            next(_offsets)
        if offset + count <= _EACH and all(map(_is_free, ports)):
            return ports


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
