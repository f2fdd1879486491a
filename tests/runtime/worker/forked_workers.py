"""Workers as forks of a process that has imported them: a new interpreter imports for 0.1 s of CPU time.

A fork is a cold worker in all else: it reads its config, and connects to its runner. Tests of the start of the
interpreter launch new processes.
"""

from __future__ import annotations

import gc
import os
import socket
import sys

import gpufn_runtime.worker.lifecycle  # noqa: F401  for the forks
from gpufn_runtime.worker.__main__ import main as run
from tests.forked_commands import served


def main() -> None:
    gc.freeze()
    command = served(socket.socket(fileno=int(sys.argv[1])))
    if command is not None:
        gc.unfreeze()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        sys.argv = command
        sys.exit(run(command[1:]))


if __name__ == "__main__":
    main()
