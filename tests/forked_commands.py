"""`gpufn` commands as forks of a process that has imported the command line; `tests.runtime.worker` forks workers.

A new interpreter imports it for 0.2 s of CPU time, which is most of a command, and the tests run hundreds of commands.
In all else a fork is like a new process: it has the environment, the working folder and the network namespace of
its caller. Tests of starting, of signals and of terminals start new processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_REQUEST_BYTES = 1 << 17  # an environment and arguments
# What most commands import when they run.
_ALSO_IMPORTED = (
    "encodings.idna",
    "gpufn.client.client",
    "gpufn.client.login.stored_logins",
    "gpufn.declare.decorator",
    "gpufn.deploy.deploy_source",
    "gpufn.deploy.deployables",
    "gpufn.deploy.deployment",
    "httpcore",
    "httpx",
)


class Fork:
    """A process that ForkedCommands has started, with the methods of subprocess.Popen that tests use."""

    def __init__(self, command: list[str], reply: IO[bytes]) -> None:
        self._command = command
        self._reply = reply
        self.pid = int(reply.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._reply], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self._command, timeout or 0)
            self.returncode = int(self._reply.readline())
            self._reply.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends at this moment
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedCommands:
    """The process that forks, from the first command on. `module` is its program, which calls `served`."""

    def __init__(self, module: str = "tests.forked_commands") -> None:
        self._module = module
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._network = ""

    def _started(self) -> socket.socket:
        """Return the connection to the process, which is in the network namespace of this thread."""
        with self._lock:
            network = os.readlink("/proc/thread-self/ns/net")
            if self._network != network:
                self.stop()
                self._network = network
                self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", self._module, str(theirs.fileno())],
                        cwd=Path(__file__).parent.parent,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )
            assert self._control is not None
            return self._control

    def stop(self) -> None:
        """Let the process end. Its forks go on."""
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait()
        self._network = ""

    def run(
        self, arguments: Sequence[str | Path], environ: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as `subprocess.run` does. Raises subprocess.TimeoutExpired."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            fork = self.start(arguments, environ, output, errors)
            code = fork.wait(timeout_s)
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(
                ["gpufn", *map(str, arguments)], code, output.read().decode(), errors.read().decode()
            )

    def start(
        self,
        arguments: Sequence[str | Path],
        environ: Mapping[str, str],
        output: IO[bytes],
        errors: IO[bytes],
        *,
        start_new_session: bool = False,
    ) -> Fork:
        command = ["gpufn", *map(str, arguments)]
        request = {"command": command, "environ": dict(environ), "cwd": str(Path.cwd()), "session": start_new_session}
        reader, writer = os.pipe()
        try:
            socket.send_fds(self._started(), [json.dumps(request).encode()], [output.fileno(), errors.fileno(), writer])
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        return Fork(command, open(reader, "rb", buffering=0))


def served(control: socket.socket) -> list[str] | None:
    """Fork for each request. Return its command in the fork, and None when the tests have ended."""
    running: dict[int, tuple[int, int]] = {}  # the pid and the pipe of the reply, by pidfd
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != control.fileno():
                pid, reply = running.pop(ready)
                poll.unregister(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(reply, f"{code}\n".encode())
                os.close(reply)
                os.close(ready)
                continue
            request, descriptors, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 3)
            if not request:
                return None
            output, errors, reply = descriptors
            if (pid := os.fork()) == 0:
                control.close()
                os.dup2(output, 1)
                os.dup2(errors, 2)
                for descriptor in (output, errors, reply, *running, *(other for _, other in running.values())):
                    os.close(descriptor)
                return _prepared(**json.loads(request))
            os.write(reply, f"{pid}\n".encode())
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, reply
            poll.register(pidfd, select.POLLIN)
            os.close(output)
            os.close(errors)


def _prepared(command: list[str], environ: Mapping[str, str], cwd: str, *, session: bool) -> list[str]:
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    sys.path[0] = cwd  # as with `python -m gpufn`
    return command


def main() -> None:
    from gpufn.__main__ import main as run
    from gpufn.cli import COMMANDS

    modules = {module.partition(":")[0] for module, _ in COMMANDS.values()}
    for module in (*sorted(each for each in modules if each.startswith("gpufn.")), *_ALSO_IMPORTED):
        importlib.import_module(module)
    gc.freeze()
    command = served(socket.socket(fileno=int(sys.argv[1])))
    if command is not None:
        sys.argv = command
        run()


if __name__ == "__main__":
    main()
