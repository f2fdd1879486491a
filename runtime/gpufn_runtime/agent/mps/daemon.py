"""MPS control daemon of one GPU. It has its own folder:

    daemon.json   process and original compute mode, for a later agent
    pipe/         pipes for clients; other users' processes cannot enter
    log/          control.log, server.log

Clients in containers are processes of another user and share memory with their server. For them, pipe/ and log/ are in
a separate folder of that user, and a folder in memory serves as /dev/shm for the daemon and its clients.

start    create the folder; set the compute mode (if permitted); run `nvidia-cuda-mps-control -f`; request a server with
         `start_server -uid`; wait until it is ACTIVE
stop     `quit`, then SIGKILL; restore the compute mode; remove the folders
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
from gpufn_platform.process.private_files import write_private
from gpufn_runtime.agent.mps import compute_mode
from gpufn_runtime.agent.mps.base import Mounts
from gpufn_runtime.agent.mps.condition import Condition, Observation, Server, condition_of
from gpufn_runtime.agent.mps.control import PROGRAM, Control, ControlFailed, control_environment
from gpufn_runtime.agent.mps.logs import keep_small, log_tail
from gpufn_runtime.agent.selinux import label_for_containers
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.processes import Process

log = logging.getLogger(__name__)

_FILE = "daemon.json"
# Runs in its own mount namespace. A bind mount needs a second mount call for its options.
_RUN_WITH_OWN_SHM = 'mount --bind "$0" /dev/shm && mount -o remount,bind,nosuid,nodev,noexec /dev/shm && exec "$1" -f'
_POLL_S = 0.05


class DaemonFile(msgspec.Struct, frozen=True):
    gpu: str
    process: Process | None = None
    servers: tuple[Process, ...] = ()  # a killed or hanging daemon does not end its servers
    container_uid: int | None = None  # the user of the clients, if they run in containers
    compute_mode_before: str = ""  # empty if unchanged


def uid_of(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}").st_uid
    return None


def _clear(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry, ignore_errors=True)
            else:
                os.unlink(entry)


def read_daemon_file(folder: Path) -> DaemonFile | None:
    """Read an earlier agent's record, whether its daemon runs or not."""
    try:
        return msgspec.json.decode((folder / _FILE).read_bytes(), type=DaemonFile)
    except (OSError, msgspec.DecodeError):
        return None


class ContainerFolders(NamedTuple):
    """Folders of a daemon whose clients run in containers: `folder` for pipe/ and log/, `memory` for /dev/shm."""

    folder: Path
    memory: Path


