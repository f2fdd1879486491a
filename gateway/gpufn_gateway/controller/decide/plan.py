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

import msgspec

from gpufn_core.domain import circuit_errors
from gpufn_core.domain.invocation import OutcomeKind, deleted_error
from gpufn_core.domain.revision import Function, Revision, RevisionState
from gpufn_core.domain.worker import Cause, WorkerState
from gpufn_core.protocol.reports import FunctionStatus
from gpufn_gateway.controller.decide import actions, deploy_check, policy, rollout
from gpufn_gateway.controller.decide.actions import Action, Need, RevisionDecision
from gpufn_gateway.controller.decide.circuit import CircuitState
from gpufn_gateway.controller.decide.demand import demand_of, workers_of
from gpufn_gateway.controller.decide.moves import Move
from gpufn_gateway.controller.decide.policy import Demand, ScaleDecision, Workers
from gpufn_gateway.controller.decide.preemption import Allocator, Resumption
from gpufn_gateway.controller.decide.rollout import RevisionHealth, Role
from gpufn_gateway.controller.decide.scale_down import Removals
from gpufn_gateway.controller.decide.status import NO_ROOM, StatusWriter
from gpufn_gateway.controller.decide.team_shares import Rounds, TeamShares
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.last_failure import PlacementFailure
from gpufn_gateway.controller.placement.node_choice import NoRoom
from gpufn_gateway.controller.placement.request import Requirements
from gpufn_gateway.controller.placement.start_time import StartTimes
from gpufn_gateway.controller.state.views import Moving, RevisionView, WorkerView, window_for
from gpufn_gateway.controller.state.world import World

