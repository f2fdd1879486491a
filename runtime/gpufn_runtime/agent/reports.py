"""Messages of the agent: NodeReports (each second and soon after changes), GPU metrics, worker events and raw output.

A report that cannot be sent is dropped, because the next one follows. So is output, whose tail is part of the worker's
Exit. Events are kept until the bus is back, because callers and leases wait for them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import platform
from collections.abc import Callable
from typing import Any, Protocol

from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import LogLine
from gpufn_core.protocol.reports import (
    DeviceReport,
    NodeReport,
    ProcessReport,
    WeightsReport,
    WorkerEvent,
    WorkerEventKind,
)
from gpufn_core.spec.isolation import Isolation
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.clock import Clock
from gpufn_runtime.agent.clock_check import ClockCheck
from gpufn_runtime.agent.decide.fleet import WorkerRecord
from gpufn_runtime.agent.devices.watch import DeviceWatch
from gpufn_runtime.agent.environments.cache import EnvironmentCache
from gpufn_runtime.agent.workers.running_workers import RunningWorker, RunningWorkers

_DEBOUNCE_S = 0.05  # a report reads a file per process: send one report for 50 workers that start together
_MAX_UNSENT_EVENTS = 256


class Readiness(Protocol):
    """This node's ability to start workers: its templates and standbys, and why containers cannot start or cannot have
    GPUs, if so."""

    @property
    def templates(self) -> tuple[str, ...]: ...

    @property
    def container_trouble(self) -> str: ...

    @property
    def gpu_container_trouble(self) -> str: ...

    @property
    def gvisor_trouble(self) -> str: ...


class Reports:
    def __init__(
        self,
        bus: Bus,
        *,
        node: str,
        devices: DeviceWatch,
        running_workers: RunningWorkers,
        readiness: Readiness,
        clock: Clock,
        clock_check: ClockCheck,
        weights: Callable[[], WeightsReport],
        environments: EnvironmentCache | None,
        contains_all: bool,
        isolation_trouble: dict[str, str],
        address: str,
        park_bytes: int,
    ) -> None:
        self._bus = bus
        self._node = node
        self._devices = devices
        self._running_workers = running_workers
        self._readiness = readiness
        self._clock = clock
        self._clock_check = clock_check
        self._weights = weights
        self._environments = environments
        self._contains_all = contains_all
        self._isolation_trouble = isolation_trouble
        self._address = address
        self._park_bytes = park_bytes
        self._unsent: collections.deque[WorkerEvent] = collections.deque(maxlen=_MAX_UNSENT_EVENTS)
        self._is_scheduled = False

    def send(self) -> None:
        """Send a NodeReport now."""
        self._is_scheduled = False
        gvisor = self._readiness.gvisor_trouble
        report = NodeReport(
            node=self._node,
            sent_at=self._clock.time(),
            devices=self._devices.devices(self._clock.monotonic()),
            links=self._devices.links,
            facts=self._devices.facts,
            processes=tuple(self._process(worker) for worker in self._running_workers.values()),
            templates=self._readiness.templates,
            container_trouble=self._readiness.container_trouble,
            gpu_container_trouble=self._readiness.gpu_container_trouble,
            park_bytes=self._park_bytes,
            weights=self._weights(),
            contains_all=self._contains_all,
            isolation_trouble=self._isolation_trouble | ({Isolation.GVISOR: gvisor} if gvisor else {}),
            address=self._address,
            clock_skew_s=self._clock_check.skew_s,
            hostname=platform.node(),
            python=platform.python_version(),
            platform=f"{platform.system()} {platform.machine()}",
            machine=platform.machine(),
            pythons=() if self._environments is None else self._environments.pythons(),
            making_environments=() if self._environments is None else self._environments.making,
        )
        with contextlib.suppress(BusUnavailable):  # the next report follows in a second
            self._bus.publish(subjects.node_report(self._node), encode(report))

    def _process(self, worker: RunningWorker) -> ProcessReport:
        gpus = worker.record.gpus
        if not gpus:
            return worker.report()
        pids = worker.pids
        return worker.report(self._devices.busy_gpus_of(pids, gpus), self._devices.gpu_bytes_of(pids, gpus))

    def send_metrics(self, metrics: tuple[DeviceMetrics, ...]) -> None:
        report = DeviceReport(self._node, self._clock.time(), metrics)
        with contextlib.suppress(BusUnavailable):
            self._bus.publish(subjects.device_report(self._node), encode(report))

    def send_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_later(_DEBOUNCE_S, self.send)

    def send_event(self, record: WorkerRecord, kind: WorkerEventKind, **fields: Any) -> None:
        """Send a worker event, or queue it while the bus is unavailable."""
        event = WorkerEvent(
            kind=kind,
            worker=record.worker,
            function=record.function,
            revision=record.revision,
            node=self._node,
            at=self._clock.time(),
            **fields,
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
            line = LogLine(at, record.function, record.revision, record.worker, "stderr", text, node=self._node)
            with contextlib.suppress(BusUnavailable):
                self._bus.publish(subject, encode(line))


def image_log(bus: Bus, clock: Clock, node: str) -> Callable[[str, int, str], None]:
    """Return a function that sends lines of an image build to the function's log, before it has a worker."""

    def log_line(function: str, revision: int, text: str) -> None:
        line = LogLine(clock.time(), function, revision, "", "stderr", text, node=node)
        with contextlib.suppress(BusUnavailable):
            bus.publish(subjects.logs(function), encode(line))

    return log_line
