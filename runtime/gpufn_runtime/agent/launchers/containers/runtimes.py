"""Runtimes of this node's Docker daemon in addition to its default one: gVisor, which isolation="gvisor" needs.

gVisor connects to no Unix socket of the host and opens no FIFO, unless its runtime is registered with options for that.
A worker needs both, for its runner and for its output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

GVISOR: Final = "runsc"
_OPTIONS: Final = {"host-uds": ("open", "all"), "host-fifo": ("open",)}
_INSTALL: Final = "runsc install -- --host-uds=open --host-fifo=open"


def gvisor_trouble(docker_info: Mapping[str, Any]) -> str:
    """Return why containers cannot have gVisor; "" if they can."""
    runtime = (docker_info.get("Runtimes") or {}).get(GVISOR)
    if runtime is None:
        return f"Docker has no runtime {GVISOR}: install gVisor there, and run `{_INSTALL}`"
    given = dict(str(each).lstrip("-").partition("=")[::2] for each in runtime.get("runtimeArgs") or ())
    for option, values in _OPTIONS.items():
        if given.get(option) not in values:
            return f"Docker's runtime {GVISOR} lacks the option --{option}={values[0]}: run `{_INSTALL}`"
    return ""
