"""Exchange of worker events between runner and agent, over the bus.

The runner detects a closed socket at once but does not know the reason; the agent knows the exit status. Both send
events. Kills are orders to the agent, because only the agent manages processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec

from gpufn_core.domain.worker import ColdStart, Exit, StartFailure
from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import KillOrder
from gpufn_core.protocol.reports import WorkerEvent, WorkerEventKind
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.process.clock import Clock
from gpufn_runtime.runner.totals import Totals
from gpufn_runtime.runner.workers.worker_link import WorkerLink

log = logging.getLogger(__name__)

V = TypeVar("V")

_MAX_STORED = 1000
_PARKING_PHASES = ("park", "resume")  # a failure in these phases is no failed start

_event = msgspec.msgpack.Decoder(WorkerEvent)


class AgentEvents:
    def __init__(self, bus: Bus, node: str, clock: Clock, totals: Totals) -> None:
        self._bus = bus
        self._node = node
        self._clock = clock
        self._totals = totals
        self._launches: dict[str, ColdStart] = {}
        self.exits: dict[str, Exit] = {}
        self._exit_callbacks: dict[str, Callable[[Exit], None]] = {}

    def start(self) -> None:
        self._bus.subscribe(subjects.WORKER_EVENTS, self._on_event)

    def kill(self, worker: str, reason: str) -> None:
        """Order the agent to end this worker's process, if it still exists."""
        self._publish(subjects.kill(self._node), encode(KillOrder(worker, reason)))

    def event(
        self, link: WorkerLink, kind: WorkerEventKind, *, failure: StartFailure | None = None, needs_bytes: int = 0
    ) -> None:
        event = WorkerEvent(
            kind, link.id, link.revision.function, link.revision.number, self._node,
            self._clock.time(), cold_start=link.cold_start, failure=failure, needs_bytes=needs_bytes,
        )  # fmt: skip
        self._publish(subjects.worker_event(link.revision.function), encode(event))

    def cold_start(self, link: WorkerLink) -> ColdStart:
        """Return the cold start of a worker that has just become READY, from the agent's and the worker's times."""
        worker_times = link.cold_start or ColdStart()
        started = self._launches.get(link.id)
        place_s, fetch_s = (started.place_s, started.fetch_s) if started is not None else (0.0, 0.0)
        # The agent's clock may differ from this one, so the start takes no longer than the runner has known the worker.
        start_s = min(self._clock.time() - link.created_at - place_s, self._clock.monotonic() - link.listening_since)
        launch_s = max(0.0, start_s - fetch_s - worker_times.load_s - worker_times.warm_s)
        return ColdStart(
            place_s=place_s,
            fetch_s=fetch_s,
            launch_s=launch_s,
            load_s=worker_times.load_s,
            warm_s=worker_times.warm_s,
            standby=started is not None and started.standby,
        )

    def on_exit(self, worker: str, callback: Callable[[Exit], None]) -> None:
        """Call `callback` when the agent reports how the worker's process ended; at once if it already has."""
        if (report := self.exits.get(worker)) is not None:
            callback(report)
        else:
            self._exit_callbacks[worker] = callback

    def forget(self, worker: str) -> None:
        """Drop the callback for the worker's end."""
        self._exit_callbacks.pop(worker, None)

    def _on_event(self, message: Message) -> None:
        event = _event.decode(message.payload)
        if event.node != self._node:
            return
        self._count_start(event)
        if event.kind is WorkerEventKind.STARTED and event.cold_start is not None:
            _store(self._launches, event.worker, event.cold_start)
        elif event.kind is WorkerEventKind.EXITED and event.exit is not None:
            _store(self.exits, event.worker, event.exit)
            if (callback := self._exit_callbacks.pop(event.worker, None)) is not None:
                callback(event.exit)

    def _count_start(self, event: WorkerEvent) -> None:
        """Count a start or a failed start. The bus returns this runner's own events too."""
        match event.kind:
            case WorkerEventKind.READY if event.cold_start is not None:
                self._totals.add_start(event.worker, event.function, event.cold_start)
            case WorkerEventKind.START_FAILED:
                if event.failure is not None and event.failure.phase not in _PARKING_PHASES:
                    self._totals.add_failed_start(event.worker, event.function)
            case WorkerEventKind.EXITED if event.worker in self._launches and event.exit is not None:
                if event.exit.has_crashed:
                    self._totals.add_failed_start(event.worker, event.function)
            case _:
                pass

    def _publish(self, subject: str, payload: bytes) -> None:
        try:
            self._bus.publish(subject, payload)
        except BusUnavailable as error:
            log.warning("cannot publish to %s: %s", subject, error)


def _store(reports: dict[str, V], worker: str, value: V) -> None:
    reports[worker] = value
    if len(reports) > _MAX_STORED:
        del reports[next(iter(reports))]
