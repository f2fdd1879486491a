"""What an agent says: a NodeReport each second and soon after a change, its GPUs' metrics, worker events, and workers'
raw output.

A report that cannot be sent is forgotten, for the next one follows, and so is output, whose tail goes into the worker's
exit. Events are kept until the bus is back, for callers and leases wait for them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import platform
from collections.abc import Callable
from typing import Any, Protocol

from gpufn_core.domain.device_metrics import DeviceMetrics
from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import LogLine
from gpufn_core.protocol.reports import DeviceReport, NodeReport, ProcessReport, WorkerEvent, WorkerEventKind
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.clock import Clock
from gpufn_runtime.agent.clock_check import ClockCheck
from gpufn_runtime.agent.decide.fleet import WorkerRecord
from gpufn_runtime.agent.devices.watch import DeviceWatch
from gpufn_runtime.agent.workers.running_workers import Living, RunningWorker

_SOON_S = 0.05  # it reads a file per process: not once for each of 50 that start together
_UNSENT_EVENTS = 256


class Readiness(Protocol):
    """What this node has ready to start workers: its standbys, and why it starts no containers, if it does not."""

    @property
    def templates(self) -> tuple[str, ...]: ...

    @property
    def container_trouble(self) -> str: ...


class Reports:
    def __init__(
        self,
        bus: Bus,
        *,
        node: str,
        devices: DeviceWatch,
        living: Living,
        readiness: Readiness,
        clock: Clock,
        clock_check: ClockCheck,
        contains_all: bool,
        park_bytes: int,
    ) -> None:
        self._bus = bus
        self._node = node
        self._devices = devices
        self._living = living
        self._readiness = readiness
        self._clock = clock
        self._clock_check = clock_check
        self._contains_all = contains_all
        self._park_bytes = park_bytes
        self._unsent: collections.deque[WorkerEvent] = collections.deque(maxlen=_UNSENT_EVENTS)
        self._is_due = False

    def send(self) -> None:
        """A NodeReport, now."""
        self._is_due = False
        report = NodeReport(
            node=self._node,
            sent_at=self._clock.time(),
            devices=self._devices.devices(self._clock.monotonic()),
            links=self._devices.links,
            facts=self._devices.facts,
            processes=tuple(self._process(worker) for worker in self._living),
            templates=self._readiness.templates,
            container_trouble=self._readiness.container_trouble,
            park_bytes=self._park_bytes,
            contains_all=self._contains_all,
            clock_skew_s=self._clock_check.skew_s,
            hostname=platform.node(),
            python=platform.python_version(),
            platform=f"{platform.system()} {platform.machine()}",
        )
        with contextlib.suppress(BusUnavailable):  # the next one follows in a second
            self._bus.publish(subjects.node_report(self._node), encode(report))

    def _process(self, worker: RunningWorker) -> ProcessReport:
        gpus = worker.record.gpus
        if not gpus:
            return worker.report()
        pids = worker.pids
        return worker.report(self._devices.busy_by(pids, gpus), self._devices.held_by(pids, gpus))

    def send_metrics(self, metrics: tuple[DeviceMetrics, ...]) -> None:
        report = DeviceReport(self._node, self._clock.time(), metrics)
        with contextlib.suppress(BusUnavailable):
            self._bus.publish(subjects.device_report(self._node), encode(report))

    def send_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(_SOON_S, self.send)

    def tell(self, record: WorkerRecord, kind: WorkerEventKind, **what: Any) -> None:
        """An event of a worker: at once, or, while there is no bus, later."""
        event = WorkerEvent(
            kind=kind,
            worker=record.worker,
            function=record.function,
            revision=record.revision,
            node=self._node,
            at=self._clock.time(),
            **what,
        )
        self._unsent.append(event)
        self.send_unsent()

    def send_unsent(self) -> None:
        with contextlib.suppress(BusUnavailable):
            while self._unsent:
                event = self._unsent[0]
                self._bus.publish(subjects.worker_event(event.function), encode(event))
                self._unsent.popleft()

    def log_lines(self, record: WorkerRecord, lines: list[str]) -> None:
        at, subject = self._clock.time(), subjects.logs(record.function)
        for text in lines:
            line = LogLine(at, record.function, record.revision, record.worker, "stderr", text)
            with contextlib.suppress(BusUnavailable):
                self._bus.publish(subject, encode(line))


def image_log(bus: Bus, clock: Clock) -> Callable[[str, int, str], None]:
    """What making a revision's image says goes to the log of its function, before it has a worker."""

    def say(function: str, revision: int, text: str) -> None:
        line = LogLine(clock.time(), function, revision, "", "stderr", text)
        with contextlib.suppress(BusUnavailable):
            bus.publish(subjects.logs(function), encode(line))

    return say
