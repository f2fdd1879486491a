"""Shared state of a stop of one GPUFN_HOME: how long calls may take to finish, and how many still run.

`gpufn down --grace` writes its value to a file, because processes read their settings only at startup. The agent writes
the number of running calls to another file, for progress output.
"""

from __future__ import annotations

import contextlib
from typing import Final

from gpufn_core.home import Home
from gpufn_platform.process.file_lock import is_locked
from gpufn_platform.process.private_files import write_private

GRACE_S: Final = 30.0


def set_grace(home: Home, grace_s: float) -> None:
    """Set the grace period of the stop that follows. Raises OSError."""
    write_private(home.grace_file, repr(grace_s).encode())


def grace_s(home: Home, default: float) -> float:
    """Return the grace period that `gpufn down` set for this stop, else `default`."""
    try:
        return max(0.0, float(home.grace_file.read_text()))
    except (OSError, ValueError):
        return default


def set_running_calls(home: Home, calls: int) -> None:
    """Report the number of calls that still run."""
    with contextlib.suppress(OSError):  # a full disk must not keep the platform from stopping
        write_private(home.calls_running_file, str(calls).encode())


def running_calls(home: Home) -> int | None:
    """Return how many calls still run on this node while it stops, or None if that is not reported yet."""
    try:
        return int(home.calls_running_file.read_text())
    except (OSError, ValueError):
        return None


def describe_running_calls(calls: int | None) -> str:
    """Return the number of running calls as text; "" if it is unknown or zero.

    >>> describe_running_calls(1), describe_running_calls(2000), describe_running_calls(0), describe_running_calls(None)
    ('1 call still runs', '2,000 calls still run', '', '')
    """
    if not calls:
        return ""
    return "1 call still runs" if calls == 1 else f"{calls:,} calls still run"


def is_stopping(home: Home) -> bool:
    """Return whether the agent of this home is alive and has reported that it is stopping."""
    return has_agent(home) and running_calls(home) is not None


def has_agent(home: Home) -> bool:
    """Return whether an agent of this home is running, by its lock."""
    with contextlib.suppress(OSError):
        return is_locked(home.agent_lock)
    return False


def clear_grace(home: Home) -> None:
    """Remove the grace period after the stop."""
    with contextlib.suppress(OSError):
        home.grace_file.unlink(missing_ok=True)


def clear_running_calls(home: Home) -> None:
    """Remove the number of running calls: the agent has stopped, or is starting."""
    with contextlib.suppress(OSError):
        home.calls_running_file.unlink(missing_ok=True)
