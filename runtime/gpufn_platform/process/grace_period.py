"""How the processes of one GPUFN_HOME stop together: for how long calls may finish, and how many still run.

`gpufn down --grace` leaves its number in a file, for the processes read their settings when they start. The agent
writes the number of calls that run into another one, for who shows progress.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Final

from gpufn_core.home import Home

GRACE_S: Final = 30.0


def set_grace(home: Home, grace_s: float) -> None:
    """For the stop that follows. Raises OSError."""
    _grace_file(home).write_text(repr(grace_s))


def grace_s(home: Home, default: float) -> float:
    """For this stop: as `gpufn down` said, else `default`."""
    try:
        return max(0.0, float(_grace_file(home).read_text()))
    except (OSError, ValueError):
        return default


def set_running(home: Home, calls: int) -> None:
    with contextlib.suppress(OSError):  # a full disk keeps no platform from stopping
        _running_file(home).write_text(str(calls))


def running(home: Home) -> int | None:
    """How many calls still run on this node, while it stops; None: nobody has said so yet."""
    try:
        return int(_running_file(home).read_text())
    except (OSError, ValueError):
        return None


def still_running(calls: int | None) -> str:
    """
    >>> still_running(1), still_running(2000), still_running(0), still_running(None)
    ('1 call still runs', '2,000 calls still run', '', '')
    """
    if not calls:
        return ""
    return "1 call still runs" if calls == 1 else f"{calls:,} calls still run"


def is_under_way(home: Home) -> bool:
    """Whether the agent of this home lives and says that it stops."""
    return has_agent(home) and running(home) is not None


def has_agent(home: Home) -> bool:
    """Whether an agent holds its lock."""
    try:
        lock = os.open(home.agent_lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def forget_grace(home: Home) -> None:
    """The stop that it was for is over."""
    with contextlib.suppress(OSError):
        _grace_file(home).unlink(missing_ok=True)


def forget_running(home: Home) -> None:
    """The agent has stopped, or starts."""
    with contextlib.suppress(OSError):
        _running_file(home).unlink(missing_ok=True)


def _grace_file(home: Home) -> Path:
    return home.run / "grace"


def _running_file(home: Home) -> Path:
    return home.run / "calls-running"
