"""What starts a worker's process."""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from gpufn_core.errors import PlatformError
from gpufn_core.protocol.launch import EXIT_SIGNALLED, WorkerConfig
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_runtime.agent.mps.base import Mounts
from gpufn_runtime.agent.workers.processes import Handle


@dataclass(frozen=True)
class LaunchOrder:
    """`output` is a FIFO that somebody reads; the process works in `folder`. `config` is where `told` is written down.
    With an `image`, it lives in a container of it."""

    worker: str
    folder: Path
    config: Path
    output: Path
    environment: dict[str, str] = field(repr=False)
    told: WorkerConfig = field(repr=False)
    modules: frozenset[str] = frozenset()
    image: ImageSpec | None = None
    gpus: tuple[str, ...] = ()  # the leased devices' uuids
    mps: Mounts | None = None  # of a container whose worker shares its GPU by MPS


@dataclass(frozen=True)
class Launched:
    pid: int
    is_standby: bool = False  # forked from a template, or in a container that was there
    container: str = ""  # the id of its container, whose first process `pid` is
    handle: Handle | None = None  # of a process that is not our child: it may end before anybody else can open one


class NodeFault(PlatformError):
    """This node, and no function, is to blame that there is no process: it has no more open files, say."""

    @classmethod
    def of(cls, error: OSError) -> Self:
        return cls(f"Cannot start a process: {error.strerror or error}.")


class DaemonAway(NodeFault):
    """What makes this node's containers does not answer: none can be started until it does."""


class ContainerGone(PlatformError):
    """There is no such container or image, or it does not run."""


class ContainerEnd(NamedTuple):
    """How a container's first process ended, which is no child of ours, with `code` and `signal` as in Exit; None is
    what nobody knows. `exceeded_bytes` is the memory limit that processes of it were killed for."""

    code: int | None = None
    signal: int | None = None
    exceeded_bytes: int | None = None

    @classmethod
    def of(cls, code: int, *, exceeded_bytes: int | None = None) -> Self:
        """As a shell tells it: above 128 perhaps of a signal, where there is one; `sys.exit(-1)` is no signal's."""
        signal = code - EXIT_SIGNALLED
        return cls(code, signal if signal in signals.valid_signals() else None, exceeded_bytes)


class Launcher(Protocol):
    async def launch(self, order: LaunchOrder) -> Launched:
        """Raises PlatformError when there is no process, NodeFault when there could be none for anybody."""
        ...


class Containers(Protocol):
    """What looks after containers that workers were launched in."""

    async def end_of(self, container: str) -> ContainerEnd:
        """Raises PlatformError."""
        ...

    def let_go(self, container: str) -> None:
        """Its worker is gone."""
        ...
