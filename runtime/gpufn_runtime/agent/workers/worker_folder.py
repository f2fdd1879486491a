"""A worker's folder: what its process reads, and what a later agent needs to adopt it.

config.json    WorkerConfig, before the process starts
process.json   ProcessFile, once it runs
output         FIFO, its standard output and error
s              the runner's socket (the runner makes it, before or after us)
tmp/           its home and scratch space
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
from gpufn_runtime.agent.launchers.base import NodeFault
from gpufn_runtime.agent.workers.processes import Process

log = logging.getLogger(__name__)


class ProcessFile(msgspec.Struct, frozen=True, kw_only=True):
    """Who runs in a folder."""

    worker: str
    function: str
    revision: int
    process: Process
    started_at: float  # unix seconds
    cgroup: str | None = None
    container: str = ""  # its id


class WorkerFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def worker(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def output(self) -> Path:
        return self.path / "output"

    @property
    def scratch(self) -> Path:
        return self.path / "tmp"

    @property
    def was_begun(self) -> bool:
        """Has an agent worked on it? The runner may have made the folder before."""
        return self.config.exists() or self.output.exists()

    def create(self, config: WorkerConfig) -> None:
        """Raises NodeFault when the disk does not take it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.scratch.mkdir(exist_ok=True, mode=0o700)
            os.mkfifo(self.output, 0o600)
            self.config.write_bytes(msgspec.json.encode(config))
        except OSError as error:
            raise NodeFault(f"Cannot make the worker's folder {self.path}: {error.strerror}.") from error

    def write_process(self, record: ProcessFile) -> None:
        """Whole or not at all. On a full disk the worker runs all the same; only a later agent cannot adopt it."""
        part = self.path / ".process.json"
        try:
            part.write_bytes(msgspec.json.encode(record))
            part.replace(self.path / "process.json")
        except OSError as error:
            log.warning("%s: cannot write down its process: %s", self.worker, error)

    def read_process(self) -> ProcessFile | None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode((self.path / "process.json").read_bytes(), type=ProcessFile)
        return None

    def open_output(self) -> int:
        """For reading. Opened for both ways, so that it never ends and a worker never writes to nobody."""
        return os.open(self.output, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def remove(self) -> None:
        """Raises OSError for want of what comes back: it is to be tried again."""
        if (error := remove_tree(self.path)) is not None:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise error
            log.warning("%s: its folder cannot be removed: %s", self.worker, error)


def all_folders(home: Home) -> list[WorkerFolder]:
    root = home.worker("x").parent
    with contextlib.suppress(FileNotFoundError):
        return [WorkerFolder(path) for path in sorted(root.iterdir()) if path.is_dir()]
    return []
