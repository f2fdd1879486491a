"""What a step tells of a function: counts, the reason in words, and why calls wait. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpufn_core.domain.revision import Function, Revision, RevisionState
from gpufn_core.domain.worker import WorkerState
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.reports import FunctionStatus, NextRevision, Waiting, WaitReason, WorkerCounts
from gpufn_gateway.controller.decide import policy
from gpufn_gateway.controller.decide.actions import Decided, Need
from gpufn_gateway.controller.decide.circuit import CircuitState
from gpufn_gateway.controller.decide.demand import demand_of
from gpufn_gateway.controller.decide.preemption import Room
from gpufn_gateway.controller.state.views import RevisionView
from gpufn_gateway.controller.state.world import World
from gpufn_gateway.controller.store_health import WHY

_HOLDERS_TOLD = 3
NO_ROOM = "no node has room"
_FOR_OWN = "all calls that run wait for others of this function, and hold the slots that those would need"


class Teller:
    """`room`: of this step, where any workers were missing."""

    def __init__(self, world: World, now: float, room: Room | None) -> None:
        self._world = world
        self._now = now
        self._room = room
        self._counted: dict[bool, Counter[str]] = {}

    def status(self, function: Function, decided: Sequence[Decided], note: str | None) -> FunctionStatus:
        serving = next(one for one in decided if one.key[1] == function.serving)
        view, decision = serving.view, serving.decision
        draining = sum(len(one.view.in_state(WorkerState.DRAINING)) for one in decided)
        circuit = view.circuit
        return FunctionStatus(
            function=function.name,
            serving=function.serving,
            workers=_counts(view, draining),
            queued=None if serving.demand is None else serving.demand.queued,
            running=None if serving.demand is None else serving.demand.running,
            wanted=decision.count,
            reason="; ".join(filter(None, (decision.reason, note, *self._details(serving)))),
            terms=decision.terms,
            waiting=self._waiting(serving),
            waiting_of={
                one.key[1]: waiting
                for one in decided
                if one is not serving and (waiting := self._waiting(one)) is not None
            },
            service_s=view.service_s,
            cold_start_s=view.cold_start_s,
            # Not while it is half open: the call that is let in is what asks for the next try.
            start_error=_failed_for_good(serving.revision)
            or (circuit.last_error if circuit.state(self._now) is CircuitState.OPEN else None),
            next=None if function.active == function.serving else self._next(function.active, decided),
        )

    def _next(self, number: int, decided: Sequence[Decided]) -> NextRevision:
        circuit = next(one for one in decided if one.key[1] == number).view.circuit
        is_failing = circuit.state(self._now) is not CircuitState.CLOSED
        return NextRevision(number, circuit.last_error if is_failing else None)

    def _details(self, one: Decided) -> tuple[str, str, str]:
        return self._failed(one.view), self._unplaced(one), self._parked(one)

    def _unplaced(self, one: Decided) -> str:
        """Why its last call got no worker, once nothing waits for one any more."""
        unplaced = one.view.unplaced
        return "" if unplaced is None or one.need is not None else unplaced.in_words(self._now)

    def _failed(self, view: RevisionView) -> str:
        """What `start_error` does not tell any more, and nobody has tried again since."""
        circuit = view.circuit
        if circuit.state(self._now) is not CircuitState.HALF_OPEN or circuit.last_error is None:
            return ""
        if view.in_state(WorkerState.STARTING):
            return ""
        summary, _, _ = circuit.last_error.summary.partition("\n")
        return f"its last worker did not start: {summary}"

    def _parked(self, one: Decided) -> str:
        """How long those that are parked are kept, or why none is."""
        if one.revision is None or not one.revision.spec.park_timeout_s:
            return ""
        if parked := one.view.in_state(WorkerState.PARKED):
            return f"{len(parked)} parked, {one.revision.spec.park_timeout_s:g} s at most"
        return f"none is parked: {one.view.cannot_park}" if one.view.cannot_park else ""

    def _waiting(self, one: Decided) -> Waiting | None:
        """Why calls wait, if any do."""
        demand = one.demand
        slots = one.revision.spec.parallel_calls if one.revision is not None else 1
        ready = len(one.view.in_state(WorkerState.READY))
        if gpus := {worker.waits_on for worker in one.view.in_state(WorkerState.READY)} - {""}:
            return Waiting(WaitReason.TURN, f"waits for its turn on {min(gpus)}")
        if demand is None or not demand.calls or (ready and demand.calls <= ready * slots - demand.stuck):
            return None
        if one.view.circuit.openings and not ready:
            return self._crash_looping(one.view)
        starting = len(one.view.in_state(WorkerState.STARTING, WorkerState.RESUMING))
        if not starting and one.need is not None and one.need.has_no_room:
            return self._no_room(one.need)
        if starting or one.need is not None:
            return self._starting(one.view)
        return self._full(one)

    def _full(self, one: Decided) -> Waiting | None:
        """All slots are taken, and no more are on their way."""
        ready = one.view.in_state(WorkerState.READY)
        if ready and all(worker.in_use == worker.waits_for_own > 0 for worker in ready):
            return Waiting(WaitReason.LIMIT, _FOR_OWN)
        if one.decision.limited:
            return Waiting(WaitReason.LIMIT, f"max_workers is reached: {one.decision.count}")
        return None

    def _no_room(self, need: Need) -> Waiting:
        if need.is_slot_limited:
            return Waiting(WaitReason.STARTING, "waits its turn: many workers are being started")
        return Waiting(WaitReason.NO_CAPACITY, "; ".join(filter(None, (need.no_room or NO_ROOM, self._held_by(need)))))

    def _held_by(self, need: Need) -> str:
        """Who has the room, where there would be some without them."""
        if self._room is None or not self._room.fits_when_empty(need):
            return ""
        holders = self._holders(of_gpus=bool(need.wanted.resources.gpu))
        told = [self._holder(name, count) for name, count in holders.most_common(_HOLDERS_TOLD)]
        if more := len(holders) - len(told):
            told.append(f"{more} more")
        return f"held by {' and '.join(filter(None, (', '.join(told[:-1]), told[-1])))}" if told else ""

    def _holders(self, *, of_gpus: bool) -> Counter[str]:
        """Workers by function; once a step, for hundreds of functions may wait."""
        if of_gpus not in self._counted:
            self._counted[of_gpus] = Counter(
                worker.key[0]
                for worker in self._world.workers.values()
                if worker.parked is None and (worker.assignment.share.gpus or not of_gpus)
            )
        return self._counted[of_gpus]

    def _holder(self, name: str, count: int) -> str:
        text = f"{count} worker{'s' if count != 1 else ''}"
        function = self._world.functions.get(name)
        record = None if function is None else self._world.revisions.get((name, function.serving))
        if function is not None and record is not None:
            lowest = policy.effective(record.spec.scaling, function).min_workers
            text += f", min_workers={lowest}" if lowest else ""
        return f"{name} ({text})"

    def _crash_looping(self, view: RevisionView) -> Waiting:
        last = view.circuit.last_error.summary if view.circuit.last_error is not None else "unknown"
        retry_in_s = view.circuit.retry_in_s(self._now)
        return Waiting(WaitReason.CRASH_LOOPING, f"its workers fail to start: {last}", retry_in_s or None)

    def _starting(self, view: RevisionView) -> Waiting:
        begun = view.in_state(WorkerState.STARTING, WorkerState.RESUMING)
        if self._world.store.is_stuck(self._now) and not any(worker.is_stored for worker in begun):
            return Waiting(WaitReason.STORE, WHY)
        if view.in_state(WorkerState.RESUMING):
            return Waiting(WaitReason.STARTING, "a parked worker resumes", view.cold_start_s)
        since = [worker.since for worker in view.in_state(WorkerState.STARTING)]
        typical_s = view.cold_start_s
        for_s = self._now - min(since) if since else 0.0
        eta_s = None if typical_s is None else max(0.0, typical_s - for_s)
        return Waiting(WaitReason.STARTING, f"a worker is starting, for {for_s:.1f} s", eta_s)


def _failed_for_good(record: Revision | None) -> ErrorInfo | None:
    """Why the first deploy of a function failed: no other revision serves, and this one is not tried again."""
    return record.error if record is not None and record.state is RevisionState.FAILED else None


def undecided(world: World, now: float) -> dict[str, FunctionStatus]:
    """Of every function, while nobody can lead because the lease cannot be stored: nothing is decided."""
    told = {}
    for name, function in world.functions.items():
        view = world.view((name, function.serving))
        demand = demand_of(world, (name, function.serving), now)
        waits = (demand is None or demand.calls) and not view.in_state(WorkerState.READY)
        told[name] = FunctionStatus(
            function=name,
            serving=function.serving,
            workers=_counts(view, len(view.in_state(WorkerState.DRAINING))),
            queued=None if demand is None else demand.queued,
            running=None if demand is None else demand.running,
            wanted=0 if view.last is None else view.last.count,
            reason=f"the last decision stands: {WHY}",
            waiting=Waiting(WaitReason.STORE, WHY) if waits else None,
            service_s=view.service_s,
            cold_start_s=view.cold_start_s,
        )
    return told


def _counts(view: RevisionView, draining: int) -> WorkerCounts:
    """`draining`: of the other revisions as well."""
    counts = Counter(worker.state for worker in view.workers.values())
    return WorkerCounts(
        ready=counts[WorkerState.READY],
        starting=counts[WorkerState.STARTING],
        draining=draining,
        parking=counts[WorkerState.PARKING],
        parked=counts[WorkerState.PARKED],
        resuming=counts[WorkerState.RESUMING],
    )
