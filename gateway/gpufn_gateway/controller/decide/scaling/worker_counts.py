"""How many workers each revision of a function gets in this step, and why. Pure.

The role of a revision chooses the rule: `serving` and the revisions of a split scale by their own demand, `next` gets
as many workers as it needs to take over, and a retired one keeps those that its calls need (`rollout`).
"""

from __future__ import annotations

import msgspec

from gpufn_core.domain.revision import Function, Revision, RevisionState
from gpufn_core.domain.worker import WorkerState
from gpufn_gateway.controller.decide.actions import RevisionDecision
from gpufn_gateway.controller.decide.scaling import deploy_check, policy, rollout
from gpufn_gateway.controller.decide.scaling.circuit import CircuitState
from gpufn_gateway.controller.decide.scaling.demand import demand_of, workers_of
from gpufn_gateway.controller.decide.scaling.policy import Demand, ScaleDecision, Workers
from gpufn_gateway.controller.decide.scaling.rollout import RevisionHealth, Role
from gpufn_gateway.controller.state.views import RevisionView, window_for
from gpufn_gateway.controller.state.world import World


def health_of(world: World, now: float, decided: RevisionDecision, function: Function) -> RevisionHealth:
    """Return what `rollout` must know about a revision to move calls to it or from it."""
    record, want = decided.revision, decided.decision.want
    ready = len(decided.view.in_state(WorkerState.READY))
    if decided.role is Role.SERVING and function.traffic is not None:  # the next revision replaces them all
        for number in function.traffic.called:
            if number not in (function.serving, function.active):
                view = world.view((function.name, number))
                ready += len(view.in_state(WorkerState.READY))
                want = None if want is None else want + ((view.last and view.last.want) or 0)
    return RevisionHealth(
        ready=ready,
        want=want,
        is_failing=decided.view.circuit.state(now) is not CircuitState.CLOSED,
        max_workers=None if record is None else policy.effective(record.spec.scaling, function).max_workers,
        held=len(deploy_check.staying_workers(decided.view)),
        check=None if record is None or record.check is None else record.check.state,
    )


class WorkerCounts:
    """The decisions for one function in one step."""

    def __init__(self, world: World, now: float, function: Function) -> None:
        self._world = world
        self._now = now
        self._function = function
        self._decided: dict[int, RevisionDecision] = {}

    def decide(self) -> dict[int, RevisionDecision]:
        """Return a decision for each revision that is called or has workers or calls, by number."""
        function = self._function
        numbers = self._world.numbers(function.name) | function.called
        # The serving revision comes first: it determines how many workers the next one gets.
        for number in sorted(numbers, key=lambda number: (number != function.serving, number != function.active)):
            self._decided[number] = self._decide_revision(number)
        if function.traffic is not None:
            self._divide()
        return self._decided

    def _decide_revision(self, number: int) -> RevisionDecision:
        world, now = self._world, self._now
        key = (self._function.name, number)
        view, record = world.view(key), world.revisions.get(key)
        role = rollout.role_of(self._function, number)
        demand = demand_of(world, key, now)
        workers = workers_of(world, view, record.spec.parallel_calls if record is not None else 1, now)
        if record is None:
            decision = ScaleDecision(workers.held, f"revision {number} is not loaded yet: keep its workers")
        elif record.state is RevisionState.FAILED and role is not Role.RETIRED:
            reason = f"revision {number} failed to start: correct the error and deploy again"
            decision = ScaleDecision(0, reason, want=0)
        elif role in (Role.SERVING, Role.SPLIT):
            decision = self._scale(record, view, demand, workers)
        elif role is Role.NEXT:
            decision = self._for_takeover(record, view, demand, workers)
        else:
            calls = None if demand is None else demand.calls
            count = rollout.workers_for_retired(demand, workers, now - view.served_at)
            decision = ScaleDecision(count, f"revision {number} is retired, {calls} calls left", want=count)
        return RevisionDecision(key, role, view, decision, demand, record, workers)

    def _for_takeover(
        self, record: Revision, view: RevisionView, demand: Demand | None, workers: Workers
    ) -> ScaleDecision:
        function, number = self._function, record.number
        highest = policy.effective(record.spec.scaling, function).max_workers
        serving = health_of(self._world, self._now, self._decided[function.serving], function)
        count = min(rollout.workers_for_next(serving, highest), highest)
        count = max(count, min(workers.held, highest))
        decision = ScaleDecision(count, f"revision {number} takes over: start with {count}", want=count)
        if rollout.is_split(function, number):  # it has calls already
            scaled = self._scale(record, view, demand, workers)
            return scaled if scaled.count > count else decision
        return decision

    def _scale(self, record: Revision, view: RevisionView, demand: Demand | None, workers: Workers) -> ScaleDecision:
        """Scale a revision that gets calls, by its policy."""
        world, now, function = self._world, self._now, self._function
        view.served_at = now
        scaling = rollout.part_of(policy.effective(record.spec.scaling, function), function, record.number)
        window = window_for(view, scaling.scaledown_window_s, workers.held, now)
        if not workers.held and world.drained:
            # All of its workers leave: they prove that workers are wanted, and each of them needs a replacement.
            workers = workers_of(world, view, workers.slots, now, with_leaving=True)
            decision = policy.decide(scaling, demand, workers, peak=window.at(now), last=view.last)
            if decision.want is not None:
                decision = msgspec.structs.replace(decision, count=decision.want)
        else:
            decision = policy.decide(scaling, demand, workers, peak=window.at(now), last=view.last)
        window.record(now, decision.keep)
        if record.is_checked_first and decision.count == 0 and scaling.max_workers:
            return ScaleDecision(1, f"checking revision {record.number}: 1 worker", want=1)
        return decision

    def _divide(self) -> None:
        """Keep the revisions of a split within the max_workers of the function. A revision that wants more starts
        workers when surplus workers of another have left."""
        function = self._function
        record = self._decided[function.serving].revision
        if record is None:
            return
        shared = {number: each for number, each in self._decided.items() if rollout.is_split(function, number)}
        most = policy.effective(record.spec.scaling, function).max_workers
        given = rollout.divide({number: each.decision.count for number, each in shared.items()}, most)
        free = max(0, most - sum(each.workers.held for each in shared.values()))
        for number, each in shared.items():
            wanted, held = each.decision.count, each.workers.held
            count = min(given[number], held + free) if given[number] > held else given[number]
            free -= max(0, count - held)
            if count < wanted:
                each.gives_way = count < held
                reason = f"{each.decision.reason}; max_workers={most} is shared by the revisions of the split"
                each.decision = msgspec.structs.replace(each.decision, count=count, reason=reason, limited=True)
