"""Watchdog notifications: a process reports that its event loop is alive, so that a hung process can be restarted.

The protocol is systemd's (sd_notify(3), ``WatchdogSec=`` in systemd.service(5)). The listener is systemd if it started
the process, or `gpufn up` (`gpufn_local.watchdog_listener`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Final

ALIVE: Final = b"WATCHDOG=1"
_PER_TIMEOUT: Final = 3  # notifications per timeout, so that one notification may be late


def notify_watchdog(environ: Mapping[str, str] = os.environ) -> None:
    """Notify the watchdog periodically while the event loop runs. Does nothing if there is no watchdog."""
    address, limit_us, pid = (environ.get(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"))
    if not address or not limit_us.isdigit() or pid not in ("", str(os.getpid())):
        return
    target = "\0" + address[1:] if address.startswith("@") else address
    interval_s = int(limit_us) / 1e6 / _PER_TIMEOUT
    loop = asyncio.get_running_loop()

    def notify() -> None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            out.sendto(ALIVE, target)
        loop.call_later(interval_s, notify)

    notify()
