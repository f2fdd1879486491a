"""Run the actions of a controller step: write records by compare-and-set, end queued calls. Each action is a task.

The World learns of an action before the bus does, and the change is undone in the World if the action fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gpufn_core.domain.revision import Check, RevisionState
from gpufn_core.domain.worker import Assignment, Desired, Rank
from gpufn_core.errors import Conflict, PlatformError, RevisionNotFound
from gpufn_core.ids import new_worker_id
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_gateway.buckets import Buckets, decode_assignment, decode_revision
from gpufn_gateway.controller.decide import actions
from gpufn_gateway.controller.decide.actions import Action
from gpufn_gateway.controller.gang import new_gang
from gpufn_gateway.controller.state.world import World
from gpufn_platform.bus.connection import Bus, NotStored
from gpufn_platform.bus.leader_lease import LeaderLease
from gpufn_platform.bus.storage.key_value import Entry
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue import queue_position

log = logging.getLogger(__name__)

_NewDesired = actions.Drain | actions.Park | actions.Resume


@dataclass(kw_only=True, eq=False)
class ActionRunner:
    """`versions` are the versions of the function records, kept by their watcher. `on_change(function)` is called
    when the World has changed."""

    bus: Bus
    world: World
    buckets: Buckets
    versions: Mapping[str, int]
    lease: LeaderLease
    clock: Clock
    on_change: Callable[[str], None]
    _tasks: Tasks = field(default_factory=Tasks, init=False)
    _in_progress: set[Action] = field(default_factory=set, init=False)

    async def finish(self, timeout_s: float) -> None:
        """Wait for the actions that were started."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._tasks.done()

    def begin(self, action: Action, now: float) -> None:
        if not isinstance(action, actions.Start):  # two equal starts are two workers; other actions run once at a time
            if action in self._in_progress:
                return
            self._in_progress.add(action)
        match action:
            case actions.Start():
                coroutine = self._start(action, now)
            case actions.Drain():
                coroutine = self._set_desired(action, Desired.DRAIN)
            case actions.Park():
                coroutine = self._set_desired(action, Desired.PARK, action.host_bytes, action.expected_bytes)
            case actions.Resume():
                coroutine = self._set_desired(action, Desired.RUN)
            case actions.Delete():
                coroutine = self._delete(action)
            case actions.MoveServing():
                coroutine = self._move(action)
            case actions.MoveActive():
                coroutine = self._move_back(action)
            case actions.EndCheck():
                coroutine = self._end_check(action)
            case actions.EndQueued():
                coroutine = self._end_queued(action)
        self._tasks.start(self._guarded(action, coroutine), type(action).__name__)

    async def _guarded(self, action: Action, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except PlatformError as error:
            if isinstance(error, NotStored):
                self.world.store.record_failure(self.clock.monotonic())
            log.warning("could not run %s; the next step retries: %s", type(action).__name__, error, extra=_ids(action))
        except Exception:
            log.exception("%s failed", type(action).__name__, extra=_ids(action))
        finally:
            self._in_progress.discard(action)

    def _start(self, action: actions.Start, now: float) -> Coroutine[Any, Any, None]:
        places = [(action.node, action.share), *((other.node, other.share) for other in action.others)]
        ranks = tuple(Rank(new_worker_id(), node) for node, _ in places)
        gang = new_gang(self.world, ranks) if action.others else None
        assignments = [
            Assignment(
                worker=rank.worker,
                node=node,
                function=action.function,
                revision=action.revision,
                share=share,
                epoch=self.lease.epoch,
                created_at=self.clock.time(),
                reason=action.reason,
                gang=gang,
            )
            for rank, (node, share) in zip(ranks, places, strict=True)
        ]
        for assignment in assignments:
            self.world.on_assignment(assignment.worker, assignment, now)
        workers = [self.world.workers[assignment.worker] for assignment in assignments]
        self.on_change(action.function)  # to report it

        async def create() -> None:
            try:
                for assignment in assignments:
                    await self.buckets.assignments.create(_key(assignment), encode(assignment))
            except PlatformError:
                # The ranks that were stored lack one now, so a step drains them.
                for worker in workers:
                    if not worker.version:  # if the record was stored after all, the watch reports it
                        self.world.on_assignment(worker.assignment.worker, None, self.clock.monotonic())
                raise
            self.world.store.record_success()
            log.info("starting a worker: %s", action.reason, extra=_ids(action) | {"worker": ranks[0].worker})

        return create()

    def _set_desired(
        self, action: _NewDesired, desired: Desired, park_bytes: int = 0, expected_bytes: int = 0
    ) -> Coroutine[Any, Any, None]:
        """Update the World, and with it every lease, at once. Then write the record until it has the latest state."""
        worker = self.world.workers.get(action.worker)
        if worker is not None:
            self.world.set_desired(worker, desired, park_bytes, expected_bytes)
            self.on_change(worker.key[0])  # to report it

        async def write() -> None:
            if worker is None:
                return
            key = _key(worker.assignment)
            stored, version = worker.assignment, worker.version
            try:
                while (entry := await self.buckets.assignments.get(key)) is not None:
                    stored, version = decode_assignment(entry.value), entry.revision
                    if stored.epoch > self.lease.epoch:
                        # Another controller leads, and nothing acted on our change.
                        worker.drain_requested = worker.assignment.desired is Desired.DRAIN
                        return
                    if stored.desired in (worker.desired, Desired.DRAIN):
                        return
                    updated = msgspec.structs.replace(
                        stored,
                        desired=worker.desired,
                        park_bytes=worker.park_bytes,
                        epoch=self.lease.epoch,
                        reason=action.reason,
                        cause=action.cause,
                    )
                    with contextlib.suppress(Conflict):
                        await self.buckets.assignments.update(key, encode(updated), entry.revision)
                        self.world.store.record_success()
                        log.info("asked a worker to %s: %s", updated.desired, action.reason, extra=_ids(action))
            except PlatformError:
                worker.drain_requested = worker.drain_requested and desired is not Desired.DRAIN
                raise
            finally:
                self.world.on_written(worker, stored, version)

        return write()

    async def _delete(self, action: actions.Delete) -> None:
        worker = self.world.workers.get(action.worker)
        if worker is not None:
            log.warning("released the lease of a lost worker: %s", action.reason, extra={"worker": action.worker})
            await self.buckets.assignments.delete(_key(worker.assignment))

    async def _move(self, action: actions.MoveServing) -> None:
        function = self.world.functions.get(action.function)
        if function is None or function.active != action.revision:
            return
        moved = msgspec.structs.replace(function, serving=action.revision, updated_at=self.clock.time(), traffic=None)
        try:
            await self.buckets.functions.update(action.function, encode(moved), self.versions[action.function])
        except Conflict:
            return  # a deploy or `gpufn scale` wrote first; the watch reports it, and the next step decides again
        log.info("calls go to the new revision now: %s", action.reason, extra=_ids(action))

    async def _move_back(self, action: actions.MoveActive) -> None:
        function = self.world.functions.get(action.function)
        if function is None or function.active != action.revision:
            return
        moved = msgspec.structs.replace(function, active=function.serving, updated_at=self.clock.time())
        with contextlib.suppress(Conflict):  # as in `_move`
            await self.buckets.functions.update(action.function, encode(moved), self.versions[action.function])
            log.warning("%s is active again: %s", f"{action.function}@{function.serving}", action.reason)

    async def _end_check(self, action: actions.EndCheck) -> None:
        def update(entry: Entry | None) -> bytes:
            if entry is None:
                raise RevisionNotFound(f"{action.function} has no revision {action.revision}.")
            revision = decode_revision(entry.value)
            if not revision.is_checked_first:
                return entry.value
            state = revision.state if action.error is None else RevisionState.FAILED
            check = Check(action.state, action.reason)
            return encode(msgspec.structs.replace(revision, state=state, check=check, error=action.error))

        with contextlib.suppress(RevisionNotFound):  # deleted in the meantime
            await self.buckets.revisions.change(subjects.revision_key(action.function, action.revision), update)
            log.info("the check of a revision ended: %s %s", action.state, action.reason, extra=_ids(action))

    async def _end_queued(self, action: actions.EndQueued) -> None:
        ended = await queue_position.end_queued(
            self.bus, action.function, action.revision, kind=action.kind, error=action.error, now=self.clock.time()
        )
        if ended:
            log.info("ended %d queued calls: %s", ended, action.error.message, extra=_ids(action))


def _key(assignment: Assignment) -> str:
    return subjects.assignment_key(assignment.node, assignment.worker)


def _ids(action: Action) -> dict[str, object]:
    names = ("function", "revision", "worker", "node")
    return {name: getattr(action, name) for name in names if hasattr(action, name)}
