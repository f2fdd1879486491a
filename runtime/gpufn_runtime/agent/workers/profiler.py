"""CPU profiles of workers by py-spy, which reads the stacks of a process from outside.

py-spy stays outside the worker, so it can profile a hung worker, and workers in sandboxes and containers. The kernel
lets the agent read processes of its own user, unless `kernel.yama.ptrace_scope` forbids it.

py-spy runs in the PID namespace of the worker, with a /proc of that namespace. A Python thread stores its number in its
own namespace. From outside, py-spy would find no thread by that number, and count all threads as running.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from gpufn_core.domain.profiles.stacks import shortened
from gpufn_core.errors import BusUnavailable, Conflict, GpufnError, InvalidInput, PlatformError, WorkerLost
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.profiles import LONGEST_PROFILE_S, MAX_STACKS_BYTES, RATE, ProfileReply, ProfileRequest
from gpufn_platform.bus.connection import Bus, Message, Subscription
from gpufn_platform.process.tasks import Tasks
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.running_workers import RunningWorker

_EXTRA_S: Final = 20.0  # for py-spy to find the symbols and to write the file
_PROGRAM: Final = "py-spy"
# A function chooses how deep its stacks are, and the names in them: 100 stacks a second may have 80 MB.
_MEMORY_BYTES: Final = 1 << 30
_FILE_BYTES: Final = 64 << 20
_LIMITED: Final = ("prlimit", f"--data={_MEMORY_BYTES}", f"--fsize={_FILE_BYTES}")
_VISIT: Final = (sys.executable, "-P", "-m", "gpufn_platform.sandbox.visit")
_KILLED_BY_LIMITS: Final = (-signal.SIGABRT, -signal.SIGXFSZ)
_request = msgspec.msgpack.Decoder(ProfileRequest)


class CannotProfile(Conflict):
    """This node cannot profile the worker."""

    retryable = False


class Profiler:
    """Answers requests for profiles of this node's workers, one at a time per worker."""

    def __init__(self, bus: Bus, node: str, workers: Mapping[str, RunningWorker]) -> None:
        self._bus = bus
        self._node = node
        self._workers = workers
        self._busy: set[str] = set()
        self._tasks = Tasks("profile")

    @property
    def has_child_processes(self) -> bool:
        return bool(self._busy)

    def start(self) -> Subscription:
        return self._bus.subscribe(subjects.profile(self._node), self._on_message)

    def stop(self) -> None:
        self._tasks.cancel()

    def _on_message(self, message: Message) -> None:
        self._tasks.start(self._respond(message))

    async def _respond(self, message: Message) -> None:
        try:
            request = _request.decode(message.payload)
            stacks = await self.profile(request)
            reply = ProfileReply(await asyncio.to_thread(shortened, stacks, MAX_STACKS_BYTES))
        except GpufnError as error:
            reply = ProfileReply(error=error.info())
        except (OSError, msgspec.MsgspecError) as error:
            reply = ProfileReply(error=PlatformError(f"The node {self._node} cannot profile: {error}").info())
        with contextlib.suppress(BusUnavailable):  # the gateway reports a timeout
            self._bus.publish(message.reply, encode(reply))

    async def profile(self, request: ProfileRequest) -> str:
        """Return the folded stacks of a worker. Raises WorkerLost, CannotProfile, Conflict, InvalidInput."""
        if not 0 < request.seconds <= LONGEST_PROFILE_S:
            raise InvalidInput(f"a profile takes at most {LONGEST_PROFILE_S:g} s", field="seconds")
        worker = self._workers.get(request.worker)
        if worker is None:
            raise WorkerLost(f"The worker {request.worker} has ended.")
        program = find_program()
        if program is None:
            raise CannotProfile(f"The node {self._node} has no {_PROGRAM}: pip install 'gpufn[profile]' there.")
        if request.worker in self._busy:
            raise Conflict(f"The worker {request.worker} is being profiled: try again when that has ended.")
        self._busy.add(request.worker)
        try:
            return await self._record(program, worker, request)
        finally:
            self._busy.discard(request.worker)

    async def _record(self, program: str, worker: RunningWorker, request: ProfileRequest) -> str:
        with tempfile.TemporaryDirectory(prefix="gpufn-profile-") as folder:
            out = Path(folder, "stacks")
            process = await asyncio.create_subprocess_exec(
                *_command(program, worker, request, out),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                async with asyncio.timeout(request.seconds + _EXTRA_S):
                    said, _ = await process.communicate()
            except TimeoutError:
                raise CannotProfile(f"{_PROGRAM} did not end in time on the node {self._node}.") from None
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)  # with what runs in the worker's namespace
            if not processes.is_running(worker.process):
                raise WorkerLost(f"The worker {request.worker} ended while it was profiled.")
            if process.returncode in _KILLED_BY_LIMITS:
                raise CannotProfile(
                    f"The stacks of {request.worker} are too large for {_PROGRAM}: profile it for less than "
                    f"{request.seconds:g} s."
                )
            if process.returncode != 0:
                lines = said.decode(errors="replace").strip().splitlines() or ["no reason"]
                raise CannotProfile(f"{_PROGRAM} cannot read {request.worker} on {self._node}: {lines[0]}")
            return await asyncio.to_thread(out.read_text, errors="replace")


def _command(program: str, worker: RunningWorker, request: ProfileRequest, out: Path) -> list[str]:
    entered, pid = _way_to(worker)
    return [
        *_LIMITED, *entered, program, "record", "--pid", str(pid), "--output", os.fspath(out), "--format", "raw",
        "--duration", f"{max(1, round(request.seconds))}", "--rate", str(RATE), "--nonblocking",
        *(["--idle"] if request.idle else []),
    ]  # fmt: skip


def _way_to(worker: RunningWorker) -> tuple[tuple[str, ...], int]:
    """Return the command that enters the PID namespace of the worker's Python, and the pid of Python there. In a
    container Python is the first child of the container's init. Raises WorkerLost."""
    pids = processes.children_of(worker.process)[:1] if worker.container else [worker.process.pid]
    for pid in pids:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
            return (*_VISIT, str(pid)) if len(numbers) > 1 else (), int(numbers[-1])
    raise WorkerLost(f"The worker {worker.record.worker} has ended.")


def find_program() -> str | None:
    """Return the path of py-spy: beside this interpreter, or on the PATH."""
    folder = os.path.dirname(sys.executable)
    return shutil.which(_PROGRAM, path=os.pathsep.join([folder, os.environ.get("PATH", os.defpath)]))
