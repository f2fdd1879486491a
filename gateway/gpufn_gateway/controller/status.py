"""What a step tells of a function: counts, the reason in words, and why calls wait. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpufn.protocol.reports import FunctionStatus, Waiting, WaitReason, WorkerCounts
from gpufn.revision import Function
from gpufn.workers import WorkerState

from .actions import Decided, Need
from .circuit import CircuitState
from .placement import NoRoom
from .views import RevisionView
from .world import World


class Teller:
    def __init__(self, world: World, now: float) -> None:
        self._world = world
        self._now = now

    def status(self, function: Function, decided: Sequence[Decided], note: str | None) -> FunctionStatus:
        serving = next(one for one in decided if one.key[1] == function.serving)
        view, decision = serving.view, serving.decision
        counts = {state: len(view.in_state(state)) for state in WorkerState}
        draining = sum(len(one.view.in_state(WorkerState.DRAINING)) for one in decided)
        circuit = view.circuit
        return FunctionStatus(
            function=function.name,
            serving=function.serving,
            workers=WorkerCounts(
                ready=counts[WorkerState.READY],
                starting=counts[WorkerState.STARTING],
                draining=draining,
                parking=counts[WorkerState.PARKING],
                parked=counts[WorkerState.PARKED],
                resuming=counts[WorkerState.RESUMING],
            ),
            queued=None if serving.demand is None else serving.demand.queued,
            running=None if serving.demand is None else serving.demand.running,
            wanted=decision.count,
            reason="; ".join(filter(None, (decision.reason, note, self._parked(serving)))),
            terms=decision.terms,
            waiting=self._waiting(serving, counts),
            service_s=view.service_s,
            cold_start_s=view.cold_start_s,
            # Not while it is half open: the call that is let in is what asks for the next try.
            start_error=circuit.last_error if circuit.state(self._now) is CircuitState.OPEN else None,
        )

    def _parked(self, one: Decided) -> str:
        """How long those that are parked are kept, or why none is."""
        if one.revision is None or not one.revision.spec.park_timeout_s:
            return ""
        if parked := one.view.in_state(WorkerState.PARKED):
            return f"{len(parked)} parked, {one.revision.spec.park_timeout_s:g} s at most"
        return f"none is parked: {one.view.cannot_park}" if one.view.cannot_park else ""

    def _waiting(self, one: Decided, counts: dict[WorkerState, int]) -> Waiting | None:
        """Why calls wait, if any do."""
        demand = one.demand
        slots = one.revision.spec.slots if one.revision is not None else 1
        ready = counts[WorkerState.READY]
        if gpus := {worker.waits_on for worker in one.view.in_state(WorkerState.READY)} - {""}:
            return Waiting(WaitReason.TURN, f"waits for its turn on {min(gpus)}")
        if demand is None or not demand.calls or (ready and demand.calls <= ready * slots - demand.stuck):
            return None
        if one.view.circuit.openings and not ready:
            return self._crash_looping(one.view)
        starting = counts[WorkerState.STARTING] + counts[WorkerState.RESUMING]
        if not starting and one.need is not None and one.need.no_room is not None:
            return self._no_room(one.need, one.need.no_room)
        if starting or one.need is not None:
            return self._starting(one.view)
        return (
            Waiting(WaitReason.LIMIT, f"max_workers is reached: {one.decision.count}") if one.decision.limited else None
        )

    @staticmethod
    def _no_room(need: Need, no_room: NoRoom) -> Waiting:
        if need.is_slot_limited:
            return Waiting(WaitReason.STARTING, "waits its turn: many workers are being started")
        return Waiting(WaitReason.NO_CAPACITY, str(no_room))

    def _crash_looping(self, view: RevisionView) -> Waiting:
        last = view.circuit.last_error.summary if view.circuit.last_error is not None else "unknown"
        retry_in_s = view.circuit.retry_in_s(self._now)
        return Waiting(WaitReason.CRASH_LOOPING, f"its workers fail to start: {last}", retry_in_s or None)

    def _starting(self, view: RevisionView) -> Waiting:
        if view.in_state(WorkerState.RESUMING):
            return Waiting(WaitReason.STARTING, "a parked worker resumes", view.cold_start_s)
        since = [worker.since for worker in view.in_state(WorkerState.STARTING)]
        typical_s = view.cold_start_s
        for_s = self._now - min(since) if since else 0.0
        eta_s = None if typical_s is None else max(0.0, typical_s - for_s)
        return Waiting(WaitReason.STARTING, f"a worker is starting, for {for_s:.1f} s", eta_s)
