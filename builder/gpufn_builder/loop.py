"""The builder of one node: one queue of builds for each kind of device that the node has.

1. a build's id comes from the queue of its DeviceKind; one that has ended is acked and that is all
2. it is claimed (`record`) and built (`building`), touched meanwhile, its record kept up to date; whoever sets `cancel`
   ends it, and whoever claims it after us has it
3. its record says how it ended, then the id is acked, and the next one may come

Ids come again for many reasons: the bus restarted, a builder was stopped, or went without the bus for a while. Only a
builder that died with a build speaks against the build.
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

from gpufn_builder.build_job import Building, Ended
from gpufn_builder.build_record import BuildRecord, HasEnded, TakenAway
from gpufn_builder.identity import Target, cpu_target, gpu_target
from gpufn_builder.processes.process_messages import shortened
from gpufn_core.domain.device import DeviceType
from gpufn_core.domain.engine import BuildState
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
_ACK_WAIT_S: Final = 8.0  # after a builder's death its build comes again
_TOUCH_EVERY_S: Final = 2.0
_AGAIN_AFTER_S: Final = 2.0
_MOST_DEATHS: Final = 5  # of builders, each with the same build
_UNBOUNDED: Final = -1

_report = msgspec.msgpack.Decoder(NodeReport)


class Builder:
    def __init__(self, bus: Bus, *, builds: KeyValue, building: Building, node: str, clock: Clock) -> None:
        self._bus = bus
        self._builds = builds
        self._building = building
        self._node = node
        self._name = f"{node}/{secrets.token_hex(4)}"  # a builder that comes after us on this node is another
        self._clock = clock
        self._queues: dict[str, BuildQueue] = {}

    async def run(self) -> None:
        """Until cancelled; what is being built then is given back, for another builder or our successor."""
        self._building.sweep()
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
            self._queues[target.kind] = BuildQueue(
                self._bus, self._builds, self._building, target, builder=self._name, clock=self._clock
            )


class BuildQueue:
    """The builds for one DeviceKind, one at a time."""

    def __init__(
        self, bus: Bus, builds: KeyValue, building: Building, target: Target, *, builder: str, clock: Clock
    ) -> None:
        self._bus = bus
        self._builds = builds
        self._building = building
        self._target = target
        self._builder = builder
        self._clock = clock
        self._consumer = subjects.build_consumer(target.kind)
        self._pull = Pull(bus, subjects.BUILD, self._consumer, self._take, on_missing=self._on_missing)
        self._tasks = Tasks()
        self._presence = bus.subscribe(subjects.builders(target.kind), self._answer)
        self._pull.grant(1)

    def tick(self, now: float) -> None:
        self._pull.tick(now)

    async def close(self) -> None:
        self._presence.unsubscribe()
        self._pull.withdraw()
        await self._tasks.end()

    def _answer(self, message: Message) -> None:
        if message.reply:
            self._bus.publish(message.reply, b"")

    # --- one build ----------------------------------------------------------------------------------------------------

    def _take(self, delivery: Delivery) -> None:
        self._tasks.start(self._settle(delivery), f"build {delivery.payload.decode(errors='replace')}")

    async def _settle(self, delivery: Delivery) -> None:
        touching = asyncio.create_task(_touch(delivery), name="touch")
        settle: Callable[[], None] = delivery.nak  # we are stopped
        try:
            await self._build(delivery.payload.decode())
            settle = delivery.ack
        except TakenAway as error:
            log.warning("%s", error)
            settle = partial(delivery.nak, _ACK_WAIT_S)  # who has it touches it; should that one die, it comes again
        except Exception as error:
            is_ours = isinstance(error, PlatformError)  # the bus: where in our code it was met says nothing more
            log.error("a build broke off; it is begun again: %s", error, exc_info=None if is_ours else error)
            settle = partial(delivery.nak, _AGAIN_AFTER_S)
        finally:
            touching.cancel()
            with contextlib.suppress(GpufnError):  # it holds all the same, and is said when the id comes again
                settle()
            self._pull.grant(1)

    async def _build(self, build_id: str) -> None:
        """Raises TakenAway when another builder has it, and what broke it off otherwise."""
        try:
            record = await BuildRecord.claim(self._builds, build_id, self._builder, self._clock.time())
            try:
                await self._run(record)
            except asyncio.CancelledError:
                with contextlib.suppress(GpufnError):
                    await record.give_back("its builder stopped")
                raise
            except TakenAway:
                await _once_the_bus_is_back(record.tell_that_we_live)
                raise
            except PlatformError as error:
                await _once_the_bus_is_back(partial(record.give_back, _why(error)))
                raise
        except (BuildNotFound, HasEnded) as error:
            log.info("%s", error)

    async def _run(self, record: BuildRecord) -> None:
        build = record.build
        if build.cancel:
            await self._end(record, BuildState.CANCELLED, Ended())
        elif build.deaths >= _MOST_DEATHS:
            lost = BuildFailed(f"it was begun {build.deaths} times, and each time its builder died")
            await self._end(record, BuildState.FAILED, Ended(error=lost.info()))
        elif (ended := await self._work(record)) is not None:
            await self._end(record, ended.state, ended)
        else:
            await self._end(record, BuildState.CANCELLED, Ended())

    async def _work(self, record: BuildRecord) -> Ended | None:
        """How it ended; None when it was broken off for what its record says."""
        build = record.build
        work = asyncio.create_task(self._building.run(build, self._target, record.tell), name=f"work of {build.id}")
        try:
            async with record.kept_up(work.cancel):
                return await work
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return None
        except GpufnError:
            raise
        except Exception as error:  # it would come again and again
            log.exception("build %s failed for a fault of the builder's own", build.id)
            return Ended(error=BuildFailed(f"the builder failed at it: {type(error).__name__}: {error}").info())
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _end(self, record: BuildRecord, state: BuildState, ended: Ended) -> None:
        error = shortened(ended.error) if ended.error else None
        await record.change(
            state=state,
            progress=1.0 if state is BuildState.SUCCEEDED else record.build.progress,
            detail="",
            ended_at=self._clock.time(),
            **msgspec.structs.asdict(msgspec.structs.replace(ended, error=error)),
        )
        log.info("build %s %s%s", record.build.id, state, f": {error.message}" if error else "")

    # --- the queue ----------------------------------------------------------------------------------------------------

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
            return  # each tick of the Pull comes back here
        self._pull.retry()


def _why(error: PlatformError) -> str:
    """What the record says of a build that broke off."""
    if isinstance(error, NotStored):
        return "the message bus did not store how far it was, for its disk may have been full; it is begun again"
    return "it broke off, and is begun again"


async def _touch(delivery: Delivery) -> None:
    while True:
        await asyncio.sleep(_TOUCH_EVERY_S)
        with contextlib.suppress(GpufnError):
            delivery.touch()


async def _once_the_bus_is_back(work: Callable[[], Awaitable[None]]) -> None:
    while True:
        with contextlib.suppress(BusUnavailable):
            return await work()
        await asyncio.sleep(_AGAIN_AFTER_S)