BUSY_EVICTION_AFTER_S = 2.0
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
        names = only
        if names is None:
            self.world.team_use.observe(self.shares.costs, self.now)
            self._delete_lost_workers()
            self._end_calls_of_deleted()
            names = self.world.functions.keys() | {worker.key[0] for worker in self.world.workers.values()}
        self.removals.end_broken_gangs()
        for name in sorted(names):
            with self._isolated(name):
                function = self.world.functions.get(name)
                if function is None:
                    self.removals.drain_all(name, "the function was deleted")
                else:
                    self._decide(function)
        if only is not None and self.needs:
            # Room is granted in order, so functions that wait for room take part in every step.
            for name in sorted(self.world.waiting - self.decided.keys()):
                with self._isolated(name):
                    if name in self.world.functions:
                        self._decide(self.world.functions[name])
        without_room = self._start()
        self._explain(without_room, is_full=only is None)
        self._make_room(without_room)
        self._leave_drained_nodes()
        self._note_unplaced(without_room)
        checked = [need for need in without_room if need.revision.is_checked_first]
        has_nodes = bool(checked and self.world.reports(self.now))
        for need in checked:
            with self._isolated(need.key[0]):
                if (end := deploy_check.end_without_room(need, self.now, has_nodes=has_nodes)) is not None:
                    self.actions.append(end)
        still_waiting = self.world.waiting - self.decided.keys() if only is not None else set()
        self.world.waiting = still_waiting | {need.key[0] for need in without_room}
        status_writer = StatusWriter(self.world, self.now, self._allocator)
        statuses: dict[str, FunctionStatus] = {}
        for name, decisions in list(self.decided.items()):
            with self._isolated(name):
                statuses[name] = status_writer.status(self.world.functions[name], decisions, self.notes.get(name))
        return actions.Plan(tuple(self.actions), statuses, self.failed)

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
        numbers = self.world.numbers(function.name) | function.called
        # The serving revision comes first: it determines how many workers the next one gets.
        by_number: dict[int, RevisionDecision] = {}
        for number in sorted(numbers, key=lambda number: (number != function.serving, number != function.active)):
            by_number[number] = self._decide_revision(function, number, by_number.get(function.serving))
        if function.traffic is not None:
            self._divide(function, by_number)
        for decided in by_number.values():
            self._finish(decided)
        self.decided[function.name] = list(by_number.values())
        if function.active != function.serving:
            self._move(function, by_number[function.serving], by_number[function.active])
        for decided in by_number.values():
            if (end := deploy_check.end_of_check(decided, function)) is not None:
                self.actions.append(end)
            self._end_moves(decided, function)
            self.removals.drain_surplus(decided, function)
            self.removals.drain_parked(decided, function)
            if self.world.drained:
                self.removals.leave_nodes(decided)

    def _decide_revision(self, function: Function, number: int, serving: RevisionDecision | None) -> RevisionDecision:
        world, now = self.world, self.now
        key = (function.name, number)
        view = world.view(key)
        record = world.revisions.get(key)
        role = rollout.role_of(function, number)
        demand = demand_of(world, key, now)
        slots = record.spec.parallel_calls if record is not None else 1
        workers = workers_of(world, view, slots, now)
        if record is None:
            decision = ScaleDecision(workers.held, f"revision {number} is not loaded yet: keep its workers")
        elif record.state is RevisionState.FAILED and role is not Role.RETIRED:
            decision = ScaleDecision(
                0, f"revision {number} failed to start: correct the error and deploy again", want=0
            )
        elif role in (Role.SERVING, Role.SPLIT):
            view.served_at = now
            decision = self._scale(function, record, view, demand, workers)
            scaling = policy.effective(record.spec.scaling, function)
            if record.is_checked_first and decision.count == 0 and scaling.max_workers:
                decision = ScaleDecision(1, f"checking revision {number}: 1 worker", want=1)
        elif role is Role.NEXT:
            assert serving is not None
            highest = policy.effective(record.spec.scaling, function).max_workers
            count = min(rollout.workers_for_next(self._health(serving, function), highest), highest)
            count = max(count, min(workers.held, highest))
            decision = ScaleDecision(count, f"revision {number} takes over: start with {count}", want=count)
            if rollout.is_split(function, number):  # it has calls already
                view.served_at = now
                scaled = self._scale(function, record, view, demand, workers)
                decision = scaled if scaled.count > count else decision
        else:
            calls = None if demand is None else demand.calls
            count = rollout.workers_for_retired(demand, workers, now - view.served_at)
            decision = ScaleDecision(count, f"revision {number} is retired, {calls} calls left", want=count)
        return RevisionDecision(key, role, view, decision, demand, record, workers)

    def _scale(
        self, function: Function, record: Revision, view: RevisionView, demand: Demand | None, workers: Workers
    ) -> ScaleDecision:
        scaling = rollout.part_of(policy.effective(record.spec.scaling, function), function, record.number)
        window = window_for(view, scaling.scaledown_window_s, workers.held, self.now)
        if not workers.held and self.world.drained:
            # All of its workers leave: they prove that workers are wanted, and each of them needs a replacement.
            workers = workers_of(self.world, view, workers.slots, self.now, with_leaving=True)
            decision = policy.decide(scaling, demand, workers, peak=window.at(self.now), last=view.last)
            if decision.want is not None:
                decision = msgspec.structs.replace(decision, count=decision.want)
        else:
            decision = policy.decide(scaling, demand, workers, peak=window.at(self.now), last=view.last)
        window.record(self.now, decision.keep)
        return decision

    def _divide(self, function: Function, by_number: dict[int, RevisionDecision]) -> None:
        """Keep the revisions of a split within the max_workers of the function. A revision that wants more starts
        workers when surplus workers of another have left."""
        record = by_number[function.serving].revision
        shared = {number: each for number, each in by_number.items() if rollout.is_split(function, number)}
        if record is None:
            return
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

    def _health(self, decided: RevisionDecision, function: Function) -> RevisionHealth:
        record, want = decided.revision, decided.decision.want
        ready = len(decided.view.in_state(WorkerState.READY))
        if decided.role is Role.SERVING and function.traffic is not None:  # the next revision replaces them all
            for number in function.traffic.called:
                if number not in (function.serving, function.active):
                    view = self.world.view((function.name, number))
                    ready += len(view.in_state(WorkerState.READY))
                    want = None if want is None else want + ((view.last and view.last.want) or 0)
        return RevisionHealth(
            ready=ready,
            want=want,
            is_failing=decided.view.circuit.state(self.now) is not CircuitState.CLOSED,
            max_workers=None if record is None else policy.effective(record.spec.scaling, function).max_workers,
            held=len(deploy_check.staying_workers(decided.view)),
            check=None if record is None or record.check is None else record.check.state,
        )

    def _move(self, function: Function, serving: RevisionDecision, following: RevisionDecision) -> None:
        if following.revision is not None and following.revision.state is RevisionState.FAILED:
            self.actions.append(actions.MoveActive(function.name, function.active, "the new revision failed to start"))
            return
        moves, why = rollout.may_move(self._health(serving, function), self._health(following, function))
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
        world, now = self.world, self.now
        allocator = self._allocator = Allocator(world, now, self.limits, self.removals)
        reports = nodes = allocator.reports
        slots = {report.node: self.limits.starts_per_node for report in reports}
        for worker in world.workers.values():
            node = worker.assignment.node
            if node in slots and worker.state is WorkerState.STARTING and now - worker.since < START_SLOT_S:
                slots[node] -= 1
        nodes = [report for report in reports if slots[report.node] > 0]
        ordered = sorted(
            self.needs,
            key=lambda need: (not need.waits_for_first, need.is_failing, need.view.waiting_since or now, need.key),
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
                if isinstance(result, Resumption):
                    cause = Cause.CALLS if need.calls else Cause.CAPACITY
                    self.actions.append(actions.Resume(result.worker.assignment.worker, need.reason, cause))
                    self.shares.grant(need, [result.worker.assignment.share])
                else:
                    for each in result.by_rank:
                        slots[each.node] -= 1
                    if any(slots[each.node] <= 0 for each in result.by_rank):
                        nodes = [report for report in nodes if slots[report.node] > 0]
                    reason = f"{need.reason}; {'; '.join(each.why for each in result.by_rank)}"
                    start = actions.Start(*need.key, result.node, result.share, reason, result.others)
                    self.actions.append(start)
                    self.shares.grant(need, [each.share for each in result.by_rank])
                need.view.placement_failure = None
                need.missing -= 1
                need.has_begun = True
                if need.missing:
                    rounds.repeat(need)
        return without_room

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

    # 5

    def _make_room(self, waiting: list[Need]) -> None:
        waiting = [
            need
            for need in waiting
            if (need.calls or need.waits_for_first or need.is_next) and not need.is_slot_limited
        ]
        if not waiting or self._allocator is None:
            return
        allocator = self._allocator
        has_teams = bool(self.world.teams)
        allocator.count_leaving()
        parked, idle = allocator.parked_workers(), allocator.idle_workers()
        for need in waiting:
            with self._isolated(need.key[0]):
                include_busy = self._may_evict_busy(need)
                if need.team_limit:
                    self._make_room_in_team(need, idle, include_busy=include_busy)
                    continue
                takes_back = has_teams and self._takes_back(need)
                if allocator.claim(need) or not allocator.can_make(need, include_busy=include_busy or takes_back):
                    continue
                others = [worker for worker in (*parked, *idle) if worker.key[0] != need.key[0]]
                surplus = allocator.surplus_of_others(need) if include_busy or takes_back else []
                if takes_back or (has_teams and surplus):
                    surplus = self._within_teams(need, surplus, include_own=include_busy, include_others=takes_back)
                if need.is_next and not need.waits_for_first:
                    # The rest of a rollout takes room from the old revision only.
                    others, surplus = [], [worker for worker in surplus if worker.key[0] == need.key[0]]
                others += self._other_revisions(need, idle)
                if allocator.evict_for(need, others) or (surplus and allocator.evict_for(need, surplus)):
                    continue
                for move in allocator.move_for(need, idle) if need.waits_for_first else ():
                    self._move_worker(move, need)
                allocator.record_not_made(need, include_busy=include_busy or takes_back)

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

    def _make_room_in_team(self, need: Need, idle: list[WorkerView], *, include_busy: bool) -> None:
        """Remove a worker of another function of the team, which holds its full share: an idle READY worker, or if the
        function has waited, a worker of a function with several."""
        assert self._allocator is not None
        team = self.shares.team_of(need.key[0])
        candidates = [*idle, *(self._allocator.surplus_of_others(need) if include_busy else ())]
        for worker in candidates:
            if worker.key[0] == need.key[0] or worker in self.removals or self.shares.team_of(worker.key[0]) != team:
                continue
            if self._allocator.can_spare(worker, need):
                reason = f"makes room for {need.key[0]}: {need.team_limit}"
                if not self.removals.park(worker, reason, Cause.ROOM):
                    self.removals.drain(worker, reason, Cause.ROOM)
                return

    def _within_teams(
        self, need: Need, surplus: list[WorkerView], *, include_own: bool, include_others: bool
    ) -> list[WorkerView]:
        """Return the busy workers that may be taken for `need`: from `surplus` its own team's, and workers that other
        teams have borrowed."""
        assert self._allocator is not None
        mine = self.shares.team_of(need.key[0])
        own = [each for each in surplus if include_own and self.shares.team_of(each.key[0]) == mine]
        if not include_others:
            return own
        preemptible = [each for each in self._allocator.workers_of_low_priority() if each not in surplus]
        return [*own, *(each for each in (*surplus, *preemptible) if self.shares.is_borrowed(each, need))]

    def _takes_back(self, need: Need) -> bool:
        """Return whether workers of other teams may be taken, also for a function that has workers."""
        since = need.view.waiting_since
        has_waited = not need.has_begun and since is not None and self.now - since >= BUSY_EVICTION_AFTER_S
        return has_waited and not need.is_check

    def _move_worker(self, move: Move, need: Need) -> None:
        worker = move.worker.assignment
        reason = f"moves from {worker.node} to make room for {need.key[0]}; {move.to.why}"
        self.actions.append(actions.Start(*move.worker.key, move.to.node, move.to.share, reason))
        until = self.now + self.world.revisions[move.worker.key].spec.startup_timeout_s
        self.world.moving[worker.worker] = Moving(need.key[0], until)

    def _end_moves(self, decided: RevisionDecision, function: Function) -> None:
        """Drain the workers whose replacements are READY. Cancel moves without a replacement that starts in time."""
        if decided.revision is None or not self.world.moving:
            return
        ready, starting = decided.view.in_state(WorkerState.READY), decided.view.in_state(WorkerState.STARTING)
        staying = sum(worker.assignment.worker not in self.world.moving for worker in ready)
        for worker in list(decided.view.workers.values()):
            moving = self.world.moving.get(worker.assignment.worker)
            if moving is None:
                continue
            if staying >= policy.effective(decided.revision.spec.scaling, function).min_workers:
                self.removals.drain(worker, f"has moved to make room for {moving.for_function}", Cause.ROOM)
            elif starting and self.now < moving.until and worker.state is WorkerState.READY:
                continue
            del self.world.moving[worker.assignment.worker]

    def _other_revisions(self, need: Need, idle: list[WorkerView]) -> list[WorkerView]:
        """Return idle workers of other revisions of the function. For a revision that failed to start, return only
        workers that have been idle for the backoff. The old revision takes back no worker of the next one, which is
        idle until calls go to it, unless the next one fails."""
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

    def _may_evict_busy(self, need: Need) -> bool:
        since = need.view.waiting_since
        if need.has_begun or since is None or self.now - since < BUSY_EVICTION_AFTER_S:
            return False
        # The next revision takes another place when its present worker is READY: it may fail, or one may be enough.
        return need.waits_for_first or (need.is_next and not need.view.in_state(WorkerState.STARTING))
