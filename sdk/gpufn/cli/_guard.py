"""A fork of the supervisor that ends nats-server when the supervisor was killed: nobody else could tell it to."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def guard() -> Iterator[Callable[[int], None]]:
    """A fork that ends the nats-server it was last told of when our end of the pipe closes without a word."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _keep_guard(reader)
        finally:
            os._exit(0)
    os.close(reader)
    try:
        yield lambda bus_pid: _told(writer, bus_pid)
    finally:
        _told(writer, 0)
        os.close(writer)
        os.waitpid(pid, 0)


def _told(writer: int, bus_pid: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(writer, b"%d\n" % bus_pid)


def _keep_guard(reader: int) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Nothing of the parent's may stay open here: its lock, its terminal, the other end of the pipe.
    os.closerange(3, reader)
    os.closerange(reader + 1, 65_536)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    pidfd = -1
    while words := os.read(reader, 4096).split():
        if pidfd >= 0:
            os.close(pidfd)
        pidfd = -1
        if (pid := int(words[-1])) > 0:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
    if pidfd >= 0:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
