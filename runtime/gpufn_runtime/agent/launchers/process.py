"""A cold worker: a fresh interpreter in a session of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from gpufn_core.errors import PlatformError
from gpufn_runtime.agent.launchers.base import Launched, LaunchOrder, NodeFault

# -P: the worker's folder, where it may write, is no place to import from.
WORKER = (sys.executable, "-P", "-m", "gpufn_runtime.worker")


class ProcessLauncher:
    """`command` gets the config file's path as its last argument."""

    def __init__(self, command: Sequence[str] = WORKER) -> None:
        self._command = command

    async def launch(self, order: LaunchOrder) -> Launched:
        # Both ways, so that the worker is its own reader: when the agent dies, it gets no SIGPIPE.
        output = os.open(order.output, os.O_RDWR | os.O_CLOEXEC)
        try:
            process = subprocess.Popen(  # noqa: S603, ASYNC220 - returns at exec, which takes a millisecond
                [*self._command, os.fspath(order.config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=order.folder,
                env=order.environment,
                start_new_session=True,
            )
        except OSError as error:
            raise NodeFault.of(error) from error
        except ValueError as error:  # a null character, or half of a surrogate pair
            raise PlatformError(f"Cannot start {self._command[0]}: {error}.") from error
        finally:
            os.close(output)
        process.returncode = 0  # the agent reaps by pid, also what it did not start; Popen must not
        return Launched(process.pid)
