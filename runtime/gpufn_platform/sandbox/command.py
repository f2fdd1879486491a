"""`python -m gpufn_platform.sandbox.command COMMAND...`: runs a command in the sandbox of GPUFN_SANDBOX, or in none,
within the limits of GPUFN_LIMITS.

The processes that the command starts end with it, and the command ends with the process that started this one.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

import msgspec

from gpufn_core.protocol.launch import LIMITS_VARIABLE, SANDBOX_VARIABLE, BuildLimits, Sandbox
from gpufn_platform.sandbox.descendants import go_on_in_child
from gpufn_platform.sandbox.enter import enter

_PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> int:
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if text := os.environ.pop(LIMITS_VARIABLE, ""):
            _limit(msgspec.json.decode(text, type=BuildLimits))
        if text := os.environ.pop(SANDBOX_VARIABLE, ""):
            enter(msgspec.json.decode(text, type=Sandbox))
        else:
            go_on_in_child(is_in_namespace=False)
        os.execv(command[0], command)  # noqa: S606
    except OSError as error:
        print(f"error: cannot run {command[0]} in a sandbox: {error}", file=sys.stderr)  # noqa: T201
        return 1


def _limit(limits: BuildLimits) -> None:
    if limits.cgroup_procs:
        with open(limits.cgroup_procs, "w") as file:
            file.write("0")
    elif limits.memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))
    if limits.file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
