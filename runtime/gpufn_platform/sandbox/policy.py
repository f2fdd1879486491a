"""GPUFN_ISOLATION: how this node isolates processes that run user code or read user files, given its kernel."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.sandbox.support import Support


class Isolation(enum.StrEnum):
    AUTO = "auto"  # with the parts of the sandbox that the kernel allows
    STRICT = "strict"  # with all parts, or not at all
    OFF = "off"  # without a sandbox, for debugging


def isolation(text: str) -> Isolation:
    """Parse GPUFN_ISOLATION. Raises InvalidSetting."""
    if not text:
        return Isolation.AUTO
    if text not in tuple(Isolation):
        raise InvalidSetting(f"GPUFN_ISOLATION must be auto, strict or off, not {text!r}.")
    return Isolation(text)


def check(setting: Isolation, support: Support) -> None:
    """Raise InvalidSetting if the node must not run such processes."""
    if setting is Isolation.STRICT and (missing := support.missing()):
        raise InvalidSetting(
            f"GPUFN_ISOLATION=strict, and this machine does not allow all parts of the sandbox: {listed(missing)}. "
            "Allow them, or set GPUFN_ISOLATION=auto."
        )


def describe(setting: Isolation, support: Support) -> str:
    """Describe how this node's processes are isolated.

    >>> describe(Isolation.AUTO, Support(signals="Landlock is of version 4"))
    'in a sandbox without signals (Landlock is of version 4)'
    """
    if setting is Isolation.OFF:
        return "without a sandbox (GPUFN_ISOLATION=off)"
    missing = [f"{part} ({reason})" for part, reason in support.missing().items()]
    if missing:
        return f"in a sandbox without {', '.join(missing)}"
    return "in a sandbox with all parts"


def is_complete(setting: Isolation, support: Support) -> bool:
    return setting is not Isolation.OFF and not support.missing()


def listed(missing: Mapping[str, str]) -> str:
    return "; ".join(f"{part}: {reason}" for part, reason in missing.items())
