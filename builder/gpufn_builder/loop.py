"""The builder of one node: one queue of builds for each kind of device that the node has.

1. a build's id comes from the queue of its DeviceKind; one that has ended is acked and that is all
2. it is built (`building`), touched meanwhile, its record kept up to date; whoever sets `cancel` ends it
3. its record says how it ended, then the id is acked, and the next one may come
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

import msgspec

from gpufn.bus import streams
from gpufn.bus.connection import Bus
from gpufn.bus.consumer import Delivery, Pull
from gpufn.bus.decoded import decoded
from gpufn.bus.kv import KeyValue
from gpufn.clock import Clock
from gpufn.device import DeviceType
from gpufn.engine import BuildState
from gpufn.errors import BuildFailed, BuildNotFound, GpufnError
from gpufn.protocol import subjects
from gpufn.protocol.reports import NodeReport
from gpufn.tasks import Tasks
from gpufn_builder.building import Building, Ended
from gpufn_builder.identity import Target, cpu_target, gpu_target
from gpufn_builder.record import BuildRecord

log = logging.getLogger(__name__)

_TICK_S: Final = 1.0
_ACK_WAIT_S: Final = 8.0  # after a builder's death its build comes again
_TOUCH_EVERY_S: Final = 2.0
_AGAIN_AFTER_S: Final = 2.0
_MOST_DELIVERIES: Final = 5  # each a builder that died with it
_UNBOUNDED: Final = -1

_report = msgspec.msgpack.Decoder(NodeReport)


class Builder:
    def __init__(self, bus: Bus, *, builds: KeyValue, building: Building, node: str, clock: Clock) -> None:
        self._bus = bus
        self._builds = builds
        self._building = building
        self._node = node
        self._clock = clock
        self._queues: dict[str, BuildQueue] = {}

    async def run(self) -> None:
        """Until cancelled; what is being built then is given back, for another builder or our successor."""
        self._building.sweep()
        await streams.ensure_streams(self._bus)
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
        for device in report.devices:
            if device.type is DeviceType.GPU:
                self._serve(gpu_target(device))

    def _serve(self, target: Target) -> None:
        if target.kind not in self._queues:
            log.info("builds for %s", target.kind)
            self._queues[target.kind] = BuildQueue(self._bus, self._builds, self._building, target, self._clock)


class BuildQueue:
    """The builds for one DeviceKind, one at a time."""

    def __init__(self, bus: Bus, builds: KeyValue, building: Building, target: Target, clock: Clock) -> None:
        self._bus = bus
        self._builds = builds
        self._building = building
        self._target = target
        self._clock = clock
        self._consumer = subjects.build_consumer(target.kind)
        self._pull = Pull(bus, subjects.BUILD, self._consumer, self._take, on_missing=self._on_missing)
        self._tasks = Tasks()
        self._pull.grant(1)

    def tick(self, now: float) -> None:
        self._pull.tick(now)

    async def close(self) -> None:
        self._pull.withdraw()
        await self._tasks.end()

    # --- one build ----------------------------------------------------------------------------------------------------

    def _take(self, delivery: Delivery) -> None:
        self._tasks.start(self._settle(delivery), f"build {delivery.payload.decode(errors='replace')}")

    async def _settle(self, delivery: Delivery) -> None:
        touching = asyncio.create_task(_touch(delivery), name="touch")
        try:
            await self._build(delivery)
            delivery.ack()
        except asyncio.CancelledError:
            with contextlib.suppress(GpufnError):
                delivery.nak()
            raise
        except Exception:
            log.exception("a build broke off; it is begun again")
            with contextlib.suppress(GpufnError):
                delivery.nak(_AGAIN_AFTER_S)
        finally:
            touching.cancel()
            self._pull.grant(1)

    async def _build(self, delivery: Delivery) -> None:
        build_id = delivery.payload.decode()
        record = await BuildRecord.open(self._builds, build_id)
        if record is None or record.build.state.ended:
            return
        try:
            if record.build.cancel:
                await self._end(record, BuildState.CANCELLED, Ended())
            elif delivery.delivered > _MOST_DELIVERIES:
                lost = BuildFailed(f"it was begun {_MOST_DELIVERIES} times, and each time its builder died").info()
                await self._end(record, BuildState.FAILED, Ended(error=lost))
            else:
                await self._run(record)
        except BuildNotFound as error:
            log.info("%s", error)

    async def _run(self, record: BuildRecord) -> None:
        build = record.build
        started_at = build.started_at or self._clock.time()
        await record.change(state=BuildState.BUILDING, detail="", started_at=started_at)
        work = asyncio.create_task(self._building.run(build, self._target, record.tell), name=f"work of {build.id}")
        stop_to_look = await record.watch(work.cancel)
        writing = asyncio.create_task(record.keep_up(), name=f"progress of {build.id}")
        try:
            ended, state = await work, BuildState.SUCCEEDED
            state = ended.state
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                await record.change(state=BuildState.PENDING, detail="its builder stopped")
                raise
            ended, state = Ended(), BuildState.CANCELLED
        finally:
            stop_to_look()
            work.cancel()
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        await self._end(record, state, ended)

    async def _end(self, record: BuildRecord, state: BuildState, ended: Ended) -> None:
        await record.change(
            state=state,
            progress=1.0 if state is BuildState.SUCCEEDED else record.build.progress,
            detail="",
            ended_at=self._clock.time(),
            **msgspec.structs.asdict(ended),
        )
        log.info("build %s %s%s", record.build.id, state, f": {ended.error.message}" if ended.error else "")

    # --- the queue ----------------------------------------------------------------------------------------------------

    def _on_missing(self) -> None:
        self._tasks.start(self._recreate(), f"queue of {self._target.kind}")

    async def _recreate(self) -> None:
        try:
            await streams.ensure_streams(self._bus)
            await streams.ensure_consumer(
                self._bus, subjects.BUILD, self._consumer, subjects.build_queue(self._target.kind),
                ack_wait_s=_ACK_WAIT_S, max_ack_pending=_UNBOUNDED,
            )  # fmt: skip
        except GpufnError as error:
            log.warning("builds for %s cannot be pulled yet: %s", self._target.kind, error)
            return  # each tick of the Pull comes back here
        self._pull.retry()


async def _touch(delivery: Delivery) -> None:
    while True:
        await asyncio.sleep(_TOUCH_EVERY_S)
        with contextlib.suppress(GpufnError):
            delivery.touch()