class Daemon:
    """Daemon of one GPU. `uid` is the user of the workers. If `container_folders` is given, they run in containers."""

    def __init__(
        self,
        gpu: str,
        folder: Path,
        *,
        uid: int,
        container_folders: ContainerFolders | None = None,
        may_set_compute_mode: bool = False,
        start_timeout_s: float = 10.0,
        stop_timeout_s: float = 5.0,
        uid_of: Callable[[int], int | None] = uid_of,
    ) -> None:
        self.gpu = gpu
        self.folder = folder
        self._container_folders = container_folders
        base = folder if container_folders is None else container_folders.folder
        self._log = base / "log"
        self.pipe = base / "pipe"
        self.control = Control(self.pipe)
        self._uid = uid
        self._may_set_compute_mode = may_set_compute_mode
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._uid_of = uid_of
        self.file = self._new_file()  # replaced to take over the daemon that an earlier agent started

    @property
    def mounts(self) -> Mounts | None:
        """Return the mounts for containers of clients, or None if the clients are processes."""
        if self._container_folders is None:
            return None
        return Mounts(os.fspath(self.pipe), self._uid, os.fspath(self._container_folders.memory))

    @property
    def process(self) -> Process | None:
        return self.file.process

    def is_running(self) -> bool:
        return self.process is not None and processes.is_running(self.process)

    async def start(self) -> None:
        """Start the daemon and wait until clients can join. Raises DeviceFailed, after cleaning up."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        self._make_folders()
        self._write(self.file)
        if self._may_set_compute_mode and not self.file.compute_mode_before:
            mode_before = await compute_mode.read(self.gpu)
            file = msgspec.structs.replace(self.file, compute_mode_before=mode_before)
            if not self._write(file):  # before the change, because the agent may die
                self.file = msgspec.structs.replace(file, compute_mode_before="")
                raise DeviceFailed(f"{self.gpu}: its compute mode is not changed: the original cannot be recorded")
            await compute_mode.write(self.gpu, compute_mode.EXCLUSIVE)
        self._write(msgspec.structs.replace(self.file, process=self._spawn()))
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._wait_until_active()
        except TimeoutError:
            problem = f"MPS did not start within {self._start_timeout_s:g} s{log_tail(self._log)}"
            raise DeviceFailed(f"{self.gpu}: {problem}") from None
        log.info("GPU %s is shared by MPS: daemon=%d", self.gpu, self.process.pid if self.process else 0)

    def _make_folders(self) -> None:
        """Create the folders, empty: files of a dead daemon would answer for the new one. Existing folders are kept,
        because a container that is being created may have them mounted."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _clear(self.pipe)
        _clear(self._log)
        if self._container_folders is None:
            self.pipe.mkdir(exist_ok=True, mode=0o700)
            self._log.mkdir(exist_ok=True, mode=0o700)
            return
        _clear(self._container_folders.memory)
        try:
            for path in self._container_folders:
                path.parent.mkdir(mode=0o711, exist_ok=True)
                path.mkdir(exist_ok=True, mode=0o700)
                os.chown(path, self._uid, self._uid)
            self.pipe.mkdir(exist_ok=True, mode=0o755)  # ours, so that no client can replace the daemon by another
            self._log.mkdir(exist_ok=True, mode=0o700)
            os.chown(self._log, self._uid, self._uid)
            label_for_containers(*self._container_folders)
        except OSError as error:
            raise DeviceFailed(f"{self.gpu}: cannot create {error.filename}: {error.strerror}") from error

    def _spawn(self) -> Process | None:
        environment = {
            **control_environment(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self._log),
            "CUDA_VISIBLE_DEVICES": self.gpu,
        }
        command = [PROGRAM, "-f"]
        if self._container_folders is not None:
            memory = os.fspath(self._container_folders.memory)
            command = ["unshare", "--mount", "--propagation=private", "sh", "-c", _RUN_WITH_OWN_SHM, memory, PROGRAM]
        try:
            process = subprocess.Popen(  # noqa: S603
                command,
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise DeviceFailed(f"{self.gpu}: cannot run {command[0]}: {error.strerror}") from error
        process.returncode = 0  # the agent reaps all children by pid
        return processes.identify(process.pid)

    async def _wait_until_active(self) -> None:
        has_requested = False
        while True:
            condition = await self.observe()
            if condition is Condition.ACTIVE:
                return
            # A starting daemon needs a moment before it answers, so HUNG is no failure yet.
            has_ended = condition is Condition.DOWN and not self.is_running()
            if has_ended or condition in (Condition.FAULT, Condition.FOREIGN):
                raise DeviceFailed(f"{self.gpu}: {condition.value}{log_tail(self._log)}")
            if condition is Condition.STARTING and not has_requested:
                has_requested = True
                with contextlib.suppress(ControlFailed):
                    await self.control.start_server(self._uid)
            await asyncio.sleep(_POLL_S)

    async def observe(self) -> Condition:
        if not self.is_running():
            return condition_of(Observation(is_alive=False), self._uid)
        try:
            servers = [
                Server(pid, await self.control.status(pid), self._uid_of(pid)) for pid in await self.control.servers()
            ]
            self._record_servers(server.pid for server in servers if server.uid == self._uid)
        except ControlFailed as error:
            log.debug("%s: %s", self.gpu, error.message)
            return condition_of(Observation(is_alive=self.is_running()), self._uid)
        return condition_of(Observation(is_alive=True, answers=True, servers=tuple(servers)), self._uid)

    def keep_logs_small(self) -> None:
        keep_small(self._log)

    async def clients(self) -> set[int]:
        """Return the pids of all clients. Raises ControlFailed."""
        return {client for server in await self.control.servers() for client in await self.control.clients(server)}

    async def terminate(self, pids: Iterable[int]) -> None:
        """Terminate the clients among `pids`. Raises ControlFailed."""
        wanted = set(pids)
        for server in await self.control.servers():
            for client in wanted.intersection(await self.control.clients(server)):
                await self.control.terminate_client(server, client)

    async def restart(self) -> None:
        """Restart. The clients must have ended before. Raises DeviceFailed."""
        await self._end()
        await self.start()

    async def stop(self) -> None:
        """Stop the daemon and restore the GPU's settings. Never raises."""
        await self._end()
        if self.file.compute_mode_before:
            try:
                await compute_mode.write(self.gpu, self.file.compute_mode_before)
            except GpufnError as error:
                log.warning("GPU %s stays in mode %s: %s", self.gpu, compute_mode.EXCLUSIVE, error.message)
                return  # the folder stays, so that a later agent tries again
        self.file = self._new_file()
        for path in (self.folder, *(self._container_folders or ())):
            shutil.rmtree(path, ignore_errors=True)

    async def _end(self) -> None:
        if self.is_running():
            with contextlib.suppress(ControlFailed):
                await self.control.quit()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._stop_timeout_s):
                    while self.is_running():  # noqa: ASYNC110 - an adopted process has no event to wait for
                        await asyncio.sleep(_POLL_S)
            if self.is_running() and self.process is not None:
                processes.signal_group(self.process, signal.SIGKILL)
        for server in self.file.servers:
            processes.kill(server)
        if self.process is not None:
            if processes.identify(self.process.pid) == self.process:
                processes.reap(self.process.pid)
            self._write(msgspec.structs.replace(self.file, process=None, servers=()))

    def _new_file(self) -> DaemonFile:
        return DaemonFile(self.gpu, container_uid=None if self._container_folders is None else self._uid)

    def _record_servers(self, pids: Iterable[int]) -> None:
        servers = tuple(server for server in map(processes.identify, pids) if server is not None)
        if servers != self.file.servers:
            self._write(msgspec.structs.replace(self.file, servers=servers))

    def _write(self, file: DaemonFile) -> bool:
        """Record the daemon, atomically. If the disk is full, it runs anyway, but a later agent does not find it."""
        self.file = file
        temporary = self.folder / f".{_FILE}"
        try:
            if self.folder.is_dir():
                write_private(temporary, msgspec.json.encode(file))
                temporary.replace(self.folder / _FILE)
        except OSError as error:
            log.warning("cannot record the MPS daemon of GPU %s: %s", self.gpu, error)
            return False
        return True
