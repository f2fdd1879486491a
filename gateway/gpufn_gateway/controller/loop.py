"""The controller's loop: hear, step, act.

1. Watches and subscriptions keep the World current, on every controller: a successor starts warm.
2. Each second: renew or try the lease; the leader reads the depths and takes a full step.
3. In between a poke names functions (a doorbell, a worker that got ready or ended, a changed record) and a step looks
   at those only. It is synchronous: nothing stands between a doorbell and its Assignment but the publish.
4. Actions run as tasks (`acts`), and the World knows of them before the bus does, so that no step repeats one.
5. `reports` says what the steps came to.

A lost bus stops the steps, not the workers: nothing is decided, and the silence of others is forgiven afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from gpufn_core.domain.revision import Function, Revision, RevisionKey
from gpufn_core.domain.worker import Assignment
from gpufn_core.errors import BusUnavailable, PlatformError
from gpufn_core.protocol import subjects
from gpufn_core.protocol.reports import NodeReport, RunnerReport, WorkerEvent
from gpufn_gateway.controller.decide.plan import plan
from gpufn_gateway.controller.decide.status import undecided
from gpufn_gateway.controller.execute import Acts
from gpufn_gateway.controller.state.world import World
from gpufn_platform.bus.connection import Bus, Message, NotStored
from gpufn_platform.bus.leader_lease import Lease
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.key_value import Entry, KeyValue
from gpufn_platform.bus.typed_handler import decoded
from gpufn_platform.process.clock import Clock

from .limits import Limits
from .reports import Reports

log = logging.getLogger(__name__)

TICK_S = 1.0
COALESCE_S = 0.002
AWAY_S = 4.0  # a tick this late means that we were suspended: others' silence is ours
_STARTUP_RETRY_S = 0.5
_DEPTHS_TIMEOUT_S = 2.0

_function = msgspec.msgpack.Decoder(Function)
_revision = msgspec.msgpack.Decoder(Revision)
_assignment = msgspec.msgpack.Decoder(Assignment)
_node_report = msgspec.msgpack.Decoder(NodeReport)
_runner_report = msgspec.msgpack.Decoder(RunnerReport)
_worker_event = msgspec.msgpack.Decoder(WorkerEvent)

T = TypeVar("T")


class Controller:
    def __init__(
        self,
        bus: Bus,
        *,
        functions: KeyValue,
        revisions: KeyValue,
        assignments: KeyValue,
        leases: KeyValue,
        name: str,
        clock: Clock,
        limits: Limits | None = None,
    ) -> None:
        self._bus = bus
        self._functions = functions
        self._revisions = revisions
        self._assignments = assignments
        self._clock = clock
        self._name = name
        self._limits = limits or Limits()
        self._lease = Lease(leases, "controller", name)
        self._reports = Reports(bus, name=name, lease=self._lease, clock=clock)
        self.world = World(clock.monotonic())
        self._records: dict[str, int] = {}  # FUNCTIONS: name → revision of the record
        self._poked = asyncio.Event()
        self._poke_names: set[str] = set()
        self._poke_all = False
        self._led = False
        self._loaded = False
        self._acts = Acts(
            bus,
            self.world,
            functions=functions,
            revisions=revisions,
            assignments=assignments,
            versions=self._records,
            lease=self._lease,
            clock=clock,
            on_change=self._poke,
        )

    def __repr__(self) -> str:
        return f"<Controller {self._name} [{'leads' if self._led else 'stands by'}] {self.world!r}>"

    @property
    def leads(self) -> bool:
        """Certain: the lease's time runs by our clock."""
        return self._lease.is_held(self._clock.monotonic())

    async def run(self) -> None:
        """Until cancelled; then the lease is given back, so that a successor need not wait for it."""
        async with contextlib.AsyncExitStack() as stack:
            self._listen(stack)
            await self._load(stack)
            stack.push_async_callback(self._give_back)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._tick(), name="controller-tick")
                tasks.create_task(self._steps(), name="controller-steps")

    # --- hear ---

    def _listen(self, stack: contextlib.AsyncExitStack) -> None:
        bus = self._bus
        for subject, handler in (
            (subjects.DOORBELLS, self._on_doorbell),
            (subjects.NODE_REPORTS, decoded(_node_report, self._on_node_report)),
            (subjects.RUNNER_REPORTS, decoded(_runner_report, self._on_runner_report)),
            (subjects.WORKER_EVENTS, decoded(_worker_event, self._on_event)),
        ):
            stack.callback(bus.subscribe(subject, handler).unsubscribe)
        stack.callback(bus.on_reconnect(self._on_reconnect))

    async def _load(self, stack: contextlib.AsyncExitStack) -> None:
        """Revisions before the Functions that point at them, and those before the workers that run them."""
        for bucket, on_change in (
            (self._revisions, self._on_revision),
            (self._functions, self._on_function),
            (self._assignments, self._on_assignment),
        ):
            while True:
                try:
                    watch = await bucket.watch(on_change)
                except PlatformError as error:
                    self._reports.complain(f"cannot read {bucket.bucket} yet: {error}")
                    await asyncio.sleep(_STARTUP_RETRY_S)
                else:
                    stack.callback(watch.stop)
                    break
        self._loaded = True

    def _on_function(self, name: str, entry: Entry | None) -> None:
        if entry is None:
            self._records.pop(name, None)
            self._reports.forget(name)
            self.world.on_function(name, None)
        else:
            self._records[name] = entry.revision
            self.world.on_function(name, _function.decode(entry.value))
        self._poke(name)

    def _on_revision(self, key: str, entry: Entry | None) -> None:
        name, _, number = key.rpartition(".")
        self.world.on_revision((name, int(number)), None if entry is None else _revision.decode(entry.value))
        self._poke(name)

    def _on_assignment(self, key: str, entry: Entry | None) -> None:
        worker = key.rpartition(".")[2]
        known = self.world.workers.get(worker)
        assignment = None if entry is None else _assignment.decode(entry.value)
        version = 0 if entry is None else entry.revision
        self.world.on_assignment(worker, assignment, self._clock.monotonic(), version)
        if assignment is None and known is not None:
            self._poke(known.key[0], *self.world.waiting)  # room for those who wait for it

    def _on_doorbell(self, message: Message) -> None:
        name = message.subject.rpartition(".")[2]
        self.world.on_doorbell(name, self._clock.monotonic())
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

    def _on_reconnect(self) -> None:
        self.world.forgive(self._clock.monotonic())

    # --- step ---

    def _poke(self, *names: str) -> None:
        if names:
            self._poke_names.update(names)
            self._poked.set()

    async def _tick(self) -> None:
        """Each second by the clock; a late tick is not made up for."""
        last = self._clock.monotonic()
        while True:
            now = self._clock.monotonic()
            if now - last > AWAY_S:
                self.world.forgive(now)
            last = now
            try:
                await self._lead(now)
            except PlatformError as error:
                self._reports.complain(str(error))
            except Exception:
                log.exception("a tick failed; the next one tries again", extra={"controller": self._name})
            else:
                self._reports.complain("")
            self._poke_all = True
            self._poked.set()
            await asyncio.sleep(max(0.0, TICK_S - (self._clock.monotonic() - now)))

    async def _lead(self, now: float) -> None:
        if not self._bus.connected:
            self.world.forgive(now)
            raise BusUnavailable("not connected to the message bus")
        try:
            leads = await self._lease.try_acquire(now)
        except NotStored:
            self.world.store.failed(self._clock.monotonic())
            await self._read_depths()  # to say of which functions calls wait for it
            raise
        if leads and not self._led:
            log.info("this controller leads now", extra={"controller": self._name, "epoch": self._lease.epoch})
            self.world.take_over(now)
        elif self._led and not leads:
            log.warning("another controller leads now", extra={"controller": self._name})
        self._led = leads
        self.world.forget_nodes(now)
        if not leads:
            self.world.forget_unused()
            return
        await self._read_depths()

    async def _read_depths(self) -> None:
        asked_at = self._clock.monotonic()
        depths: dict[RevisionKey, int] | None = None
        try:
            async with asyncio.timeout(_DEPTHS_TIMEOUT_S):
                depths = {key: depth.total for key, depth in (await streams.depths(self._bus)).items()}
        except TimeoutError as error:
            raise BusUnavailable("the depths of the queues did not come in time") from error
        finally:
            # None when it failed: unknown, so that the last decisions stand.
            self.world.on_depths(depths, asked_at, self._clock.monotonic())

    async def _steps(self) -> None:
        while True:
            await self._poked.wait()
            self._poked.clear()
            names, self._poke_names = self._poke_names, set()
            is_full, self._poke_all = self._poke_all, False
            began = self._clock.monotonic()
            try:
                self.step(began, None if is_full else names)
            except Exception:
                log.exception("a step failed; the next tick tries again", extra={"controller": self._name})
            # What comes in meanwhile is taken together, so that a storm of events costs at most half of a core.
            took_s = 0.0 if is_full else self._clock.monotonic() - began
            await asyncio.sleep(max(COALESCE_S, took_s))

    def step(self, now: float, only: Iterable[str] | None = None) -> None:
        """Decide and set in motion; does nothing unless this controller leads and the bus is there. Where nobody can
        lead, for the lease cannot be stored, it says so."""
        if not (self._loaded and self._bus.connected):
            return
        if not self._lease.is_held(now):
            if only is None and self.world.store.is_stuck(now):
                self._reports.send_all(undecided(self.world, now))
            return
        planned = plan(self.world, now, only=only, limits=self._limits)
        self._reports.complain_of_failed(planned)
        for action in planned.actions:
            self._acts.begin(action, now)
        self._reports.send_planned(planned, is_full=only is None)

    # --- go ---

    async def _give_back(self) -> None:
        """The order of going: what was begun is finished, then somebody else may lead."""
        await self._acts.finish(1.0)
        with contextlib.suppress(PlatformError):
            await self._lease.release()
        self._led = False
