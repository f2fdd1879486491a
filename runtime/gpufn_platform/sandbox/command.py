"""`python -m gpufn_platform.sandbox.command COMMAND...`: runs a command in the sandbox of GPUFN_SANDBOX, or in none.

The command ends with the process that started this one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import msgspec

from gpufn_core.protocol.launch import SANDBOX_VARIABLE, Sandbox
from gpufn_platform.sandbox.enter import enter

_PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> int:
    try:
        if text := os.environ.pop(SANDBOX_VARIABLE, ""):
            enter(msgspec.json.decode(text, type=Sandbox))
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.execv(command[0], command)  # noqa: S606
    except OSError as error:
        print(f"error: cannot run {command[0]} in a sandbox: {error}", file=sys.stderr)  # noqa: T201
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
