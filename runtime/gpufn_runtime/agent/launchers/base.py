"""Interfaces and types shared by all launchers."""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from gpufn_core.errors import PlatformError
from gpufn_core.protocol.launch import EXIT_SIGNALLED, WorkerConfig
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_runtime.agent.environments.environment import Environment
from gpufn_runtime.agent.mps.base import Mounts
from gpufn_runtime.agent.workers.processes import Handle


@dataclass(frozen=True)
class LaunchOrder:
    """A worker to launch in `folder`. `output` is a FIFO that the agent reads. `worker_config` is written to the file
    `config`. If `image` is set, the worker runs in a container of that image; if `python` is set, in that
    environment."""

    worker: str
    folder: Path
    config: Path
    output: Path
    environment: dict[str, str] = field(repr=False)
    worker_config: WorkerConfig = field(repr=False)
    modules: frozenset[str] = frozenset()
    domain: str = ""  # the trust domain of the function
    python: Environment | None = None
    image: ImageSpec | None = None
    gpus: tuple[str, ...] = ()  # uuids of the leased devices
    mps: Mounts | None = None  # for a container whose worker shares its GPU through MPS


@dataclass(frozen=True)
class Launched:
    pid: int
    is_standby: bool = False  # forked from a template, or started in a standby container
    container: str = ""  # container id; `pid` is the container's first process
    handle: Handle | None = None  # opened by the launcher if the process is not our child: it may end at any time
    refused_modules: str = ""  # why some of its modules are in no template, if they cannot be


class NodeFault(PlatformError):
    """The node, not the function, prevented the start: for example, no file descriptors are left."""

    @classmethod
    def of(cls, error: OSError) -> Self:
        return cls(f"Cannot start a process: {error.strerror or error}.")


class DaemonUnavailable(NodeFault):
    """The container daemon does not answer. No container can start until it does."""


class ContainerGone(PlatformError):
    """The container or image does not exist, or the container does not run."""


class ContainerEnd(NamedTuple):
    """How a container's first process, which is not our child, ended. `code` and `signal` are as in Exit; None means
    unknown. `exceeded_bytes` is the memory limit for which the kernel killed processes of the container."""

    code: int | None = None
    signal: int | None = None
    exceeded_bytes: int | None = None

    @classmethod
    def of(cls, code: int, *, exceeded_bytes: int | None = None) -> Self:
        """Read an exit status as a shell does: above 128 it may mean a signal. `sys.exit(-1)` gives 255: no signal."""
        signal = code - EXIT_SIGNALLED
        return cls(code, signal if signal in signals.valid_signals() else None, exceeded_bytes)


class Launcher(Protocol):
    async def launch(self, order: LaunchOrder) -> Launched:
        """Launch the worker. Raises PlatformError if that fails, NodeFault if the node could start none for any
        function."""


class Containers(Protocol):
    """Manages the containers in which workers run."""

    async def end_of(self, container: str) -> ContainerEnd:
        """Return how a container ended. Raises PlatformError."""

    def release(self, container: str) -> None:
        """Release the container of a worker that has ended."""
