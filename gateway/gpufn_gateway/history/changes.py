"""Marks of the time line, from the differences between two reports of the platform. Pure.

Every gateway watches. Only the leader publishes; after a change of the leader the new leader publishes its last marks
too, and the stream drops duplicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from gpufn_core.domain.devices.device import Health
from gpufn_core.domain.revision import Function
from gpufn_core.protocol.records import NodeDrain
from gpufn_core.protocol.reports import FunctionStatus, NodeReport, WorkerEvent, WorkerEventKind, without_holders
from gpufn_gateway.history.blocks import Event, EventKind
from gpufn_gateway.history.collector import function_subject

_MAX_TEXT = 500  # characters
_MAX_WAITING = 500  # events
_FORGET_NODE_S = 3600.0


class Changes:
    def __init__(self) -> None:
        self._functions: dict[str, int] | None = None  # name → serving revision; None before the first look
        self._splits: dict[str, Function] = {}  # the split functions
        self._wanted: dict[str, int] = {}
        self._scaled: dict[str, int] = {}  # name → wanted before
        self._statuses: dict[str, FunctionStatus] = {}  # the last ones of the scaled functions
        self._failing: dict[str, str] = {}
        self._health: dict[str, Health] = {}
        self._drains: Mapping[str, NodeDrain] | None = None  # None before the first look
        self._nodes: dict[str, float] = {}  # name → last seen; negative once it was reported lost
        self._events: list[Event] = []

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _add(self, event: Event) -> None:
        if len(self._events) < _MAX_WAITING:
            self._events.append(event)

    def on_functions(self, functions: Mapping[str, Function], now: float) -> None:
        current = {name: function.serving for name, function in functions.items()}
        known, self._functions = self._functions, current
        self._on_splits(functions, now, is_first=known is None)
        if known is None or known == current:
            return
        for name, revision in current.items():
            if (before := known.get(name)) == revision:
                continue
            is_back = before is not None and revision < before
            kind = EventKind.ROLLBACK if is_back else EventKind.DEPLOY
            text = f"revision {revision} serves" + ("" if before is None else f", after revision {before}")
            self._add(Event(now, kind, function_subject(name), text, revision))
        for name in known.keys() - current.keys():
            self._add(Event(now, EventKind.DELETE, function_subject(name), "the function was deleted"))

    def _on_splits(self, functions: Mapping[str, Function], now: float, *, is_first: bool) -> None:
        known, self._splits = self._splits, {name: each for name, each in functions.items() if each.traffic is not None}
        for name in () if is_first else known.keys() | self._splits.keys():
            before, after = known.get(name), functions.get(name)
            if after is None or (before is not None and before.traffic == after.traffic):
                continue
            text, revision = "the split ended", after.serving
            if after.traffic is not None:
                text = f"calls are split: {after.traffic.describe()}"
            if (returned := after.returned) is not None and (before is None or before.returned != returned):
                revision = returned.revision
                text = f"the split {returned.weights} was undone: revision {revision}, {returned.reason}"
            self._add(Event(now, EventKind.TRAFFIC, function_subject(name), text[:_MAX_TEXT], revision))

    def on_statuses(self, statuses: Iterable[FunctionStatus], now: float) -> None:
        for status in statuses:
            name = status.function
            wanted = self._wanted.get(name)
            if wanted is not None and wanted != status.wanted:
                self._scaled.setdefault(name, wanted)
            self._wanted[name] = status.wanted
            if name in self._scaled:
                self._statuses[name] = status
            error = "" if status.start_error is None else status.start_error.summary[:_MAX_TEXT]
            if error and self._failing.get(name) != error:
                text = f"its workers fail to start: {error}"
                self._add(Event(now, EventKind.FAULT, function_subject(name), text, status.serving))
            self._failing[name] = error

    def end_slot(self, now: float) -> None:
        """Report the scale decisions of the last ten seconds, one for each function."""
        scaled, self._scaled = self._scaled, {}
        statuses, self._statuses = self._statuses, {}
        for name, before in scaled.items():
            status = statuses[name]
            if before != status.wanted:
                text = _scale_text(before, without_holders(status))[:_MAX_TEXT]
                details = {"from": before, "to": status.wanted}
                subject = function_subject(name)
                self._add(Event(now, EventKind.SCALE, subject, text, status.serving, details=details))

    def on_nodes(self, nodes: Iterable[NodeReport], now: float, *, is_settled: bool) -> None:
        """Compare the live nodes. A gateway that has just started, `is_settled` is false, reports none as new."""
        seen = {node.node for node in nodes}
        for node in nodes:
            if self._nodes.get(node.node, -1.0) < 0 and is_settled:
                self._add(Event(now, EventKind.NODE_UP, f"node:{node.node}", "the node reports", node=node.node))
            self._nodes[node.node] = now
            for device in node.devices:
                before = self._health.get(device.uuid, Health.HEALTHY)
                self._health[device.uuid] = device.health
                if before is device.health:
                    continue
                is_well = device.health is Health.HEALTHY
                reason = f": {device.health_reason}" if device.health_reason else ""
                kind = EventKind.RECOVERY if is_well else EventKind.QUARANTINE
                text = f"{device.kind} is {device.health.value}{reason}"[:_MAX_TEXT]
                self._add(Event(now, kind, f"gpu:{device.uuid}", text, node=node.node))
        for name, last in list(self._nodes.items()):
            if name in seen:
                continue
            if last >= 0:
                self._nodes[name] = -now
                self._add(Event(now, EventKind.NODE_LOST, f"node:{name}", "the node no longer reports", node=name))
            elif now + last > _FORGET_NODE_S:
                del self._nodes[name]

    def on_node_drains(self, drains: Mapping[str, NodeDrain], now: float) -> None:
        known, self._drains = self._drains, dict(drains)
        if known is None or known == drains:
            return
        for node, drain in drains.items():
            if node not in known:
                by = f", by {drain.by}" if drain.by else ""
                text = f"the node is drained{by}"
                self._add(Event(drain.since, EventKind.NODE_DRAIN, f"node:{node}", text, node=node))
        for node in known.keys() - drains.keys():
            text = "its drain ended: it accepts workers"
            self._add(Event(now, EventKind.NODE_DRAIN, f"node:{node}", text, node=node))

    def on_worker_event(self, event: WorkerEvent) -> None:
        if event.kind is WorkerEventKind.START_FAILED and event.failure is not None:
            text = f"a worker did not start ({event.failure.phase}): {event.failure.error.summary}"
        elif event.kind is WorkerEventKind.EXITED and event.exit is not None and _is_fault(event):
            text = f"a worker {event.exit.describe()}"
        else:
            return
        details = {"worker": event.worker}
        subject = function_subject(event.function)
        fault = Event(event.at, EventKind.FAULT, subject, text[:_MAX_TEXT], event.revision, event.node, details)
        self._add(fault)


def _scale_text(before: int, status: FunctionStatus) -> str:
    """Return how many workers are wanted and why, and how many were placed if some were not."""
    count = status.wanted
    wanted = "no workers" if not count else "1 worker" if count == 1 else f"{count} workers"
    text = f"wants {wanted}, {before} before: {status.reason.replace(f': {wanted}', '', 1)}"
    placed = sum(msgspec.structs.astuple(status.workers))
    if placed < count:
        detail = "" if status.waiting is None else f": {status.waiting.detail}"
        text += f"; {placed or 'none'} placed{detail}"
    return text


def _is_fault(event: WorkerEvent) -> bool:
    ended = event.exit
    if ended is None or ended.stopping or ended.killed_for:
        return False
    return bool(ended.device_fault or ended.out_of_memory or ended.signal is not None or ended.code)
