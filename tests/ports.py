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
_EACH: Final = (_END - _FIRST) // 16
_number: Final = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
_own: Final = range(_FIRST + _number * _EACH, _FIRST + (_number + 1) * _EACH)
_start: Final = random.SystemRandom().randrange(_EACH)  # another run on this machine probably begins elsewhere
_ports: Final = itertools.cycle([*_own[_start:], *_own[:_start]])


def successive_ports(count: int) -> list[int]:
    """Return ports that nothing uses. A port is returned again only after all others of this process."""
    while True:
        ports = list(itertools.islice(_ports, count))
        if ports[-1] - ports[0] == count - 1 and all(map(_is_free, ports)):
            return ports


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
