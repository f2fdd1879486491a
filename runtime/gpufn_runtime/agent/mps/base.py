"""What the agent asks of MPS. `daemons` answers by a control daemon per GPU (v2). MPS v3 would be another answer to the
same questions, which `agent/__main__` would choose where `NodeFacts.mps` says that it is there:

    prepare   a server for the GPU, a namespace with the share's limits; its folder of pipes is the only mount
    evict     `client terminate`
    left      the namespace goes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from gpufn_core.domain.device import DeviceShare
from gpufn_core.domain.revision import RevisionKey
from gpufn_runtime.agent.devices.base import Trouble


@dataclass(frozen=True)
class Mounts:
    """What a container needs to be a client, beside its environment: the folder of pipes, whose processes clients are,
    and the memory that the daemon shares with them; empty where it shares none. Paths of this host."""

    pipe: str
    uid: int
    memory: str = ""


@dataclass(frozen=True)
class Joining:
    """What makes a worker's process a client; nothing for a share of another mode."""

    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Mounts | None = None


End = Callable[[str, str], None]  # has the agent end a worker because of its GPU, and says why


class GpuShares(Protocol):
    """A worker is a tenant of its GPU from `joined` to `left`."""

    @property
    def is_asking(self) -> bool:
        """Whether a child process of ours is under way that nobody else may reap."""
        ...

    @property
    def pids(self) -> frozenset[int]:
        """Children that live on."""
        ...

    def joining(
        self, key: RevisionKey, share: DeviceShare, *, contained: bool
    ) -> AbstractAsyncContextManager[Joining, bool | None]:
        """The GPU is ready for one more worker, which lives in a container or does not, until that has `joined`, or
        could not be launched: that is inside, however long it takes.

        Raises DeviceFailed, and FunctionStartFailed for a function that has brought GPUs down too often.
        """
        ...

    def joined(self, worker: str, key: RevisionKey, share: DeviceShare, pid: int) -> None: ...

    def is_ready(self, worker: str) -> None:
        """It takes calls: from now on it must be a client."""
        ...

    async def evict(self, worker: str, pids: Iterable[int]) -> None:
        """Before it is killed: work that a dead client has left on the GPU can bring the others down. Never raises."""
        ...

    def left(self, worker: str) -> None: ...

    def trouble(self, gpu: str) -> Trouble | None:
        """Why nobody new can join there."""
        ...

    async def take_over(self) -> None:
        """What an earlier agent has left. Before any worker joins."""
        ...

    async def run(self, end: End) -> None:
        """Look after the daemons until cancelled."""
        ...

    async def stop(self) -> None:
        """End the daemons, and leave the GPUs as they were found. Workers have ended before."""
        ...
