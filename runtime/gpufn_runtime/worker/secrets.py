"""Secrets of a worker: received from the agent once, into this process's environment variables.

They are not in `/proc/PID/environ`, which shows the environment at the start of the process.
"""

from __future__ import annotations

import contextlib
import os
import socket

import msgspec

from gpufn_platform.secrets.redaction import Patterns, patterns_of

_READ_BYTES = 1 << 16
_TIMEOUT_S = 30.0


def receive(path: str) -> Patterns:
    """Receive the secrets, and return the patterns that output must not show. Raises OSError."""
    _keep_out_of_core_dumps()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
        agent.settimeout(_TIMEOUT_S)
        agent.connect(path)
        data = bytearray()
        while part := agent.recv(_READ_BYTES):
            data += part
    try:
        values = msgspec.json.decode(data, type=dict[str, str])
    except msgspec.MsgspecError:
        raise ConnectionResetError("the agent ended before it had sent them") from None
    os.environ.update(values)
    return patterns_of(values.values())


def _keep_out_of_core_dumps() -> None:
    """Write no memory to a core dump. The limit of 0 bytes does not apply if the kernel pipes dumps to a program. Child
    processes inherit both."""
    with contextlib.suppress(OSError), open("/proc/self/coredump_filter", "w") as file:
        file.write("0")
