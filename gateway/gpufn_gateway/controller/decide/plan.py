"""One step of the controller as a pure function: `plan(world, now) -> Plan`, its actions and what to tell.

1. Assignments on lost nodes are given up, unless their workers still serve.
2. Per function: its roles (serving, next, retired), a ScaleDecision per revision, whether `serving` moves. A revision
   that is to be checked has one worker at least, and its check ends when that is READY, fails, or finds no room.
3. Workers above their revision's count park, or drain, the longest idle first; those that were parked for long enough
   drain (`Leaving`).
4. Missing workers resume, where one is parked and its share is free, or are placed: functions that have none first, of
   them first those whose starts do not fail, then who has waited longest.
5. Where there is no room for a function that has calls, parked workers of others drain, the least worth first, and idle
   ones park or drain, the longest idle first; when nobody is idle and it has waited `PATIENCE_S`, one of a function
   that has several.

What fails for one function fails for it alone: its actions of this step are dropped, and its last decision stands.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator

from gpufn_core.domain import circuit_errors
from gpufn_core.domain.invocation import OutcomeKind, was_deleted
from gpufn_core.domain.revision import Function, Revision, RevisionState
from gpufn_core.domain.worker import WorkerState
from gpufn_core.protocol.reports import FunctionStatus
from gpufn_gateway.controller.decide import deploy_check, policy, rollout
from gpufn_gateway.controller.decide.actions import (
    Action,
    Decided,
    EndQueued,
    MoveActive,
    MoveServing,
    Need,
    Plan,
    Resume,
    Start,
)
from gpufn_gateway.controller.decide.circuit import CircuitState
from gpufn_gateway.controller.decide.demand import demand_of, workers_of
from gpufn_gateway.controller.decide.policy import ScaleDecision
from gpufn_gateway.controller.decide.preemption import Return, Room
from gpufn_gateway.controller.decide.rollout import Role, Standing
from gpufn_gateway.controller.decide.scale_down import Leaving
from gpufn_gateway.controller.decide.status import NO_ROOM, Teller
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.last_failure import Unplaced
from gpufn_gateway.controller.placement.node_choice import NoRoom
from gpufn_gateway.controller.placement.request import Wanted
from gpufn_gateway.controller.state.views import WorkerView, window_for
from gpufn_gateway.controller.state.world import World

PATIENCE_S = 2.0
DELETED_FOR_S = 2.0
START_SLOT_S = 10.0  # a start that takes longer waits for its own load: it must not keep others from starting


def plan(world: World, now: float, *, only: Iterable[str] | None = None, limits: Limits | None = None) -> Plan:
    """What to do now. `only`: just these functions (one doorbell need not pay for a look at all of them)."""
    return _Step(world, now, limits or Limits()).run(only)


class _Step:
    def __init__(self, world: World, now: float, limits: Limits) -> None:
        self.world = world
        self.now = now
        self.limits = limits
        self.actions: list[Action] = []
        self.needs: list[Need] = []
        self.decided: dict[str, list[Decided]] = {}
        self.leaving = Leaving(world, now, self.actions)
        self.notes: dict[str, str] = {}  # of rollouts
        self.failed: dict[str, Exception] = {}
        self._room: Room | None = None

    def run(self, only: Iterable[str] | None) -> Plan:
        names: Iterable[str]
        if only is None:
            self._give_up_lost_workers()
            self._end_calls_of_deleted()
            names = self.world.functions.keys() | {worker.key[0] for worker in self.world.workers.values()}
        else:
            names = only
        for name in sorted(names):
            with self._alone(name):
                function = self.world.functions.get(name)
                if function is None:
                    self.leaving.drain_all(name, "the function was deleted")
                else:
                    self._decide(function)
        if only is not None and self.needs:
            # Room is given in order: who waits for it has a say, whoever's turn it was to be looked at.
            for name in sorted(self.world.waiting - self.decided.keys()):
                with self._alone(name):
                    if name in self.world.functions:
                        self._decide(self.world.functions[name])
        without_room = self._start()
        self._explain(without_room, is_full=only is None)
        self._make_room(without_room)
        self._note_unplaced(without_room)
        checked = [need for need in without_room if need.revision.is_checked_first]
        has_nodes = bool(checked and self.world.reports(self.now))
        for need in checked:
            with self._alone(need.key[0]):
                if (end := deploy_check.without_room(need, self.now, has_nodes=has_nodes)) is not None:
                    self.actions.append(end)
        still_waiting = self.world.waiting - self.decided.keys() if only is not None else set()
        self.world.waiting = still_waiting | {need.key[0] for need in without_room}
        teller = Teller(self.world, self.now, self._room)
        statuses: dict[str, FunctionStatus] = {}
        for name, decided in list(self.decided.items()):
            with self._alone(name):
                statuses[name] = teller.status(self.world.functions[name], decided, self.notes.get(name))
        return Plan(tuple(self.actions), statuses, self.failed)

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """One number that could not be computed with stopped the controller for everybody."""
        begun = len(self.actions)
        try:
            yield
        except Exception as error:
            self.failed[name] = error
            for action in self.actions[begun:]:
                self.leaving.take_back(action)
            del self.actions[begun:]
            self.needs = [need for need in self.needs if need.key[0] != name]
            self.decided.pop(name, None)

    # 1

    def _give_up_lost_workers(self) -> None:
        for worker, who in self.world.lost_workers(self.now):
            self.leaving.give_up(worker, f"{who} is silent")

    def _end_calls_of_deleted(self) -> None:
        """Of those that came while the gateway deleted it; the gateway has ended the others."""
        for name in self.world.deleted_functions(self.now, DELETED_FOR_S):
            error = was_deleted(name).info()
            for number in sorted(self.world.numbers(name)):
                self.actions.append(EndQueued(name, number, OutcomeKind.CANCELLED, error))

    # 2

    def _decide(self, function: Function) -> None:
        numbers = self.world.numbers(function.name) | {function.serving, function.active}
        # The serving revision first: how many the next one gets depends on it.
        decided: dict[int, Decided] = {}
        for number in sorted(numbers, key=lambda number: (number != function.serving, number != function.active)):
            decided[number] = self._decide_revision(function, number, decided.get(function.serving))
        self.decided[function.name] = list(decided.values())
        if function.active != function.serving:
            self._move(function, decided[function.serving], decided[function.active])
        for one in decided.values():
            if (end := deploy_check.ended(one, function)) is not None:
                self.actions.append(end)
            self.leaving.drain_surplus(one, function)
            self.leaving.drain_parked(one, function)

    def _decide_revision(self, function: Function, number: int, serving: Decided | None) -> Decided:
        world, now = self.world, self.now
        key = (function.name, number)
        view = world.view(key)
        record = world.revisions.get(key)
        role = rollout.role_of(function, number)
        demand = demand_of(world, key, now)
        slots = record.spec.parallel_calls if record is not None else 1
        workers = workers_of(world, view, slots, now)
        if record is None:
            decision = ScaleDecision(workers.held, f"revision {number} is not known here: keep")
        elif record.state is RevisionState.FAILED and role is not Role.RETIRED:
            decision = ScaleDecision(0, f"revision {number} does not start: deploy the function again", want=0)
        elif role is Role.SERVING:
            view.served_at = now
            scaling = policy.effective(record.spec.scaling, function)
            window = window_for(view, scaling.scaledown_window_s, workers.held, now)
            decision = policy.decide(scaling, demand, workers, peak=window.at(now), last=view.last)
            window.record(now, decision.keep)
            if record.is_checked_first and decision.count == 0 and scaling.max_workers:
                decision = ScaleDecision(1, f"revision {number} is checked: 1 worker", want=1)
        elif role is Role.NEXT:
            assert serving is not None
            highest = policy.effective(record.spec.scaling, function).max_workers
            count = min(rollout.workers_for_next(self._standing(serving, function), highest), highest)
            count = max(count, min(workers.held, highest))
            decision = ScaleDecision(count, f"revision {number} takes over: {count} to begin with", want=count)
        else:
            calls = None if demand is None else demand.calls
            count = rollout.workers_for_retired(demand, workers, now - view.served_at)
            decision = ScaleDecision(count, f"revision {number} is retired, {calls} calls left", want=count)
        view.last = decision
        one = Decided(key, role, view, decision, demand, record)
        self._end_queued(one)
        if record is not None and decision.count > workers.held:
            self._need(one, record, decision.count - workers.held, workers.starting, workers.held)
        elif demand is None or not demand.calls or workers.ready:
            view.waiting_since = None
        return one

    def _need(self, one: Decided, record: Revision, missing: int, starting: int, held: int) -> None:
        allowed = one.view.circuit.starts_allowed(self.now, missing, starting)
        calls = one.demand.calls if one.demand is not None else 0
        serving = self.world.view((one.key[0], self.world.functions[one.key[0]].serving))
        is_check = deploy_check.is_only_check(one, serving)
        if one.view.waiting_since is None:
            one.view.waiting_since = self.now
        if allowed == 0:
            return
        one.need = Need(
            key=one.key,
            revision=record,
            wanted=Wanted.by(record),
            view=one.view,
            missing=allowed,
            calls=calls,
            # The next revision of a function that is called takes part as if it had the calls itself.
            waits_for_first=held == 0 and (calls > 0 or (one.role is Role.NEXT and not is_check)),
            reason=one.decision.reason,
            is_failing=one.view.circuit.openings > 0,
            is_next=one.role is Role.NEXT and not is_check,
            is_check=is_check,
        )
        self.needs.append(one.need)

    def _standing(self, one: Decided, function: Function) -> Standing:
        record = one.revision
        return Standing(
            ready=len(one.view.in_state(WorkerState.READY)),
            want=one.decision.want,
            is_failing=one.view.circuit.state(self.now) is not CircuitState.CLOSED,
            most=None if record is None else policy.effective(record.spec.scaling, function).max_workers,
            held=len(deploy_check.held(one.view)),
            check=None if record is None or record.check is None else record.check.state,
        )

    def _move(self, function: Function, serving: Decided, following: Decided) -> None:
        if following.revision is not None and following.revision.state is RevisionState.FAILED:
            self.actions.append(MoveActive(function.name, function.active, "the new revision does not start"))
            return
        moves, why = rollout.may_move(self._standing(serving, function), self._standing(following, function))
        if moves:
            self.actions.append(MoveServing(function.name, function.active, why))
            # Room is the new revision's from now on, which is looked at again once it serves.
            not_now = (serving.need,) if following.view.workers else (serving.need, following.need)
            self.needs = [need for need in self.needs if not any(need is each for each in not_now)]
        else:
            failure = following.view.circuit.last_error
            told = f": {failure.summary}" if failure is not None else ""
            self.notes[function.name] = f"revision {function.active}: {why}{told}"

    def _end_queued(self, one: Decided) -> None:
        if one.view.in_state(WorkerState.READY, WorkerState.PARKED, WorkerState.RESUMING):
            return  # starts fail, and still somebody serves what is queued
        record = one.revision
        if record is not None and record.state is RevisionState.FAILED and record.error is not None:
            if one.demand is not None and one.demand.calls:
                error = circuit_errors.told(one.key[0], record.error)
                self.actions.append(EndQueued(*one.key, OutcomeKind.NOT_STARTED, error))
            return
        circuit = one.view.circuit
        if circuit.openings < 2:
            one.view.ended_at_opening = 0
        elif one.view.ended_at_opening < circuit.openings and circuit.last_error is not None and one.demand is not None:
            one.view.ended_at_opening = circuit.openings
            if one.demand.calls:
                error = circuit_errors.told(one.key[0], circuit.last_error)
                self.actions.append(EndQueued(*one.key, OutcomeKind.NOT_STARTED, error))

    # 4

    def _start(self) -> list[Need]:
        """Place what can be placed, one worker at a time in turn, so that nobody's tenth comes before another's first.

        Returns those who found no room.
        """
        if not self.needs:
            return []
        world, now = self.world, self.now
        room = self._room = Room(world, now, self.limits, self.leaving)
        reports = nodes = room.reports
        slots = {report.node: self.limits.starts_per_node for report in reports}
        for worker in world.workers.values():
            node = worker.assignment.node
            if node in slots and worker.state is WorkerState.STARTING and now - worker.since < START_SLOT_S:
                slots[node] -= 1
        nodes = [report for report in reports if slots[report.node] > 0]
        turn = sorted(
            self.needs,
            key=lambda need: (not need.waits_for_first, need.is_failing, need.view.waiting_since or now, need.key),
        )
        without_room: list[Need] = []
        while turn:
            later: list[Need] = []
            for need in turn:
                with self._alone(need.key[0]):
                    found = room.grant(need, nodes)
                    if isinstance(found, NoRoom):
                        need.is_slot_limited = len(nodes) < len(reports)
                        need.has_no_room = True
                        without_room.append(need)
                        continue
                    if isinstance(found, Return):
                        self.actions.append(Resume(found.worker.assignment.worker, need.reason))
                    else:
                        slots[found.node] -= 1
                        if slots[found.node] <= 0:
                            nodes = [report for report in nodes if slots[report.node] > 0]
                        self.actions.append(Start(*need.key, found.node, found.share, f"{need.reason}; {found.why}"))
                    need.view.unplaced = None
                    need.missing -= 1
                    need.has_begun = True
                    if need.missing:
                        later.append(need)
            turn = later
        return without_room

    def _explain(self, without_room: list[Need], *, is_full: bool) -> None:
        """Once for all that want the same: hundreds of functions may wait, and each look is at a thousand nodes."""
        room = self._room
        if room is None:
            return
        needs = {room.explained_as(need): need for need in without_room if not need.is_slot_limited}
        wanted = {key: functools.partial(room.explain, need) for key, need in needs.items()}
        texts = self.world.shortages.explain(wanted, len(room.reports), renew=is_full)
        for need in without_room:
            need.no_room = texts.get(room.explained_as(need), "")

    def _note_unplaced(self, without_room: list[Need]) -> None:
        """Its calls may expire, and then nothing else reports that no node can run it."""
        for need in without_room:
            if self._room is not None and need.calls and need.waits_for_first and not need.is_slot_limited:
                need.view.unplaced = Unplaced(self.now, need.wanted, need.no_room or NO_ROOM, self._room.reports)
        noted = [
            (one.key[0], one.view, one.view.unplaced)
            for decided in self.decided.values()
            for one in decided
            if one.need is None and one.view.unplaced is not None
        ]
        if not noted:
            return
        reports = self.world.reports(self.now)
        for name, view, unplaced in noted:
            with self._alone(name):
                view.unplaced = unplaced.after(reports, self.limits)

    # 5

    def _make_room(self, waiting: list[Need]) -> None:
        waiting = [
            need
            for need in waiting
            if (need.calls or need.waits_for_first or need.is_next) and not need.is_slot_limited
        ]
        if not waiting or self._room is None:
            return
        room = self._room
        room.count_what_leaves()
        parked, idle = room.parked_workers(), room.idle_workers()
        for need in waiting:
            with self._alone(need.key[0]):
                of_busy = self._has_lost_patience(need)
                if room.claim(need) or not room.can_be_made(need, of_busy=of_busy):
                    continue
                others = [worker for worker in (*parked, *idle) if worker.key[0] != need.key[0]]
                surplus = room.surplus_of_others(need)
                if need.is_next and not need.waits_for_first:
                    # The rest of a rollout takes its place from the old revision alone.
                    others, surplus = [], [worker for worker in surplus if worker.key[0] == need.key[0]]
                others += self._other_revisions(need, idle)
                if not room.evict_for(need, others) and not (of_busy and room.evict_for(need, surplus)):
                    room.was_not_made(need, of_busy=of_busy)

    def _other_revisions(self, need: Need, idle: list[WorkerView]) -> list[WorkerView]:
        """Of the same function; for a revision that failed to start only those that its next try takes nothing from.
        The old revision takes nothing back from the next one, which is idle until calls go there, unless that fails."""
        function = self.world.functions[need.key[0]]
        following = (function.name, function.active)
        is_failing = self.world.view(following).circuit.state(self.now) is not CircuitState.CLOSED
        may_be_taken = is_failing or function.active == function.serving
        return [
            worker
            for worker in idle
            if worker.key[0] == need.key[0]
            and worker.key != need.key
            and (may_be_taken or worker.key != following)
            and (self.world.idle_for(worker, self.now) or 0.0) >= need.view.circuit.backoff_s
        ]

    def _has_lost_patience(self, need: Need) -> bool:
        since = need.view.waiting_since
        if need.has_begun or since is None or self.now - since < PATIENCE_S:
            return False
        # The next revision takes another place when what it has is READY: it may not start at all, or be enough.
        return need.waits_for_first or (need.is_next and not need.view.in_state(WorkerState.STARTING))
