"""Cold start: a fresh interpreter in its own session."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from gpufn_core.errors import PlatformError
from gpufn_core.protocol.launch import WITHIN
from gpufn_runtime.agent.environments.environment import Environment
from gpufn_runtime.agent.launchers.base import Launched, LaunchOrder, NodeFault

# -P: do not import from the worker's folder, where the worker may write.
WORKER = (sys.executable, "-P", "-m", "gpufn_runtime.worker")


def command_in(environment: Environment | None, command: Sequence[str]) -> tuple[str, ...]:
    """Return the worker's command with the interpreter of its environment; None: with the agent's."""
    return tuple(command) if environment is None else (environment.python, *WORKER[1:])


def _cold_command(order: LaunchOrder, command: Sequence[str]) -> tuple[str, ...]:
    """Return the command of a cold worker. An environment's Python runs code of its packages as soon as it starts (.pth
    files, sitecustomize), so the agent's Python enters the sandbox first."""
    if order.python is None or order.worker_config.sandbox is None:
        return command_in(order.python, command)
    return (*command, WITHIN, order.python.python)


class ProcessLauncher:
    """Starts workers cold. `command` receives the path of the config file as its last argument."""

    def __init__(self, command: Sequence[str] = WORKER) -> None:
        self._command = command

    async def launch(self, order: LaunchOrder) -> Launched:
        # Open for reading and writing: the worker is its own reader, so it gets no SIGPIPE when the agent dies.
        output = os.open(order.output, os.O_RDWR | os.O_CLOEXEC)
        try:
            process = subprocess.Popen(  # noqa: S603, ASYNC220 - returns at exec, which takes a millisecond
                [*_cold_command(order, self._command), os.fspath(order.config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=order.folder,
                env=order.environment,
                start_new_session=True,
            )
        except OSError as error:
            raise NodeFault.of(error) from error
        except ValueError as error:  # a null character or a lone surrogate
            raise PlatformError(f"Cannot start {self._command[0]}: {error}.") from error
        finally:
            os.close(output)
        process.returncode = 0  # the agent reaps all children by pid; Popen must not
        return Launched(process.pid)
