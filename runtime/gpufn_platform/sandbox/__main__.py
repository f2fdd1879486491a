"""`python -m gpufn_platform.sandbox MODULE ARGUMENT ...`: runs a module in the sandbox of SANDBOX_VARIABLE.

The module is imported inside, because a library may start threads, and a process with threads cannot enter.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

import msgspec

from gpufn_core.protocol.launch import SANDBOX_VARIABLE, Sandbox
from gpufn_platform.sandbox.enter import enter

_PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    sandbox = msgspec.json.decode(os.environ.pop(SANDBOX_VARIABLE), type=Sandbox)
    try:
        enter(sandbox)
    except OSError as error:
        sys.exit(f"cannot enter the sandbox: {error}")
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
