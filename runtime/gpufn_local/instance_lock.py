"""The single platform of a GPUFN_HOME: its lock, and the record of its address.

The supervisor holds `up.lock` while it lives, which distinguishes a running platform from the file of a dead one.
`up.json` beside it has the details. A pid alone proves nothing, because the kernel reuses pids.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import msgspec

from gpufn_core.errors import Conflict, PlatformError
from gpufn_core.home import Home
from gpufn_platform.process import grace_period
from gpufn_platform.process.file_lock import is_locked, lock_file
from gpufn_platform.process.private_files import write_private

_STOP_TIMEOUT_S = 120.0  # longer than all timeouts of the supervisor together, except the grace period
_WAITS_S = 1.0


class UpRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of up.json. `nats_url` has no password; `pids` are by process name."""

    pid: int
    url: str
    nats_url: str
    node: str
    pids: dict[str, int] = {}
    ready: bool = False
    grace_s: float = grace_period.GRACE_S


class Instance:
    """A running platform."""

    def __init__(self, home: Home, record: UpRecord, pidfd: int) -> None:
        self.home = home
        self.record = record
        self._pidfd = pidfd

    @classmethod
    def running(cls, home: Home) -> Self | None:
        if not is_locked(_lock_path(home)):
            return None
        try:
            record = msgspec.json.decode(home.up_file.read_bytes(), type=UpRecord)
            pidfd = os.pidfd_open(record.pid)
        except (OSError, msgspec.MsgspecError):
            return None
        if not is_locked(_lock_path(home)):  # it ended in between, and another process may have the pid now
            os.close(pidfd)
            return None
        return cls(home, record, pidfd)

    def stop(self, waits: Callable[[], None] = lambda: None) -> None:
        """Send SIGTERM and wait for the platform to end, calling `waits` each second. An interrupt sends another
        SIGTERM, which ends the grace period; no call is lost."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
        give_up = time.monotonic() + grace_period.grace_s(self.home, self.record.grace_s) + _STOP_TIMEOUT_S
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        while time.monotonic() < give_up:
            try:
                if ended.poll(_WAITS_S * 1000):
                    return
                waits()
            except KeyboardInterrupt:
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
        raise PlatformError(f"gpufn (pid {self.record.pid}) did not stop; its logs are in {self.home.logs}")


def already_up(instance: Instance | None) -> Conflict:
    where = f" at {instance.record.url} (pid {instance.record.pid})" if instance else ""
    return Conflict(f"gpufn is already up{where}; `gpufn down` stops it")


@contextlib.contextmanager
def claimed(home: Home) -> Iterator[None]:
    """Hold the lock of this home. Raises Conflict if a platform already runs."""
    home.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        lock = lock_file(_lock_path(home))
    except BlockingIOError:
        raise already_up(Instance.running(home)) from None
    try:
        with contextlib.suppress(OSError):  # shown only by `gpufn down` without a readable record
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        try:
            yield
        finally:
            home.up_file.unlink(missing_ok=True)  # also after a failed start
    finally:
        os.close(lock)


def unrecorded(home: Home) -> PlatformError | None:
    """Return the error for a platform that runs without a record, or with an unreadable one."""
    if not is_locked(_lock_path(home)):
        return None
    pid = _lock_path(home).read_text(errors="replace") or "unknown"
    return PlatformError(
        f"gpufn runs in {home.root} (pid {pid}), but {home.up_file.name} there has no address: it is starting, or "
        f"that file is damaged; `kill {pid}` stops it"
    )


def write_record(home: Home, record: UpRecord) -> None:
    part = home.up_file.with_suffix(".part")
    write_private(part, msgspec.json.format(msgspec.json.encode(record)))
    part.replace(home.up_file)


def _lock_path(home: Home) -> Path:
    return home.root / "up.lock"
