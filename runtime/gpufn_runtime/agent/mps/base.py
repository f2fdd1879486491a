"""The agent's interface to GPU sharing. `daemons` implements it with one MPS v2 control daemon per GPU.

An implementation for MPS v3 could be chosen in `agent/__main__` if `NodeFacts.mps` reports that version:

    joining       a server for the GPU, and a namespace with the share's limits; only its pipe folder must be mounted
    evict         `client terminate`
    worker_ended  delete the namespace
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from gpufn_core.domain.devices.device import DeviceShare
from gpufn_core.domain.revision import RevisionKey
from gpufn_core.spec.priority import Priority
from gpufn_runtime.agent.devices.base import HealthCondition


@dataclass(frozen=True)
class Mounts:
    """Mounts that make a container a client, in addition to its environment: the pipe folder, the user of its
    processes, and the memory that the daemon shares with clients ("" if none). Paths are on this host."""

    pipe: str
    uid: int
    memory: str = ""


@dataclass(frozen=True)
class Joining:
    """Environment and mounts that make a worker a client; empty for other modes."""

    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Mounts | None = None


EndWorker = Callable[[str, str], None]  # called with worker and reason to end a worker because of its GPU


class GpuShares(Protocol):
    """A worker is a tenant of its GPU from `worker_joined` until `worker_ended`."""

    @property
    def has_child_processes(self) -> bool:
        """Whether a child process runs that only its own caller may reap."""

    @property
    def pids(self) -> frozenset[int]:
        """Pids of long-running children."""

    def joining(
        self, key: RevisionKey, share: DeviceShare, *, priority: Priority, contained: bool
    ) -> AbstractAsyncContextManager[Joining, bool | None]:
        """Prepare the GPU for one more worker, in a container or not. `priority` is the class of its function.

        The context must last until the worker has joined or its launch has failed.
        Raises DeviceFailed, or FunctionStartFailed for a function that has made GPUs fail too often.
        """

    def worker_joined(self, worker: str, key: RevisionKey, share: DeviceShare, pid: int) -> None: ...

    def worker_ready(self, worker: str) -> None:
        """Report that the worker takes calls: from now on it must be an MPS client."""

    async def evict(self, worker: str, pids: Iterable[int]) -> None:
        """Prepare a kill: work that a dead client leaves on the GPU can break the other clients. Never raises."""

    def worker_ended(self, worker: str) -> None: ...

    def trouble(self, gpu: str) -> HealthCondition | None:
        """Return why no new worker can join this GPU, or None."""

    async def take_over(self) -> None:
        """Take over the daemons of an earlier agent. Called before any worker joins."""

    async def run(self, end: EndWorker) -> None:
        """Check the daemons regularly, until cancelled."""

    async def stop(self) -> None:
        """Stop the daemons and restore the GPUs' settings. Workers must have ended before."""
