"""GPUFN_ISOLATION: how this node isolates worker processes, given what its kernel allows."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from gpufn_core.spec.isolation import Isolation as Tier
from gpufn_core.spec.isolation import Network
from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.sandbox.support import Support
from gpufn_runtime.agent.isolation.sandboxes import Folder


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
    """Raise InvalidSetting if the node must not run workers."""
    if setting is Isolation.STRICT and (missing := support.missing()):
        raise InvalidSetting(
            f"GPUFN_ISOLATION=strict, and this machine does not allow all parts of the sandbox: {_listed(missing)}. "
            "Allow them, or set GPUFN_ISOLATION=auto."
        )


def describe(setting: Isolation, support: Support) -> str:
    """Describe how this node's worker processes are isolated.

    >>> describe(Isolation.AUTO, Support(signals="Landlock is of version 4"))
    'in a sandbox without signals (Landlock is of version 4)'
    """
    if setting is Isolation.OFF:
        return "without a sandbox (GPUFN_ISOLATION=off)"
    missing = [f"{part} ({reason})" for part, reason in support.missing().items()]
    return f"in a sandbox without {', '.join(missing)}" if missing else "in a sandbox with all parts"


def trouble(setting: Isolation, support: Support) -> dict[str, str]:
    """Return why the node does not offer a tier, or workers without a network (`NodeReport.isolation_trouble`)."""
    if setting is Isolation.OFF:
        return dict.fromkeys((Tier.SANDBOX, Network.NONE), "GPUFN_ISOLATION=off")
    found: dict[str, str] = {}
    if setting is Isolation.STRICT:
        found[Tier.PROCESS] = "GPUFN_ISOLATION=strict"
    if missing := support.missing():
        found[Tier.SANDBOX] = _listed(missing)
    if support.network:
        found[Network.NONE] = support.network
    return found


def _listed(missing: Mapping[str, str]) -> str:
    return "; ".join(f"{part}: {reason}" for part, reason in missing.items())


def folders(text: str) -> tuple[Folder, ...]:
    """Parse GPUFN_SANDBOX_FOLDERS. Raises InvalidSetting.

    >>> folders("/data,/scratch:rw")
    (Folder(path='/data', is_writable=False), Folder(path='/scratch', is_writable=True))
    """
    found = []
    for item in filter(None, text.split(",")):
        path = item.removesuffix(":rw")
        if not path.startswith("/"):
            raise InvalidSetting(
                f"GPUFN_SANDBOX_FOLDERS must be absolute paths, such as /data,/scratch:rw, not {item!r}."
            )
        found.append(Folder(path.rstrip("/") or "/", path != item))
    return tuple(found)
