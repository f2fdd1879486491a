"""One step of the controller as a pure function: `plan(world, now) -> Plan`, with actions and statuses.

1. Delete the assignments on lost nodes, unless their workers still serve. Drain the rest of a gang that lost a process.
2. Per function: find its roles (serving, next, retired), make a ScaleDecision per revision, and decide whether
   `serving` moves. A revision with a pending check gets at least one worker; the check ends when a worker is READY,
   fails, or finds no room.
3. Park or drain the workers above their revision's count, longest idle first. Drain workers that have been parked for
   long enough (`Removals`).
4. Resume missing workers where one is parked and its share is free, or place new ones. The team with the least recent
   GPU seconds for its weight comes first. In a team, functions without workers come first, of these the ones whose
   starts do not fail, then the longest waiting.
5. If there is no room for a function with calls, drain parked workers of other functions, least worth first. Then park
   or drain idle ones, longest idle first. If no worker is idle and the function has waited `BUSY_EVICTION_AFTER_S`,
   take a worker from a function with several workers, or a worker that another team has borrowed. A team at its limit
   gives up one of its own workers.

6. The workers on drained nodes leave: at once if they are not READY. READY workers leave when as many others are READY,
   when their starts fail, or when no node has had room for `LEAVE_WITHOUT_ROOM_S`.

An exception while one function is processed affects that function only: its actions of this step are dropped, and its
last decision stands.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator

from gpufn_core.domain import circuit_errors
from gpufn_core.domain.invocation import OutcomeKind, deleted_error
from gpufn_core.domain.revision import Function, Revision, RevisionState
from gpufn_core.domain.worker import Cause, WorkerState
from gpufn_core.protocol.reports import FunctionStatus, NodeReport
from gpufn_gateway.controller.decide import actions
from gpufn_gateway.controller.decide.actions import Action, Need, RevisionDecision
from gpufn_gateway.controller.decide.room.allocator import Allocator, Resumption
from gpufn_gateway.controller.decide.room.make_room import RoomMaker
from gpufn_gateway.controller.decide.room.scale_down import Removals
from gpufn_gateway.controller.decide.room.team_shares import Rounds, TeamShares
from gpufn_gateway.controller.decide.scaling import deploy_check, rollout
from gpufn_gateway.controller.decide.scaling.circuit import CircuitState
from gpufn_gateway.controller.decide.scaling.rollout import Role
from gpufn_gateway.controller.decide.scaling.worker_counts import WorkerCounts, health_of
from gpufn_gateway.controller.decide.status import NO_ROOM, StatusWriter
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.last_failure import PlacementFailure
from gpufn_gateway.controller.placement.node_choice import NoRoom, Placement
from gpufn_gateway.controller.placement.request import Requirements
from gpufn_gateway.controller.placement.start_time import StartTimes
from gpufn_gateway.controller.state.views import RevisionView
from gpufn_gateway.controller.state.world import World

DELETED_FOR_S = 2.0
LEAVE_WITHOUT_ROOM_S = 5.0  # preemption makes room within it, if it can
START_SLOT_S = 10.0  # a start that takes longer is busy with its own load and must not keep others from starting


def plan(world: World, now: float, *, only: Iterable[str] | None = None, limits: Limits | None = None) -> actions.Plan:
    """Return the actions to take now. With `only`, look at these functions only: one wakeup need not pay for all of
    them."""
    return _Step(world, now, limits or Limits()).run(only)


class _Step:
    def __init__(self, world: World, now: float, limits: Limits) -> None:
        self.world = world
        self.now = now
        self.limits = limits
        self.actions: list[Action] = []
        self.needs: list[Need] = []
        self.decided: dict[str, list[RevisionDecision]] = {}
        self.removals = Removals(world, now, self.actions)
        self.notes: dict[str, str] = {}  # of rollouts
        self.failed: dict[str, Exception] = {}
        self.shares = TeamShares(world)
        self._allocator: Allocator | None = None

    def run(self, only: Iterable[str] | None) -> actions.Plan:
        is_full = only is None
        names = self._begin_full() if only is None else only
        self.removals.end_broken_gangs()
        self._decide_each(names)
        if not is_full and self.needs:
            # Room is granted in order, so functions that wait for room take part in every step.
            self._decide_each(name for name in self.world.waiting - self.decided.keys() if name in self.world.functions)
        without_room = self._start()
        self._explain(without_room, is_full=is_full)
        self._make_room(without_room)
        self._leave_drained_nodes()
        self._note_unplaced(without_room)
        self._end_checks_without_room(without_room)
        still_waiting = set() if is_full else self.world.waiting - self.decided.keys()
        self.world.waiting = still_waiting | {need.key[0] for need in without_room}
        return actions.Plan(tuple(self.actions), self._statuses(), self.failed)

    def _begin_full(self) -> Iterable[str]:
        """Do what only a full step does, and return all functions: also deleted ones that still have workers."""
        self.world.team_use.observe(self.shares.costs, self.now)
        self._delete_lost_workers()
        self._end_calls_of_deleted()
        return self.world.functions.keys() | {worker.key[0] for worker in self.world.workers.values()}

    def _decide_each(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            with self._isolated(name):
                function = self.world.functions.get(name)
                if function is None:
                    self.removals.drain_all(name, "the function was deleted")
                else:
                    self._decide(function)

    def _statuses(self) -> dict[str, FunctionStatus]:
        status_writer = StatusWriter(self.world, self.now, self._allocator)
        statuses: dict[str, FunctionStatus] = {}
        for name, decisions in list(self.decided.items()):
            with self._isolated(name):
                statuses[name] = status_writer.status(self.world.functions[name], decisions, self.notes.get(name))
        return statuses

    @contextlib.contextmanager
    def _isolated(self, name: str) -> Iterator[None]:
        """Contain an exception to one function. A number that could not be computed once stopped every function."""
        first = len(self.actions)
        try:
            yield
        except Exception as error:
            self.failed[name] = error
            for action in self.actions[first:]:
                self.removals.undo(action)
            del self.actions[first:]
            self.needs = [need for need in self.needs if need.key[0] != name]
            self.decided.pop(name, None)

    # 1

    def _delete_lost_workers(self) -> None:
        for worker, silent in self.world.lost_workers(self.now):
            self.removals.delete(worker, f"{silent} is silent")

    def _end_calls_of_deleted(self) -> None:
        """End calls that were queued while the gateway deleted their function. The gateway has ended the others."""
        for name in self.world.deleted_functions(self.now, DELETED_FOR_S):
            error = deleted_error(name).info()
            for number in sorted(self.world.numbers(name)):
                self.actions.append(actions.EndQueued(name, number, OutcomeKind.CANCELLED, error))

    # 2

    def _decide(self, function: Function) -> None:
        by_number = WorkerCounts(self.world, self.now, function).decide()
        for decided in by_number.values():
            self._finish(decided)
        self.decided[function.name] = list(by_number.values())
        if function.active != function.serving:
            self._move(function, by_number[function.serving], by_number[function.active])
        for decided in by_number.values():
            if (end := deploy_check.end_of_check(decided, function)) is not None:
                self.actions.append(end)
            self.removals.end_moves(decided, function)
            self.removals.drain_surplus(decided, function)
            self.removals.drain_parked(decided, function)
            if self.world.drained:
                self.removals.leave_nodes(decided)

    def _finish(self, decided: RevisionDecision) -> None:
        decision, demand, view, workers = decided.decision, decided.demand, decided.view, decided.workers
        view.last = decision
        self._end_queued(decided)
        if decided.revision is not None and decision.count > workers.held:
            missing = decision.count - workers.held
            self._need(decided, decided.revision, missing, workers.starting, workers.held)
        elif demand is None or not demand.calls or workers.ready:
            view.waiting_since = None

    def _need(self, decided: RevisionDecision, record: Revision, missing: int, starting: int, held: int) -> None:
        allowed = decided.view.circuit.starts_allowed(self.now, missing, starting)
        calls = decided.demand.calls if decided.demand is not None else 0
        serving = self.world.view((decided.key[0], self.world.functions[decided.key[0]].serving))
        is_check = deploy_check.is_only_check(decided, serving)
        if decided.view.waiting_since is None:
            decided.view.waiting_since = self.now
        if allowed == 0:
            return
        decided.need = Need(
            key=decided.key,
            revision=record,
            requirements=Requirements.from_revision(
                record, self.world.teams.of(decided.key[0]) if self.shares.has_teams else None
            ),
            starts=self._start_times(record, decided.view),
            view=decided.view,
            missing=allowed,
            calls=calls,
            # The next revision of a function with calls competes as if the calls were its own.
            waits_for_first=held == 0 and (calls > 0 or (decided.role is Role.NEXT and not is_check)),
            reason=decided.decision.reason,
            is_failing=decided.view.circuit.openings > 0,
            is_next=decided.role is Role.NEXT and not is_check,
            is_check=is_check,
        )
        self.needs.append(decided.need)

    def _start_times(self, record: Revision, view: RevisionView) -> StartTimes | None:
        """Return None if no node is known to start it sooner than others."""
        weights = {spec.digest: spec.size for spec in record.spec.weights}
        if not weights and not view.start_s_by_node:
            return None
        nodes = self.world.nodes if weights else {}
        stored = {name: node.report.weights for name, node in nodes.items() if node.report is not None}
        return StartTimes(weights, stored, view.start_s_by_node, view.typical_start_s)

    def _move(self, function: Function, serving: RevisionDecision, following: RevisionDecision) -> None:
        if following.revision is not None and following.revision.state is RevisionState.FAILED:
            self.actions.append(actions.MoveActive(function.name, function.active, "the new revision failed to start"))
            return
        moves, why = rollout.may_move(
            health_of(self.world, self.now, serving, function), health_of(self.world, self.now, following, function)
        )
        if moves:
            self.actions.append(actions.MoveServing(function.name, function.active, why))
            # From now on the room belongs to the new revision, which is checked again once it serves.
            dropped = (serving.need,) if following.view.workers else (serving.need, following.need)
            self.needs = [need for need in self.needs if not any(need is each for each in dropped)]
        else:
            failure = following.view.circuit.last_error
            reason = f": {failure.summary}" if failure is not None else ""
            self.notes[function.name] = f"revision {function.active}: {why}{reason}"

    def _end_queued(self, decided: RevisionDecision) -> None:
        if decided.view.in_state(WorkerState.READY, WorkerState.PARKED, WorkerState.RESUMING):
            return  # starts fail, but another worker serves the queued calls
        record = decided.revision
        if record is not None and record.state is RevisionState.FAILED and record.error is not None:
            if decided.demand is not None and decided.demand.calls:
                error = circuit_errors.caller_error(decided.key[0], record.error)
                self.actions.append(actions.EndQueued(*decided.key, OutcomeKind.NOT_STARTED, error))
            return
        circuit, demand = decided.view.circuit, decided.demand
        if circuit.openings < 2:
            decided.view.ended_at_opening = 0
        elif decided.view.ended_at_opening < circuit.openings and circuit.last_error is not None and demand is not None:
            decided.view.ended_at_opening = circuit.openings
            if demand.calls:
                error = circuit_errors.caller_error(decided.key[0], circuit.last_error)
                self.actions.append(actions.EndQueued(*decided.key, OutcomeKind.NOT_STARTED, error))

    # 4

    def _start(self) -> list[Need]:
        """Place workers where possible, in the order of `Rounds`. Return the needs without room."""
        if not self.needs:
            return []
        allocator = self._allocator = Allocator(self.world, self.now, self.limits, self.removals)
        reports = allocator.reports
        slots = self._starts_left(reports)
        nodes = [report for report in reports if slots[report.node] > 0]
        ordered = sorted(
            self.needs,
            key=lambda need: (not need.waits_for_first, need.is_failing, need.view.waiting_since or self.now, need.key),
        )
        rounds = Rounds(ordered, self.shares)
        without_room: list[Need] = []
        while (need := rounds.next()) is not None:
            with self._isolated(need.key[0]):
                need.team_limit = self.shares.refusal(need) if self.shares.has_teams else ""
                result = NoRoom() if need.team_limit else allocator.grant(need, nodes)
                if isinstance(result, NoRoom):
                    need.is_slot_limited = len(nodes) < len(reports) and not need.team_limit
                    need.has_no_room = True
                    without_room.append(need)
                    continue
                self._grant(need, result)
                if isinstance(result, Placement):
                    for each in result.by_rank:
                        slots[each.node] -= 1
                    if any(slots[each.node] <= 0 for each in result.by_rank):
                        nodes = [report for report in nodes if slots[report.node] > 0]
                if need.missing:
                    rounds.repeat(need)
        return without_room

    def _starts_left(self, reports: Iterable[NodeReport]) -> dict[str, int]:
        """Return how many more workers may start on each node."""
        slots = {report.node: self.limits.starts_per_node for report in reports}
        for worker in self.world.workers.values():
            node = worker.assignment.node
            if node in slots and worker.state is WorkerState.STARTING and self.now - worker.since < START_SLOT_S:
                slots[node] -= 1
        return slots

    def _grant(self, need: Need, result: Resumption | Placement) -> None:
        """Resume or start one worker."""
        if isinstance(result, Resumption):
            shares = [result.worker.assignment.share]
            cause = Cause.CALLS if need.calls else Cause.CAPACITY
            self.actions.append(actions.Resume(result.worker.assignment.worker, need.reason, cause))
        else:
            shares = [each.share for each in result.by_rank]
            reason = f"{need.reason}; {'; '.join(each.why for each in result.by_rank)}"
            self.actions.append(actions.Start(*need.key, result.node, result.share, reason, result.others))
        self.shares.grant(need, shares)
        need.view.placement_failure = None
        need.missing -= 1
        need.has_begun = True

    def _explain(self, without_room: list[Need], *, is_full: bool) -> None:
        """Explain once per kind of request: hundreds of functions may wait, and each look covers a thousand nodes."""
        allocator = self._allocator
        if allocator is None:
            return
        needs = {
            allocator.explanation_key(need): need
            for need in without_room
            if not (need.is_slot_limited or need.team_limit)
        }
        wanted = {key: functools.partial(allocator.explain, need) for key, need in needs.items()}
        nodes = len(allocator.reports) + len(self.world.drained)
        texts = self.world.shortages.explain(wanted, nodes, renew=is_full)
        for need in without_room:
            need.no_room = need.team_limit or texts.get(allocator.explanation_key(need), "")

    def _note_unplaced(self, without_room: list[Need]) -> None:
        """Remember the failure. The calls may expire, and then nothing else reports that no node can run them."""
        for need in without_room:
            is_unplaced = not (need.is_slot_limited or need.team_limit)
            if self._allocator is not None and need.calls and need.waits_for_first and is_unplaced:
                why, offers = need.no_room or NO_ROOM, self._allocator.reports
                need.view.placement_failure = PlacementFailure(self.now, need.requirements, why, offers)
        noted = [
            (decided.key[0], decided.view, decided.view.placement_failure)
            for decisions in self.decided.values()
            for decided in decisions
            if decided.need is None and decided.view.placement_failure is not None
        ]
        if not noted:
            return
        reports = self.world.reports(self.now)
        for name, view, placement_failure in noted:
            with self._isolated(name):
                view.placement_failure = placement_failure.after(reports, self.limits)

    def _end_checks_without_room(self, without_room: list[Need]) -> None:
        checked = [need for need in without_room if need.revision.is_checked_first]
        has_nodes = bool(checked and self.world.reports(self.now))
        for need in checked:
            with self._isolated(need.key[0]):
                if (end := deploy_check.end_without_room(need, self.now, has_nodes=has_nodes)) is not None:
                    self.actions.append(end)

    # 5

    def _make_room(self, without_room: list[Need]) -> None:
        # No worker leaves for one that is only kept warm, or that waits for its turn to start.
        waiting = [
            need
            for need in without_room
            if (need.calls or need.waits_for_first or need.is_next) and not need.is_slot_limited
        ]
        if not waiting or self._allocator is None:
            return
        maker = RoomMaker(
            self.world,
            self.now,
            allocator=self._allocator,
            shares=self.shares,
            removals=self.removals,
            actions=self.actions,
        )
        for need in waiting:
            with self._isolated(need.key[0]):
                maker.make_room_for(need)

    # 6

    def _leave_drained_nodes(self) -> None:
        if not self.world.drained:
            return
        for name, decisions in list(self.decided.items()):
            with self._isolated(name):
                for decided in decisions:
                    missing = decided.decision.count - decided.workers.ready
                    self.removals.leave_replaced(decided, missing if self._is_replaceable(decided) else 0)

    def _is_replaceable(self, decided: RevisionDecision) -> bool:
        """Return whether workers on drained nodes should wait for others to be READY."""
        need, view = decided.need, decided.view
        if decided.role is Role.RETIRED or view.circuit.state(self.now) is not CircuitState.CLOSED:
            return False
        if need is None or not need.has_no_room or need.is_slot_limited:
            return True
        return view.waiting_since is not None and self.now - view.waiting_since < LEAVE_WITHOUT_ROOM_S
