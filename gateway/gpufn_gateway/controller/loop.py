"""The controller's loop: receive, step, act.

1. Watches and subscriptions keep the World current on every controller, so a new leader starts warm.
2. Each second: renew or try to acquire the lease. The leader then reads the backlogs and takes a full step.
3. In between, a wakeup names functions (a call without a READY worker, a worker that became ready or ended, a changed
   record), and a step decides for these functions only. A step is synchronous: between the wakeup and its Assignment
   there is only the publish.
4. Actions run as tasks (`execute`). The World learns of them before the bus does, so that no step repeats an action.
5. `reports` publishes the result of the steps.

While the bus is unreachable, steps stop but workers do not: no decision is made, and afterwards the silence timers of
nodes and runners restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

import msgspec

from gpufn_core.domain.revision import RevisionKey
from gpufn_core.errors import BusUnavailable, PlatformError
from gpufn_core.protocol import subjects
from gpufn_core.protocol.reports import NodeReport, RunnerReport, WorkerEvent
from gpufn_gateway.buckets import Buckets, decode_assignment, decode_function, decode_revision, decode_team
from gpufn_gateway.controller.decide.plan import plan
from gpufn_gateway.controller.decide.status import statuses_without_leader
from gpufn_gateway.controller.execute import ActionRunner
from gpufn_gateway.controller.state.world import World
from gpufn_gateway.metrics.histogram import Histogram
from gpufn_platform.bus.connection import Bus, Message, NotStored
from gpufn_platform.bus.leader_lease import LeaderLease
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.key_value import Entry
from gpufn_platform.bus.typed_handler import decoded
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue import wakeups

from .arrival_store import ArrivalStore
from .limits import Limits
from .reports import Reports

log = logging.getLogger(__name__)

TICK_S = 1.0
COALESCE_S = 0.002
AWAY_S = 4.0  # a tick this late means that this process was suspended: the silence of others is our own
_STARTUP_RETRY_S = 0.5
_DEPTHS_TIMEOUT_S = 2.0

_node_report = msgspec.msgpack.Decoder(NodeReport)
_runner_report = msgspec.msgpack.Decoder(RunnerReport)
_worker_event = msgspec.msgpack.Decoder(WorkerEvent)
_DEFAULT_LIMITS = Limits()


class Controller:
    def __init__(
        self, bus: Bus, buckets: Buckets, *, name: str, clock: Clock, limits: Limits = _DEFAULT_LIMITS
    ) -> None:
        self._bus = bus
        self._buckets = buckets
        self._clock = clock
        self._name = name
        self._limits = limits
        self._lease = LeaderLease(buckets.leases, "controller", name)
        self._reports = Reports(bus, name=name, lease=self._lease, clock=clock)
        self.world = World(clock.monotonic())
        self.step_seconds = Histogram()
        self._arrival_store = ArrivalStore(buckets.arrivals, self.world.arrivals, self.leads)
        self._versions: dict[str, int] = {}  # versions of the function records
        self._poked = asyncio.Event()
        self._poke_names: set[str] = set()
        self._poke_all = False
        self._was_leading = False
        self._loaded = False
        self._runner = ActionRunner(
            bus=bus,
            world=self.world,
            buckets=buckets,
            versions=self._versions,
            lease=self._lease,
            clock=clock,
            on_change=self._poke,
        )

    def __repr__(self) -> str:
        return f"<Controller {self._name} [{'leads' if self._was_leading else 'stands by'}] {self.world!r}>"

    def leads(self) -> bool:
        """Return whether this controller leads. Reliable: the lease expires by our own clock."""
        return self._lease.is_held(self._clock.monotonic())

    @property
    def epoch(self) -> int:
        """The number of its last term."""
        return self._lease.epoch

    async def run(self) -> None:
        """Run until cancelled, then release the lease, so that a successor does not wait for it to expire."""
        async with contextlib.AsyncExitStack() as stack:
            self._listen(stack)
            await self._load(stack)
            stack.push_async_callback(self._release_lease)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._tick(), name="controller-tick")
                tasks.create_task(self._steps(), name="controller-steps")
                tasks.create_task(self._arrival_store.run(), name="controller-arrivals")

    # --- receive ---

    def _listen(self, stack: contextlib.AsyncExitStack) -> None:
        for subject, handler in (
            (subjects.WAKEUPS, self._on_wakeup),
            (subjects.NODE_REPORTS, decoded(_node_report, self._on_node_report)),
            (subjects.RUNNER_REPORTS, decoded(_runner_report, self._on_runner_report)),
            (subjects.WORKER_EVENTS, decoded(_worker_event, self._on_event)),
        ):
            stack.callback(self._bus.subscribe(subject, handler).unsubscribe)
        stack.callback(self._bus.on_reconnect(lambda: self.world.reset_silence(self._clock.monotonic())))

    async def _load(self, stack: contextlib.AsyncExitStack) -> None:
        """Load teams before the functions that they own, revisions before the Functions that point at them, and
        Functions before the workers that run them."""
        for bucket, on_change in (
            (self._buckets.teams, self._on_team),
            (self._buckets.node_drains, self._on_node_drain),
            (self._buckets.revisions, self._on_revision),
            (self._buckets.functions, self._on_function),
            (self._buckets.assignments, self._on_assignment),
        ):
            while True:
                try:
                    watch = await bucket.watch(on_change)
                except PlatformError as error:
                    self._reports.log_problem(f"cannot read {bucket.bucket} yet: {error}")
                    await asyncio.sleep(_STARTUP_RETRY_S)
                else:
                    stack.callback(watch.stop)
                    break
        self._loaded = True

    def _on_team(self, name: str, entry: Entry | None) -> None:
        """The next full step applies the change: it may concern all functions."""
        if entry is None:
            self.world.teams.remove(name)
        else:
            self.world.teams.put(decode_team(entry.value))

    def _on_node_drain(self, node: str, entry: Entry | None) -> None:
        if entry is None:
            self.world.drained.discard(node)
        else:
            self.world.drained.add(node)
        self._poke_all = True
        self._poked.set()

    def _on_function(self, name: str, entry: Entry | None) -> None:
        if entry is None:
            self._versions.pop(name, None)
            self._reports.forget(name)
        else:
            self._versions[name] = entry.revision
        self.world.on_function(name, None if entry is None else decode_function(entry.value))
        self._poke(name)

    def _on_revision(self, key: str, entry: Entry | None) -> None:
        name, _, number = key.rpartition(".")
        self.world.on_revision((name, int(number)), None if entry is None else decode_revision(entry.value))
        self._poke(name)

    def _on_assignment(self, key: str, entry: Entry | None) -> None:
        worker = key.rpartition(".")[2]
        known = self.world.workers.get(worker)
        assignment = None if entry is None else decode_assignment(entry.value)
        version = 0 if entry is None else entry.revision
        self.world.on_assignment(worker, assignment, self._clock.monotonic(), version)
        if assignment is None and known is not None:
            self._poke(known.key[0], *self.world.waiting)  # there is room for the functions that wait for it

    def _on_wakeup(self, message: Message) -> None:
        name = message.subject.rpartition(".")[2]
        self.world.on_wakeup(name, self._clock.monotonic(), wakeups.revision_of(message.payload))
        self._poke(name)

    def _on_node_report(self, report: NodeReport) -> None:
        if self.world.on_node_report(report, self._clock.monotonic()):
            self._poke(*self.world.waiting)

    def _on_runner_report(self, report: RunnerReport) -> None:
        if changed := self.world.on_runner_report(report, self._clock.monotonic()):
            self._poke(*changed, *self.world.waiting)

    def _on_event(self, event: WorkerEvent) -> None:
        self.world.on_event(event, self._clock.monotonic())
        self._poke(event.function, *self.world.waiting)

    # --- step ---

    def _poke(self, *names: str) -> None:
        if names:
            self._poke_names.update(names)
            self._poked.set()

    async def _tick(self) -> None:
        """Tick each second by the clock. A late tick is not made up for."""
        last = self._clock.monotonic()
        while True:
            now = self._clock.monotonic()
            if now - last > AWAY_S:
                self.world.reset_silence(now)
            last = now
            try:
                await self._lead(now)
            except PlatformError as error:
                self._reports.log_problem(str(error))
            except Exception:
                log.exception("a controller tick failed; the next tick retries", extra={"controller": self._name})
            else:
                self._reports.log_problem("")
            self._poke_all = True
            self._poked.set()
            await asyncio.sleep(max(0.0, TICK_S - (self._clock.monotonic() - now)))

    async def _lead(self, now: float) -> None:
        if not self._bus.connected:
            self.world.reset_silence(now)
            raise BusUnavailable("not connected to the message bus")
        self.world.observe_arrivals(now, self._clock.time())  # before the store may act for this leader
        try:
            leads = await self._lease.try_acquire(now)
        except NotStored:
            self.world.store.record_failure(self._clock.monotonic())
            await self._read_depths()  # to report which functions have calls that wait for it
            raise
        if leads and not self._was_leading:
            log.info("this controller leads now", extra={"controller": self._name, "epoch": self._lease.epoch})
            self.world.take_over(now)
        elif self._was_leading and not leads:
            log.warning("another controller leads now", extra={"controller": self._name})
        self._was_leading = leads
        self.world.forget_nodes(now)
        if not leads:
            self.world.forget_unused()
            return
        await self._read_depths()

    async def _read_depths(self) -> None:
        sent_at = self._clock.monotonic()
        depths: dict[RevisionKey, int] | None = None
        try:
            async with asyncio.timeout(_DEPTHS_TIMEOUT_S):
                depths = {key: depth.total for key, depth in (await streams.depths(self._bus)).items()}
        except TimeoutError as error:
            raise BusUnavailable("timed out reading the depths of the queues") from error
        finally:
            # None after a failure: unknown, so the last decisions stand.
            self.world.on_depths(depths, sent_at, self._clock.monotonic())

    async def _steps(self) -> None:
        while True:
            await self._poked.wait()
            self._poked.clear()
            names, self._poke_names = self._poke_names, set()
            is_full, self._poke_all = self._poke_all, False
            started_at = self._clock.monotonic()
            try:
                self.step(started_at, None if is_full else names)
            except Exception:
                log.exception("a controller step failed; the next tick retries", extra={"controller": self._name})
            took_s = self._clock.monotonic() - started_at
            if self._was_leading:
                self.step_seconds.observe(took_s)
            # Coalesce the events of the meantime, so that a burst costs at most half of a core.
            await asyncio.sleep(COALESCE_S if is_full else max(COALESCE_S, took_s))

    def step(self, now: float, only: Iterable[str] | None = None) -> None:
        """Decide and start the actions. Does nothing unless this controller leads and is connected to the bus.

        While no controller can lead because the lease cannot be stored, report that instead."""
        if not (self._loaded and self._bus.connected):
            return
        if not self._lease.is_held(now):
            if only is None and self.world.store.is_stuck(now):
                self._reports.send_all(statuses_without_leader(self.world, now))
            return
        planned = plan(self.world, now, only=only, limits=self._limits)
        self._reports.log_failures(planned)
        for action in planned.actions:
            self._runner.begin(action, now)
        self._reports.send_planned(planned, is_full=only is None)

    # --- shut down ---

    async def _release_lease(self) -> None:
        """Finish the started actions before another controller may lead."""
        await self._runner.finish(1.0)
        with contextlib.suppress(PlatformError):
            await self._lease.release()
        self._was_leading = False
