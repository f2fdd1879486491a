"""Cleanup after workers: processes, memory cgroup, Assignment (which releases the lease) and folder."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
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

# A killed process takes a moment to end, and seconds with a model on a GPU. The lease is held meanwhile, because its
# GPU memory is not free before. The wait is bounded: with a sick driver a process may never end.
_REMOVE_TRIES, _REMOVE_PAUSE_S = 1000, 0.01
_KILL_TRIES, _KILL_PAUSE_S = 100, 0.1

_T = TypeVar("_T")


class Cleanup:
    """Cleanup tasks. After a worker's cleanup the fleet forgets it and `on_done` is called. Failed deletions of
    Assignments are retried every `retry_s`. If `tasks` are cancelled, the next agent finishes the cleanup."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        node: str,
        assignments: KeyValue,
        groups: MemoryGroups,
        on_done: Callable[[], None],
        retry_s: float,
    ) -> None:
        self._fleet = fleet
        self._node = node
        self._assignments = assignments
        self._groups = groups
        self._on_done = on_done
        self._retry_s = retry_s
        self.tasks = Tasks()
        self._old_groups: list[MemoryGroup] = []

    def clean_up(self, record: WorkerRecord, folder: WorkerFolder, group: MemoryGroup | None) -> None:
        """Clean up after a worker that has no process, or whose process has ended."""
        record.phase = Phase.ENDED
        self.tasks.start(self._clean_up(record, folder, group), f"clean-up-{record.worker}")

    def delete(self, worker: str) -> None:
        """Delete an Assignment that has no worker here."""
        self.tasks.start(self._delete(worker), f"delete-{worker}")

    def sweep(self, folder: WorkerFolder, file: ProcessFile | None) -> None:
        """Remove an earlier agent's folder that has no Assignment. Its worker may have been started without being
        recorded."""
        if (group := self.find_group(folder.worker, file)) is not None:
            group.kill()
            self._old_groups.append(group)
        self.tasks.start(self._sweep(folder), f"sweep-{folder.worker}")

    def find_group(self, worker: str, file: ProcessFile | None) -> MemoryGroup | None:
        """Return the memory cgroup of a worker that an earlier agent started."""
        if file is None:
            return self._groups.find_existing(worker)
        return MemoryGroup(Path(file.cgroup)) if file.cgroup else None

    def step(self) -> None:
        """Retry the removal of non-empty cgroups and kill their processes again: a fork bomb may have had a child
        whenever all known processes were killed."""
        self._old_groups = [group for group in self._old_groups if not group.remove()]
        for group in self._old_groups:
            group.kill()

    async def _sweep(self, folder: WorkerFolder) -> None:
        await self._kill_all(folder)
        await self._in_thread(folder, folder.remove)

    async def _clean_up(self, record: WorkerRecord, folder: WorkerFolder, group: MemoryGroup | None) -> None:
        if group is None:
            await self._kill_all(folder)
        else:
            await self._empty(group)
        if record.assignment is not None:
            await self._delete(record.worker)
        # Last: for a later agent, a worker with an Assignment but without a folder was never launched.
        await self._in_thread(folder, folder.remove)
        self._fleet.forget(record.worker)
        self._on_done()

    async def _kill_all(self, folder: WorkerFolder) -> None:
        """Kill all processes of the worker, including those in their own sessions."""
        for _ in range(_KILL_TRIES):
            if not await self._in_thread(folder, processes.kill_worker, folder.output, folder.scratch):
                return
            await asyncio.sleep(_KILL_PAUSE_S)
        log.warning("worker %s has left processes that cannot be killed", folder.worker)

    async def _in_thread(self, folder: WorkerFolder, function: Callable[..., _T], *args: Path) -> _T:
        """Call `function` in a thread until it succeeds: missing file descriptors, threads and memory come back."""
        work = functools.partial(asyncio.to_thread, function, *args)
        return await self._retry(work, f"worker {folder.worker} cannot be cleaned up yet")

    async def _retry(self, work: Callable[[], Awaitable[_T]], warning: str) -> _T:
        """Retry `work` until it succeeds. The lease is held until then."""
        has_warned = False
        while True:
            try:
                return await work()
            except (OSError, RuntimeError, PlatformError) as error:
                if not has_warned:
                    has_warned = True
                    log.warning("%s: %s", warning, error)
            await asyncio.sleep(self._retry_s)

    async def _empty(self, group: MemoryGroup) -> None:
        """Kill all processes in the cgroup and remove it. If that takes too long, a later `step` continues."""
        for _ in range(_REMOVE_TRIES):
            if group.remove():
                return
            group.kill()
            await asyncio.sleep(_REMOVE_PAUSE_S)
        self._old_groups.append(group)

    async def _delete(self, worker: str) -> None:
        key = subjects.assignment_key(self._node, worker)
        delete = functools.partial(self._assignments.delete, key)
        await self._retry(delete, f"assignment of worker {worker} cannot be deleted yet")
