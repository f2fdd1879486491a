"""The builder of one node: one queue of builds for each kind of device that the node has.

1. Receive the id of a build from the queue of its DeviceKind. If the build has ended, only acknowledge the id.
2. Reserve memory for the build (`build_slots`). If it does not fit beside the running ones, hand the id back: another
   builder may receive it. This builder requests an id again after the redelivery is due, so a large build is not
   overtaken by small ones again and again.
3. Claim the build (`build_record`) and run it (`build_job`). Meanwhile extend the ack deadline and update the record.
   The build is stopped if `cancel` is set, and given up if another builder claims it. Request the next id.
4. Write the outcome to the record, then acknowledge the id.

Ids are redelivered for many reasons: NATS restarted, a builder was stopped, or a builder lost its connection for a
while. Only the death of a builder during a build counts against the build.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import msgspec

from gpufn_builder import build_record
from gpufn_builder.build_job import BuildExecutor, BuildOutcome, OnHeld
from gpufn_builder.build_record import AlreadyEnded, BuildRecord, TakenOver
from gpufn_builder.build_slots import BuildSlots
from gpufn_builder.identity import Target, cpu_target, gpu_target
from gpufn_builder.processes.process_messages import truncate_error
from gpufn_core.domain.devices.device import DeviceType
from gpufn_core.domain.devices.engine import BuildState
from gpufn_core.errors import BuildFailed, BuildNotFound, BusUnavailable, GpufnError, PlatformError
from gpufn_core.protocol import subjects
from gpufn_core.protocol.reports import NodeReport
from gpufn_platform.bus.connection import Bus, Message, NotStored
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.bus.typed_handler import decoded
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue.delivery import Delivery
from gpufn_platform.queue.puller import Pull

log = logging.getLogger(__name__)

_TICK_S: Final = 1.0
_ACK_WAIT_S: Final = 8.0  # after a builder's death its build is redelivered
_TOUCH_EVERY_S: Final = 2.0
_RETRY_S: Final = 2.0
_HANDED_BACK_S: Final = 1.0  # less than _RETRY_S: the redelivery is due before this builder requests the next id
_MAX_DEATHS: Final = 5  # deaths of builders with the same build
_UNBOUNDED: Final = -1

_report = msgspec.msgpack.Decoder(NodeReport)


class Builder:
    def __init__(
        self, bus: Bus, *, builds: KeyValue, executor: BuildExecutor, slots: BuildSlots, node: str, clock: Clock
    ) -> None:
        self._bus = bus
        self._builds = builds
        self._executor = executor
        self._slots = slots
        self._node = node
        self._name = f"{node}/{secrets.token_hex(4)}"  # distinguishes this process from a later builder of this node
        self._clock = clock
        self._queues: dict[str, BuildQueue] = {}

    async def run(self) -> None:
        """Run until cancelled. Builds in progress are released for another builder or our successor."""
        self._executor.sweep()
        self._bus.subscribe(subjects.node_report(self._node), decoded(_report, self._on_report))
        self._serve(cpu_target())
        try:
            while True:
                now = self._clock.monotonic()
                for queue in self._queues.values():
                    queue.tick(now)
                await asyncio.sleep(_TICK_S)
        finally:
            await asyncio.gather(*(queue.close() for queue in self._queues.values()))

    def _on_report(self, report: NodeReport) -> None:
        self._slots.on_report(report)
        for device in report.devices:
            if device.type is DeviceType.GPU:
                self._serve(gpu_target(device))

    def _serve(self, target: Target) -> None:
        if target.kind not in self._queues:
            log.info("builds for %s", target.kind)
            self._queues[target.kind] = BuildQueue(
                self._bus, self._builds, self._executor, self._slots, target, builder=self._name, clock=self._clock
            )


class BuildQueue:
    """The builds for one DeviceKind."""

    def __init__(
        self,
        bus: Bus,
        builds: KeyValue,
        executor: BuildExecutor,
        slots: BuildSlots,
        target: Target,
        *,
        builder: str,
        clock: Clock,
    ) -> None:
        self._bus = bus
        self._builds = builds
        self._executor = executor
        self._slots = slots
        self._target = target
        self._builder = builder
        self._clock = clock
        self._consumer = subjects.build_consumer(target.kind)
        self._pull = Pull(bus, subjects.BUILD, self._consumer, self._take, on_missing=self._on_missing)
        self._tasks = Tasks()
        self._presence = bus.subscribe(subjects.builders(target.kind), self._answer)
        self._paused_until = 0.0
        self._request()

    def tick(self, now: float) -> None:
        self._pull.tick(now)
        self._request()

    def _request(self) -> None:
        """Request the next id, unless no build may start or a build was just handed back."""
        is_paused = self._clock.monotonic() < self._paused_until
        if not self._pull.credits and not is_paused and self._slots.has_slot(self._target.kind):
            self._pull.grant(1)

    async def close(self) -> None:
        self._presence.unsubscribe()
        self._pull.withdraw()
        await self._tasks.end()

    def _answer(self, message: Message) -> None:
        if message.reply:
            self._bus.publish(message.reply, b"")

    def _take(self, delivery: Delivery) -> None:
        self._tasks.start(self._settle(delivery), f"build {delivery.payload.decode(errors='replace')}")

    async def _settle(self, delivery: Delivery) -> None:
        touching = asyncio.create_task(_touch(delivery), name="touch")
        settle: Callable[[], None] = delivery.nak  # used when this builder is stopped
        try:
            if await self._admit_and_build(delivery.payload.decode()):
                settle = delivery.ack
            else:
                settle = partial(delivery.nak, _HANDED_BACK_S)
                self._paused_until = self._clock.monotonic() + _RETRY_S
        except TakenOver as error:
            log.warning("%s", error)
            settle = partial(delivery.nak, _ACK_WAIT_S)  # the new owner extends its deadline; redeliver if it dies
        except Exception as error:
            is_platform = isinstance(error, PlatformError)  # NATS: our traceback adds nothing
            log.error("a build was interrupted and will be retried: %s", error, exc_info=None if is_platform else error)
            settle = partial(delivery.nak, _RETRY_S)
        finally:
            touching.cancel()
            with contextlib.suppress(GpufnError):  # the record is written; the redelivered id is only acknowledged
                settle()
            self._request()

    async def _admit_and_build(self, build_id: str) -> bool:
        """Return False if the build must wait. Raises the errors of `_build`."""
        try:
            build = await build_record.read(self._builds, build_id)
        except BuildNotFound as error:
            log.info("%s", error)
            return True
        if build.state.ended or build.cancel:
            await self._build(build_id)
            return True
        if (slot := self._slots.admit(build, self._target)) is None:
            return False
        with slot:
            self._request()
            slot.has_succeeded = await self._build(build_id, slot.set_held)
        return True

    async def _build(self, build_id: str, on_held: OnHeld | None = None) -> bool:
        """Run a build, and return whether it succeeded. Raises TakenOver if another builder owns it, or the error that
        interrupted the build."""
        try:
            record = await BuildRecord.claim(self._builds, build_id, self._builder, self._clock.time())
            try:
                return await self._run(record, on_held)
            except asyncio.CancelledError:
                with contextlib.suppress(GpufnError):
                    await record.release("its builder stopped")
                raise
            except TakenOver:
                await _retry_until_available(record.decrement_deaths)
                raise
            except PlatformError as error:
                await _retry_until_available(partial(record.release, _reason(error)))
                raise
        except (BuildNotFound, AlreadyEnded) as error:
            log.info("%s", error)
            return False

    async def _run(self, record: BuildRecord, on_held: OnHeld | None) -> bool:
        build = record.build
        outcome: BuildOutcome | None = None
        if build.deaths >= _MAX_DEATHS and not build.cancel:
            lost = BuildFailed(f"the build was started {build.deaths} times, and its builder died each time")
            outcome = BuildOutcome(error=lost.info())
        elif not build.cancel:
            outcome = await self._work(record, on_held)
        await self._end(record, outcome)
        return outcome is not None and outcome.state is BuildState.SUCCEEDED

    async def _work(self, record: BuildRecord, on_held: OnHeld | None) -> BuildOutcome | None:
        """Return the outcome; None if the build was stopped because of a change of its record."""
        build = record.build
        running = self._executor.run(build, self._target, record.set_progress, on_held)
        work = asyncio.create_task(running, name=f"work of {build.id}")
        try:
            async with record.sync(work.cancel):
                return await work
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return None
        except GpufnError:
            raise
        except Exception as error:  # a retry would fail the same way
            log.exception("build %s failed because of an internal error of the builder", build.id)
            failure = BuildFailed(f"internal error of the builder: {type(error).__name__}: {error}")
            return BuildOutcome(error=failure.info())
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _end(self, record: BuildRecord, outcome: BuildOutcome | None) -> None:
        """Write the outcome; None if the build was cancelled."""
        state, outcome = (outcome.state, outcome) if outcome else (BuildState.CANCELLED, BuildOutcome())
        error = truncate_error(outcome.error) if outcome.error else None
        await record.change(
            state=state,
            progress=1.0 if state is BuildState.SUCCEEDED else record.build.progress,
            detail="",
            ended_at=self._clock.time(),
            **msgspec.structs.asdict(msgspec.structs.replace(outcome, error=error)),
        )
        log.info("build %s %s%s", record.build.id, state, f": {error.message}" if error else "")

    def _on_missing(self) -> None:
        self._tasks.start(self._recreate(), f"queue of {self._target.kind}")

    async def _recreate(self) -> None:
        try:
            await streams.ensure_consumer(
                self._bus, subjects.BUILD, self._consumer, subjects.build_queue(self._target.kind),
                ack_wait_s=_ACK_WAIT_S, max_ack_pending=_UNBOUNDED,
            )  # fmt: skip
        except GpufnError as error:
            log.warning("builds for %s cannot be pulled yet: %s", self._target.kind, error)
            return  # each tick of the Pull retries this
        self._pull.retry()


def _reason(error: PlatformError) -> str:
    """Return the detail for the record of an interrupted build."""
    if isinstance(error, NotStored):
        return "the message bus did not store its progress, maybe because its disk was full; the build is retried"
    return "the build was interrupted and is retried"


async def _touch(delivery: Delivery) -> None:
    while True:
        await asyncio.sleep(_TOUCH_EVERY_S)
        with contextlib.suppress(GpufnError):
            delivery.touch()


async def _retry_until_available(work: Callable[[], Awaitable[None]]) -> None:
    """Retry `work` until NATS is available."""
    while True:
        with contextlib.suppress(BusUnavailable):
            return await work()
        await asyncio.sleep(_RETRY_S)
