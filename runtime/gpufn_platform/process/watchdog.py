"""A process that hangs is ended and started again: each tells whoever started it that its event loop turns.

The words are systemd's (sd_notify(3), ``WatchdogSec=`` of systemd.service(5)), so it is systemd that listens where it
started the process, and `gpufn up` where that did (`gpufn_local.watchdog_listener`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Final

ALIVE: Final = b"WATCHDOG=1"
_OFTENER: Final = 3  # than it has to be: one may be late


def tell_watchdog(environ: Mapping[str, str] = os.environ) -> None:
    """From now on, for as long as the running event loop turns. Nothing where nobody listens."""
    address, limit_us, pid = (environ.get(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"))
    if not address or not limit_us.isdigit() or pid not in ("", str(os.getpid())):
        return
    where = "\0" + address[1:] if address.startswith("@") else address
    every_s = int(limit_us) / 1e6 / _OFTENER
    loop = asyncio.get_running_loop()

    def tell() -> None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            out.sendto(ALIVE, where)
        loop.call_later(every_s, tell)

    tell()
