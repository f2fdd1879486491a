"""Folder of a worker: files for its process, and the record that lets a later agent adopt it.

config.json    WorkerConfig, before the process starts
process.json   ProcessFile, once it runs
output         FIFO, its standard output and error
k              the agent's socket for the worker's secrets, until it has received them
s              the runner's socket (the runner may create it before or after the agent creates the folder)
tmp/           home and scratch space
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path

import msgspec

from gpufn_core.home import Home
from gpufn_core.protocol.launch import WorkerConfig
from gpufn_core.remove_folder import remove_tree
from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_platform.process.private_files import write_private
from gpufn_runtime.agent.launchers.base import NodeFault
from gpufn_runtime.agent.workers.processes import Process

log = logging.getLogger(__name__)


class ProcessFile(msgspec.Struct, frozen=True, kw_only=True):
    """The process that runs in a folder."""

    worker: str
    function: str
    revision: int
    process: Process
    started_at: float  # unix seconds
    cgroup: str | None = None
    container: str = ""  # container id


class WorkerFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.worker = path.name
        self.config = path / "config.json"
        self.output = path / "output"
        self.secrets = path / "k"  # short: the path of a unix socket is limited
        self.scratch = path / "tmp"

    @property
    def was_begun(self) -> bool:
        """Whether an agent has worked in the folder. The runner may have created it first."""
        return self.config.exists() or self.output.exists()

    def create(self, config: WorkerConfig) -> None:
        """Create the folder's files. Raises NodeFault if the disk refuses."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.scratch.mkdir(exist_ok=True, mode=0o700)
            os.mkfifo(self.output, 0o600)
            write_private(self.config, msgspec.json.encode(config))
            if config.sandbox is not None:
                Path(config.shared_bodies).mkdir(parents=True, exist_ok=True, mode=0o700)  # to be seen in the sandbox
        except OSError as error:
            raise NodeFault(f"Cannot create the worker's folder {self.path}: {error.strerror}.") from error

    def write_process(self, record: ProcessFile) -> None:
        """Record the process, atomically. If the disk is full, the worker runs anyway but cannot be adopted later."""
        temporary = self.path / ".process.json"
        try:
            write_private(temporary, msgspec.json.encode(record))
            temporary.replace(self.path / "process.json")
        except OSError as error:
            log.warning("cannot record the process of worker %s: %s", self.worker, error)

    def read_process(self) -> ProcessFile | None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode((self.path / "process.json").read_bytes(), type=ProcessFile)
        return None

    def spec(self) -> FunctionSpec | None:
        """Return the spec of the worker's function; None if it cannot be read."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(self.config.read_bytes(), type=WorkerConfig).spec
        return None

    def open_output(self) -> int:
        """Open the FIFO for reading. Read-write mode: there is no end of file, and a worker never lacks a reader."""
        return os.open(self.output, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def remove(self) -> None:
        """Remove the folder. Raises OSError if a resource is exhausted and the caller should retry."""
        if (error := remove_tree(self.path)) is not None:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise error
            log.warning("cannot remove the folder of worker %s: %s", self.worker, error)


def all_folders(home: Home) -> list[WorkerFolder]:
    root = home.worker("x").parent
    with contextlib.suppress(FileNotFoundError):
        return [WorkerFolder(path) for path in sorted(root.iterdir()) if path.is_dir()]
    return []
