"""One GPU's control daemon, from its start to its end. It has a folder of its own:

    daemon.json   who it is and how the GPU was before, for an agent that comes after us
    pipe/         where clients find it; nobody else's processes may enter
    log/          control.log, server.log

Clients in containers are processes of another user, and share memory with their server. So for them pipe and log are in
a folder of that user's elsewhere, and another one, in memory, is /dev/shm to the daemon and to its clients.

start    folder, compute mode (when allowed), `nvidia-cuda-mps-control -f`, `start_server -uid`, wait until it is ACTIVE
stop     `quit`, then SIGKILL for what is left; the compute mode as it was; the folders go
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpufn_core.errors import DeviceFailed, GpufnError
from gpufn_runtime.agent.mps import compute_mode
from gpufn_runtime.agent.mps.base import Mounts
from gpufn_runtime.agent.mps.condition import Condition, Observation, Server, condition_of
from gpufn_runtime.agent.mps.control import PROGRAM, Control, ControlFailed, control_environment
from gpufn_runtime.agent.mps.logs import keep_small, last_words
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.processes import Process

log = logging.getLogger(__name__)

_FILE = "daemon.json"
# In a mount namespace of its own. A bind mount takes its options in a second step.
_IN_OWN_MEMORY = 'mount --bind "$0" /dev/shm && mount -o remount,bind,nosuid,nodev,noexec /dev/shm && exec "$1" -f'
_LOOK_EVERY_S = 0.05


class DaemonFile(msgspec.Struct, frozen=True):
    gpu: str
    process: Process | None = None
    servers: tuple[Process, ...] = ()  # a daemon that was killed, or hangs, does not end its own
    container_uid: int | None = None  # its clients live in containers, as this user
    compute_mode_before: str = ""  # empty: it was not changed


def uid_of(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}").st_uid
    return None


def _empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry, ignore_errors=True)
            else:
                os.unlink(entry)


def left_in(folder: Path) -> DaemonFile | None:
    """What an earlier agent has left, whether its daemon runs or not."""
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=DaemonFile)
    except (OSError, msgspec.DecodeError):
        return None


class Elsewhere(NamedTuple):
    """What a daemon has whose clients live in containers: `folder` with pipe/ and log/, `memory` below /dev/shm."""

    folder: Path
    memory: Path


class Daemon:
    """`uid` is whose processes the workers are. With `elsewhere` they live in containers."""

    def __init__(
        self,
        gpu: str,
        folder: Path,
        *,
        uid: int,
        elsewhere: Elsewhere | None = None,
        may_set_compute_mode: bool = False,
        start_timeout_s: float = 10.0,
        stop_timeout_s: float = 5.0,
        uid_of: Callable[[int], int | None] = uid_of,
    ) -> None:
        self.gpu = gpu
        self.folder = folder
        self._elsewhere = elsewhere
        shared = folder if elsewhere is None else elsewhere.folder
        self._log = shared / "log"
        self.pipe = shared / "pipe"
        self.control = Control(self.pipe)
        self._uid = uid
        self._may_set_compute_mode = may_set_compute_mode
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._uid_of = uid_of
        self._file = self._fresh_file()

    @property
    def mounts(self) -> Mounts | None:
        """What containers of its clients have of it; None when they are processes."""
        if self._elsewhere is None:
            return None
        return Mounts(os.fspath(self.pipe), self._uid, os.fspath(self._elsewhere.memory))

    def take_over(self, file: DaemonFile) -> None:
        """Be the daemon that an earlier agent has started."""
        self._file = file

    @property
    def process(self) -> Process | None:
        return self._file.process

    def is_running(self) -> bool:
        return self.process is not None and processes.is_running(self.process)

    async def start(self) -> None:
        """Returns when clients can join. Raises DeviceFailed, and leaves nothing behind then."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        self._make_folders()
        self._write(self._file)
        if self._may_set_compute_mode and not self._file.compute_mode_before:
            before = await compute_mode.read(self.gpu)
            file = msgspec.structs.replace(self._file, compute_mode_before=before)
            if not self._write(file):  # first, for we may die
                self._file = msgspec.structs.replace(file, compute_mode_before="")
                raise DeviceFailed(f"{self.gpu}: how it was cannot be written down, so its compute mode stays")
            await compute_mode.write(self.gpu, compute_mode.EXCLUSIVE)
        self._write(msgspec.structs.replace(self._file, process=self._spawn()))
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._until_active()
        except TimeoutError:
            raise DeviceFailed(
                f"{self.gpu}: no MPS within {self._start_timeout_s:g} s{last_words(self._log)}"
            ) from None
        log.info("%s is shared by MPS: daemon=%d", self.gpu, self._pid)

    def _make_folders(self) -> None:
        """Empty, for what a daemon that died has left would answer for it; but those that there are, for a container
        that is being made has them mounted."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _empty(self.pipe)
        _empty(self._log)
        if self._elsewhere is None:
            self.pipe.mkdir(exist_ok=True, mode=0o700)
            self._log.mkdir(exist_ok=True, mode=0o700)
            return
        _empty(self._elsewhere.memory)
        try:
            for path in self._elsewhere:
                path.parent.mkdir(mode=0o711, exist_ok=True)
                path.mkdir(exist_ok=True, mode=0o700)
                os.chown(path, self._uid, self._uid)
            self.pipe.mkdir(exist_ok=True, mode=0o755)  # not theirs: no client may put another daemon in place of ours
            self._log.mkdir(exist_ok=True, mode=0o700)
            os.chown(self._log, self._uid, self._uid)
        except OSError as error:
            raise DeviceFailed(f"{self.gpu}: {error.filename} cannot be made: {error.strerror}") from error

    def _spawn(self) -> Process | None:
        environment = {
            **control_environment(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self._log),
            "CUDA_VISIBLE_DEVICES": self.gpu,
        }
        command = [PROGRAM, "-f"]
        if self._elsewhere is not None:
            memory = os.fspath(self._elsewhere.memory)
            command = ["unshare", "--mount", "--propagation=private", "sh", "-c", _IN_OWN_MEMORY, memory, PROGRAM]
        try:
            started = subprocess.Popen(  # noqa: S603
                command,
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise DeviceFailed(f"{self.gpu}: {command[0]} cannot be run: {error.strerror}") from error
        started.returncode = 0  # the agent reaps by pid
        return processes.identify(started.pid)

    async def _until_active(self) -> None:
        has_asked = False
        while True:
            found = await self.observe()
            if found is Condition.ACTIVE:
                return
            if found in (Condition.DOWN, Condition.FAULT, Condition.FOREIGN):
                # A daemon needs a moment before it answers at all: HUNG is not the end yet.
                if found is not Condition.DOWN or not self.is_running():
                    raise DeviceFailed(f"{self.gpu}: {found.value}{last_words(self._log)}")
            elif found is Condition.STARTING and not has_asked:
                has_asked = True
                with contextlib.suppress(ControlFailed):
                    await self.control.start_server(self._uid)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def observe(self) -> Condition:
        if not self.is_running():
            return condition_of(Observation(is_alive=False), self._uid)
        try:
            servers = [
                Server(pid, await self.control.status(pid), self._uid_of(pid)) for pid in await self.control.servers()
            ]
            self._remember(server.pid for server in servers if server.uid == self._uid)
        except ControlFailed as error:
            log.debug("%s: %s", self.gpu, error.message)
            return condition_of(Observation(is_alive=self.is_running()), self._uid)
        return condition_of(Observation(is_alive=True, answers=True, servers=tuple(servers)), self._uid)

    def keep_logs_small(self) -> None:
        keep_small(self._log)

    async def clients(self) -> set[int]:
        """Raises ControlFailed."""
        return {client for server in await self.control.servers() for client in await self.control.clients(server)}

    async def terminate(self, pids: Iterable[int]) -> None:
        """Those of `pids` that are clients. Raises ControlFailed."""
        wanted = set(pids)
        for server in await self.control.servers():
            for client in wanted.intersection(await self.control.clients(server)):
                await self.control.terminate_client(server, client)

    async def restart(self) -> None:
        """Its clients have ended before. Raises DeviceFailed."""
        await self._end()
        await self.start()

    async def stop(self) -> None:
        """The GPU is as it was found; never raises."""
        await self._end()
        if self._file.compute_mode_before:
            try:
                await compute_mode.write(self.gpu, self._file.compute_mode_before)
            except GpufnError as error:
                log.warning("%s stays in %s: %s", self.gpu, compute_mode.EXCLUSIVE, error.message)
                return  # its folder stays, so that a later agent tries again
        self._file = self._fresh_file()
        for path in (self.folder, *(self._elsewhere or ())):
            shutil.rmtree(path, ignore_errors=True)

    async def _end(self) -> None:
        if self.is_running():
            with contextlib.suppress(ControlFailed):
                await self.control.quit()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._stop_timeout_s):
                    while self.is_running():  # noqa: ASYNC110 - a process that is no child of ours has no event
                        await asyncio.sleep(_LOOK_EVERY_S)
            if self.is_running() and self.process is not None:
                processes.signal_group(self.process, signal.SIGKILL)
        for server in self._file.servers:
            processes.kill(server)
        if self.process is not None:
            if processes.identify(self.process.pid) == self.process:
                processes.reap(self.process.pid)
            self._write(msgspec.structs.replace(self._file, process=None, servers=()))

    def _fresh_file(self) -> DaemonFile:
        return DaemonFile(self.gpu, container_uid=None if self._elsewhere is None else self._uid)

    @property
    def _pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    def _remember(self, pids: Iterable[int]) -> None:
        servers = tuple(found for found in map(processes.identify, pids) if found is not None)
        if servers != self._file.servers:
            self._write(msgspec.structs.replace(self._file, servers=servers))

    def _write(self, file: DaemonFile) -> bool:
        """Whole or not at all. On a full disk the daemon runs all the same; only a later agent does not know it."""
        self._file = file
        part = self.folder / f".{_FILE}"
        try:
            if self.folder.is_dir():
                part.write_bytes(msgspec.json.encode(file))
                part.replace(self.folder / _FILE)
        except OSError as error:
            log.warning("%s: its MPS daemon cannot be written down: %s", self.gpu, error)
            return False
        return True
