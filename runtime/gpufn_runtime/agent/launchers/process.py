"""Cold start: a fresh interpreter in its own session.

A process cannot change its own PID namespace; it chooses the namespace of its children. So the interpreter forks the
worker into the worker's namespace, writes the worker's pid to a pipe, and ends.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from io import FileIO

from gpufn_core.errors import PlatformError
from gpufn_core.protocol.launch import PID_VARIABLE, WITHIN
from gpufn_runtime.agent.environments.environment import Environment
from gpufn_runtime.agent.launchers.base import Launched, LaunchOrder, NodeFault
from gpufn_runtime.agent.workers import processes

_MOVED_WITHIN_S = 60.0  # an interpreter starts in 20 ms, and on an overloaded machine in seconds

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
        sandbox = order.worker_config.sandbox
        if sandbox is None or not sandbox.own_pids:
            return Launched(self._start(order))
        try:
            moved, its_end = os.pipe()
        except OSError as error:
            raise NodeFault.of(error) from error
        with os.fdopen(moved, "rb", buffering=0) as pipe:
            try:
                first = self._start(order, its_end)
            finally:
                os.close(its_end)
            try:
                pid = await _pid_in(pipe)
            except BaseException:
                processes.kill_each([first])
                processes.kill_writers(order.output)  # it may have forked the worker
                raise
        return Launched(pid or first)  # the first one has ended, if it did not move

    def _start(self, order: LaunchOrder, reports_to: int | None = None) -> int:
        """Start the process, which writes its pid to `reports_to` if it moves. Returns the present pid."""
        variables = {} if reports_to is None else {PID_VARIABLE: str(reports_to)}
        # Open for reading and writing: the worker is its own reader, so it gets no SIGPIPE when the agent dies.
        output = os.open(order.output, os.O_RDWR | os.O_CLOEXEC)
        try:
            process = subprocess.Popen(  # noqa: S603 - returns at exec, which takes a millisecond
                [*_cold_command(order, self._command), os.fspath(order.config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=order.folder,
                env=order.environment | variables,
                pass_fds=() if reports_to is None else (reports_to,),
                start_new_session=True,
            )
        except OSError as error:
            raise NodeFault.of(error) from error
        except ValueError as error:  # a null character or a lone surrogate
            raise PlatformError(f"Cannot start {self._command[0]}: {error}.") from error
        finally:
            os.close(output)
        process.returncode = 0  # the agent reaps all children by pid; Popen must not
        return process.pid


async def _pid_in(pipe: FileIO) -> int | None:
    """Return the pid that a worker writes when it has moved; None if it ends before. Raises PlatformError if it does
    neither in time."""
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    loop.add_reader(pipe, is_readable.set)
    try:
        async with asyncio.timeout(_MOVED_WITHIN_S):
            await is_readable.wait()
    except TimeoutError:
        raise PlatformError(f"The worker's process did not enter its sandbox within {_MOVED_WITHIN_S:g} s.") from None
    finally:
        loop.remove_reader(pipe)
    return int(pipe.read(16) or 0) or None
