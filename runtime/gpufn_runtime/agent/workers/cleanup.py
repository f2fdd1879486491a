"""What workers leave is removed: processes and memory group, the Assignment, which frees the lease, and the folder."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gpufn_core.errors import PlatformError
from gpufn_core.protocol import subjects
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.process.tasks import Tasks
from gpufn_runtime.agent.decide.fleet import Fleet, Phase, WorkerRecord
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.cgroups import MemoryGroup, MemoryGroups
from gpufn_runtime.agent.workers.worker_folder import ProcessFile, WorkerFolder

log = logging.getLogger(__name__)

# What was killed takes a moment to be gone, and seconds with a model on a GPU. That cannot be had by anybody before, so
# the lease is held meanwhile; not for ever, for a sick driver may never let a process go.
_REMOVE_TRIES, _REMOVE_PAUSE_S = 1000, 0.01
_LOOKS, _LOOK_PAUSE_S = 100, 0.1

_T = TypeVar("_T")


class Burials:
    """The fleet forgets a worker of which nothing is left, and `buried` is called. The bus is asked again each
    `retry_s` until it has taken a deletion."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        node: str,
        assignments: KeyValue,
        groups: MemoryGroups,
        buried: Callable[[], None],
        retry_s: float,
    ) -> None:
        self._fleet = fleet
        self._node = node
        self._assignments = assignments
        self._groups = groups
        self._buried = buried
        self._retry_s = retry_s
        self._tasks = Tasks()
        self._old_groups: list[MemoryGroup] = []

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._tasks)

    def bury(self, record: WorkerRecord, folder: WorkerFolder, group: MemoryGroup | None) -> None:
        """A worker that has no process, or none any more."""
        record.phase = Phase.GONE
        self._tasks.start(self._bury(record, folder, group), f"bury-{record.worker}")

    def delete(self, worker: str) -> None:
        """An Assignment that has no worker here."""
        self._tasks.start(self._delete(worker), f"delete-{worker}")

    def sweep(self, folder: WorkerFolder, file: ProcessFile | None) -> None:
        """A folder that an earlier agent left and nobody is assigned to. Its worker may have been started without
        having been written down."""
        if (group := self.group_left(folder.worker, file)) is not None:
            group.kill()
            self._old_groups.append(group)
        self._tasks.start(self._sweep(folder), f"sweep-{folder.worker}")

    def group_left(self, worker: str, file: ProcessFile | None) -> MemoryGroup | None:
        """The memory group of a worker that an earlier agent started."""
        if file is None:
            return self._groups.find_left(worker)
        return MemoryGroup(Path(file.cgroup)) if file.cgroup else None

    def step(self) -> None:
        """Remove the groups that were not empty before, and end what is in them still: who forks without end had a
        child whenever all were killed."""
        self._old_groups = [group for group in self._old_groups if not group.remove()]
        for group in self._old_groups:
            group.kill()

    async def done(self) -> None:
        await self._tasks.done()

    def cancel(self) -> None:
        """The next agent goes on."""
        self._tasks.cancel()

    async def _sweep(self, folder: WorkerFolder) -> None:
        await self._kill_all(folder)
        await self._in_the_end(folder, folder.remove)

    async def _bury(self, record: WorkerRecord, folder: WorkerFolder, group: MemoryGroup | None) -> None:
        if group is None:
            await self._kill_all(folder)
        else:
            await self._empty(group)
        if record.assignment is not None:
            await self._delete(record.worker)
        # Not before: to an agent that comes after us, who has an Assignment and no folder was never launched.
        await self._in_the_end(folder, folder.remove)
        self._fleet.forget(record.worker)
        self._buried()

    async def _kill_all(self, folder: WorkerFolder) -> None:
        """It may have left processes in sessions of their own."""
        for _ in range(_LOOKS):
            if not await self._in_the_end(folder, processes.kill_worker, folder.output, folder.scratch):
                return
            await asyncio.sleep(_LOOK_PAUSE_S)
        log.warning("%s has left processes that cannot be killed", folder.worker)

    async def _in_the_end(self, folder: WorkerFolder, work: Callable[..., _T], *of: Path) -> _T:
        """In a thread, again and again, for what is lacking comes back: the lease is held until then."""
        has_said_why = False
        while True:
            try:
                return await asyncio.to_thread(work, *of)
            except (OSError, RuntimeError) as error:  # no file, or thread, to be had
                if not has_said_why:
                    has_said_why = True
                    log.warning("%s cannot be buried yet: %s", folder.worker, error)
            await asyncio.sleep(self._retry_s)

    async def _empty(self, group: MemoryGroup) -> None:
        """End all that is left in it, and remove it; what takes longer is removed by a later step."""
        for _ in range(_REMOVE_TRIES):
            if group.remove():
                return
            group.kill()
            await asyncio.sleep(_REMOVE_PAUSE_S)
        self._old_groups.append(group)

    async def _delete(self, worker: str) -> None:
        """Again and again until the bus has taken it: the lease is held until then."""
        key = subjects.assignment_key(self._node, worker)
        has_said_why = False
        while True:
            try:
                await self._assignments.delete(key)
                return
            except PlatformError as error:
                if not has_said_why:
                    has_said_why = True
                    log.warning("%s: its assignment cannot be deleted yet: %s", worker, error.message)
            await asyncio.sleep(self._retry_s)
