"""The status of a function after a step: counts, the reason in words, and why calls wait. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpufn_core.domain.revision import Function, Revision, RevisionState
from gpufn_core.domain.worker import WorkerState
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.reports import (
    HELD_BY,
    FunctionStatus,
    NextRevision,
    RevisionStatus,
    Waiting,
    WaitReason,
    WorkerCounts,
)
from gpufn_core.spec.naming.names import home_of
from gpufn_core.spec.units import format_bytes
from gpufn_core.spec.volume_spec import full_name_at, source_of
from gpufn_gateway.controller.decide.actions import Need, RevisionDecision
from gpufn_gateway.controller.decide.room.allocator import Allocator
from gpufn_gateway.controller.decide.scaling import policy, rollout
from gpufn_gateway.controller.decide.scaling.circuit import CircuitState
from gpufn_gateway.controller.decide.scaling.demand import demand_of
from gpufn_gateway.controller.state.views import RevisionView
from gpufn_gateway.controller.state.world import World
from gpufn_gateway.controller.store_health import NOT_STORED

_MAX_HOLDERS = 3
_MAX_GANGS = 3
NO_ROOM = "no node has room"
_WAITS_FOR_OWN = "all running calls wait for other calls of this function and hold the slots that those calls need"


class StatusWriter:
    """`allocator` is the one of this step; None if no worker was missing."""

    def __init__(self, world: World, now: float, allocator: Allocator | None) -> None:
        self._world = world
        self._now = now
        self._allocator = allocator
        self._counted: dict[bool, Counter[str]] = {}

    def status(self, function: Function, decisions: Sequence[RevisionDecision], note: str | None) -> FunctionStatus:
        serving = next(decided for decided in decisions if decided.key[1] == function.serving)
        view, decision = serving.view, serving.decision
        draining = sum(len(decided.view.in_state(WorkerState.DRAINING)) for decided in decisions)
        circuit = view.circuit
        reasons = (
            decision.reason, note, _split(function), self._failed(view), self._placement_failure(serving),
            self._unplaced(serving), self._parked(serving), self._leaving(view), _imports(view), _ranks(view),
            *map(self._fetching, decisions), *map(self._installing, decisions),
        )  # fmt: skip
        return FunctionStatus(
            function=function.name,
            serving=function.serving,
            workers=_counts(view, draining),
            queued=None if serving.demand is None else serving.demand.queued,
            running=None if serving.demand is None else serving.demand.running,
            wanted=decision.count,
            reason="; ".join(filter(None, reasons)),
            terms=decision.terms,
            waiting=self._waiting(serving),
            waiting_of={
                decided.key[1]: waiting
                for decided in decisions
                if decided is not serving and (waiting := self._waiting(decided)) is not None
            },
            service_s=view.service_s,
            cold_start_s=view.cold_start_s,
            last_start=view.last_start,
            # Not while the circuit is half open: an admitted call triggers the next attempt.
            start_error=_failed_for_good(serving.revision)
            or (circuit.last_error if circuit.state(self._now) is CircuitState.OPEN else None),
            next=None if function.active == function.serving else self._next(function.active, decisions),
            revisions=self._revisions(function, decisions),
            split_at=None if function.traffic is None else function.traffic.set_at,
        )

    def _revisions(self, function: Function, decisions: Sequence[RevisionDecision]) -> tuple[RevisionStatus, ...]:
        if function.traffic is None:
            return ()
        statuses = []
        for decided in sorted(decisions, key=lambda decided: decided.key[1]):
            if not rollout.is_split(function, decided.key[1]):
                continue
            view, demand = decided.view, decided.demand
            total, recent = self._world.split_calls.of(decided.key, self._now)
            is_failing = view.circuit.state(self._now) is not CircuitState.CLOSED
            statuses.append(
                RevisionStatus(
                    revision=decided.key[1],
                    workers=_counts(view, len(view.in_state(WorkerState.DRAINING))),
                    queued=None if demand is None else demand.queued,
                    running=None if demand is None else demand.running,
                    total=total,
                    recent=recent,
                    start_error=_failed_for_good(decided.revision) or (view.circuit.last_error if is_failing else None),
                )
            )
        return tuple(statuses)

    def _next(self, number: int, decisions: Sequence[RevisionDecision]) -> NextRevision:
        circuit = next(decided for decided in decisions if decided.key[1] == number).view.circuit
        is_failing = circuit.state(self._now) is not CircuitState.CLOSED
        return NextRevision(number, circuit.last_error if is_failing else None)

    def _placement_failure(self, decided: RevisionDecision) -> str:
        """Return why its last call got no worker, once no call waits for one any longer."""
        placement_failure = decided.view.placement_failure
        return "" if placement_failure is None or decided.need is not None else placement_failure.describe(self._now)

    def _unplaced(self, decided: RevisionDecision) -> str:
        """Return why a worker that no call waits for has no place: one of `min_workers`, for example."""
        need, demand = decided.need, decided.demand
        if need is None or not (need.has_no_room and need.no_room) or demand is None or demand.calls:
            return ""
        return f"{NO_ROOM}: {need.no_room}"

    def _failed(self, view: RevisionView) -> str:
        """Return the last failure once `start_error` no longer has it, until the next attempt."""
        circuit = view.circuit
        if circuit.state(self._now) is not CircuitState.HALF_OPEN or circuit.last_error is None:
            return ""
        if view.in_state(WorkerState.STARTING):
            return ""
        summary, _, _ = circuit.last_error.summary.partition("\n")
        return f"its last worker did not start: {summary}"

    def _parked(self, decided: RevisionDecision) -> str:
        """Return how long parked workers are kept, or why none is parked."""
        if decided.revision is None or not decided.revision.spec.park_timeout_s:
            return ""
        if parked := decided.view.in_state(WorkerState.PARKED):
            return f"{len(parked)} parked for at most {decided.revision.spec.park_timeout_s:g} s"
        return f"none is parked: {decided.view.no_parking_reason}" if decided.view.no_parking_reason else ""

    def _leaving(self, view: RevisionView) -> str:
        """Return which nodes its workers leave because they are drained."""
        if not self._world.drained:
            return ""
        nodes = {each.assignment.node for each in view.workers.values() if self._world.must_leave(each)}
        count = sum(self._world.must_leave(each) for each in view.workers.values())
        verb = "workers leave" if count > 1 else "worker leaves"
        return f"{count} {verb} {', '.join(sorted(nodes)[:_MAX_HOLDERS])}: drained" if nodes else ""

    def _waiting(self, decided: RevisionDecision) -> Waiting | None:
        """Return why calls wait, if any do."""
        demand = decided.demand
        slots = decided.revision.spec.parallel_calls if decided.revision is not None else 1
        ready = len(decided.view.in_state(WorkerState.READY))
        if gpus := {worker.waits_on for worker in decided.view.in_state(WorkerState.READY)} - {""}:
            return Waiting(WaitReason.TURN, f"waits for its turn on {min(gpus)}")
        if demand is None or not demand.calls or (ready and demand.calls <= ready * slots - demand.stuck):
            return None
        if decided.view.circuit.openings and not ready:
            return self._crash_looping(decided.view)
        starting = len(decided.view.in_state(WorkerState.STARTING, WorkerState.RESUMING))
        if not starting and decided.need is not None and decided.need.has_no_room:
            return self._no_room(decided.need)
        if starting or decided.need is not None:
            return self._starting(decided)
        return self._full(decided)

    def _full(self, decided: RevisionDecision) -> Waiting | None:
        """Return why calls wait when all slots are taken and no workers are starting."""
        ready = decided.view.in_state(WorkerState.READY)
        if ready and all(worker.in_use == worker.waits_for_own > 0 for worker in ready):
            return Waiting(WaitReason.LIMIT, _WAITS_FOR_OWN)
        if decided.decision.limited:
            return Waiting(WaitReason.LIMIT, f"max_workers is reached: {decided.decision.count}")
        return None

    def _no_room(self, need: Need) -> Waiting:
        if need.is_slot_limited:
            return Waiting(WaitReason.STARTING, "waits its turn: many workers are being started")
        if need.team_limit:
            return Waiting(WaitReason.LIMIT, need.team_limit)
        return Waiting(WaitReason.NO_CAPACITY, (need.no_room or NO_ROOM) + self._held_by(need))

    def _held_by(self, need: Need) -> str:
        """Name the functions that hold the room, if an empty node would have some."""
        if self._allocator is None or not self._allocator.fits_empty_node(need):
            return ""
        holders = self._holders(of_gpus=bool(need.requirements.resources.gpu))
        texts = [self._holder(name, count) for name, count in holders.most_common(_MAX_HOLDERS)]
        if more := len(holders) - len(texts):
            texts.append(f"{more} more")
        return f"{HELD_BY}{' and '.join(filter(None, (', '.join(texts[:-1]), texts[-1])))}" if texts else ""

    def _holders(self, *, of_gpus: bool) -> Counter[str]:
        """Count the workers by function, once a step: hundreds of functions may wait."""
        if of_gpus not in self._counted:
            self._counted[of_gpus] = Counter(
                worker.key[0]
                for worker in self._world.workers.values()
                if worker.parked is None
                and not worker.assignment.rank
                and (worker.assignment.share.gpus or not of_gpus)
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
        error = view.circuit.last_error.summary if view.circuit.last_error is not None else "unknown"
        retry_in_s = view.circuit.retry_in_s(self._now)
        return Waiting(WaitReason.CRASH_LOOPING, f"its workers fail to start: {error}", retry_in_s or None)

    def _starting(self, decided: RevisionDecision) -> Waiting:
        view = decided.view
        starting = view.in_state(WorkerState.STARTING, WorkerState.RESUMING)
        if self._world.store.is_stuck(self._now) and not any(worker.is_stored for worker in starting):
            return Waiting(WaitReason.STORE, NOT_STORED)
        if fetching := self._fetching(decided):
            return Waiting(WaitReason.WEIGHTS, fetching)
        if view.in_state(WorkerState.RESUMING):
            return Waiting(WaitReason.STARTING, "a parked worker is resuming", view.cold_start_s)
        since = [worker.since for worker in view.in_state(WorkerState.STARTING)]
        typical_s = view.cold_start_s
        for_s = self._now - min(since) if since else 0.0
        text = f"a worker has been starting for {for_s:.1f} s"
        if installing := self._installing(decided):
            return Waiting(WaitReason.STARTING, f"{text}: {installing}")
        return Waiting(WaitReason.STARTING, text, None if typical_s is None else max(0.0, typical_s - for_s))

    def _fetching(self, decided: RevisionDecision) -> str:
        """Return which weights or volume a starting worker waits for, and how many bytes are there; "" if it waits for
        none."""
        if decided.revision is None or not (decided.revision.spec.weights or decided.revision.spec.mounts):
            return ""
        wanted = {spec.digest for spec in decided.revision.spec.weights}
        home = home_of(decided.revision.function)
        # The node selects the version that a worker reads: the newest version when the worker starts.
        volumes = tuple(source_of(full_name_at(mount.name, home), "") for mount in decided.revision.spec.mounts)
        for worker in decided.view.in_state(WorkerState.STARTING):
            node = self._world.nodes.get(worker.assignment.node)
            for fetch in node.report.weights.fetches if node is not None and node.report is not None else ():
                if fetch.digest in wanted or fetch.source.startswith(volumes):
                    done, total = format_bytes(fetch.done_bytes), format_bytes(fetch.total_bytes)
                    kind = "weights" if fetch.digest in wanted else "volume"
                    return f"node {worker.assignment.node} fetches the {kind} {fetch.source}: {done} of {total}"
        return ""

    def _installing(self, decided: RevisionDecision) -> str:
        """Return which node installs the packages of a starting worker; "" if none does."""
        if decided.revision is None or (image := decided.revision.spec.image) is None:
            return ""
        for worker in decided.view.in_state(WorkerState.STARTING):
            node = self._world.nodes.get(worker.assignment.node)
            if node is not None and node.report is not None and image.digest in node.report.making_environments:
                return f"node {worker.assignment.node} installs its packages"
        return ""


def _split(function: Function) -> str:
    """Return how the calls are divided, or why they no longer are."""
    texts = []
    if function.traffic is not None:
        texts.append(f"calls are split: {function.traffic.describe()}")
    if (returned := function.returned) is not None:
        texts.append(f"the split {returned.weights} was undone: revision {returned.revision}, {returned.reason}")
    return "; ".join(texts)


def _failed_for_good(record: Revision | None) -> ErrorInfo | None:
    """Return why the first deploy of a function failed: no other revision serves, and this revision is not retried."""
    return record.error if record is not None and record.state is RevisionState.FAILED else None


def statuses_without_leader(world: World, now: float) -> dict[str, FunctionStatus]:
    """Return the status of every function while no controller can lead because the lease cannot be stored."""
    statuses = {}
    for name, function in world.functions.items():
        view = world.view((name, function.serving))
        demand = demand_of(world, (name, function.serving), now)
        waits = (demand is None or demand.calls) and not view.in_state(WorkerState.READY)
        statuses[name] = FunctionStatus(
            function=name,
            serving=function.serving,
            workers=_counts(view, len(view.in_state(WorkerState.DRAINING))),
            queued=None if demand is None else demand.queued,
            running=None if demand is None else demand.running,
            wanted=0 if view.last is None else view.last.count,
            reason=f"the last decision stands: {NOT_STORED}",
            waiting=Waiting(WaitReason.STORE, NOT_STORED) if waits else None,
            service_s=view.service_s,
            cold_start_s=view.cold_start_s,
        )
    return statuses


def _imports(view: RevisionView) -> str:
    """Return which modules its workers import themselves: a process that has imported them cannot be forked."""
    return f"its workers cannot start from a template in full: {view.refused_modules}" if view.refused_modules else ""


def _ranks(view: RevisionView) -> str:
    """Return the nodes of each gang, in the order of their ranks."""
    workers = [worker for worker in view.workers.values() if worker.state.live]
    gangs = [gang for worker in workers if (gang := worker.assignment.gang) is not None]
    texts = [", ".join(rank.node for rank in gang.ranks) for gang in gangs[:_MAX_GANGS]]
    if more := len(gangs) - len(texts):
        texts.append(f"{more} more")
    return f"ranks run on {'; '.join(texts)}" if texts else ""


def _counts(view: RevisionView, draining: int) -> WorkerCounts:
    """Count the workers by state. `draining` includes workers of other revisions."""
    counts = Counter(worker.state for worker in view.workers.values())
    return WorkerCounts(
        ready=counts[WorkerState.READY],
        starting=counts[WorkerState.STARTING],
        draining=draining,
        parking=counts[WorkerState.PARKING],
        parked=counts[WorkerState.PARKED],
        resuming=counts[WorkerState.RESUMING],
    )
