"""Room for the functions that wait without any: which workers of others park, drain or move for them. Pure.

The order is step 5 of `plan`: parked workers of other functions, idle ones, and for a function that has waited for
`BUSY_EVICTION_AFTER_S` also busy ones. Teams limit whose workers may be taken (`TeamShares`).
"""

from __future__ import annotations

from gpufn_core.domain.worker import Cause, WorkerState
from gpufn_gateway.controller.decide import actions
from gpufn_gateway.controller.decide.actions import Action, Need
from gpufn_gateway.controller.decide.room.allocator import Allocator
from gpufn_gateway.controller.decide.room.moves import Move
from gpufn_gateway.controller.decide.room.scale_down import Removals
from gpufn_gateway.controller.decide.room.team_shares import TeamShares
from gpufn_gateway.controller.decide.scaling.circuit import CircuitState
from gpufn_gateway.controller.state.views import Moving, WorkerView
from gpufn_gateway.controller.state.world import World

BUSY_EVICTION_AFTER_S = 2.0


class RoomMaker:
    """`actions` are the actions of the step, in order."""

    def __init__(
        self,
        world: World,
        now: float,
        *,
        allocator: Allocator,
        shares: TeamShares,
        removals: Removals,
        actions: list[Action],
    ) -> None:
        self._world = world
        self._now = now
        self._allocator = allocator
        self._shares = shares
        self._removals = removals
        self._actions = actions
        self._has_teams = bool(world.teams)
        allocator.count_leaving()
        self._parked, self._idle = allocator.parked_workers(), allocator.idle_workers()

    def make_room_for(self, need: Need) -> None:
        """Make room for one worker, if the removal of other workers can."""
        allocator, has_waited = self._allocator, self._has_waited(need)
        # The next revision takes another place when its present worker is READY: it may fail, or one may be enough.
        takes_busy = has_waited and (
            need.waits_for_first or (need.is_next and not need.view.in_state(WorkerState.STARTING))
        )
        if need.team_limit:
            self._replace_in_team(need, takes_busy=takes_busy)
            return
        takes_back = has_waited and self._has_teams and not need.is_check  # from other teams
        searches_busy = takes_busy or takes_back
        if allocator.claim(need) or not allocator.can_make(need, include_busy=searches_busy):
            return
        others = [worker for worker in (*self._parked, *self._idle) if worker.key[0] != need.key[0]]
        surplus = allocator.surplus_of_others(need) if searches_busy else []
        if takes_back or (self._has_teams and surplus):
            surplus = self._within_teams(need, surplus, include_own=takes_busy, include_others=takes_back)
        if need.is_next and not need.waits_for_first:
            # The rest of a rollout takes room from the old revision only.
            others, surplus = [], [worker for worker in surplus if worker.key[0] == need.key[0]]
        others += self._idle_of_other_revisions(need)
        if allocator.evict_for(need, others) or (surplus and allocator.evict_for(need, surplus)):
            return
        if need.waits_for_first:
            for move in allocator.move_for(need, self._idle):
                self._begin_move(move, need)
        allocator.record_not_made(need, include_busy=searches_busy)

    def _has_waited(self, need: Need) -> bool:
        since = need.view.waiting_since
        return not need.has_begun and since is not None and self._now - since >= BUSY_EVICTION_AFTER_S

    def _replace_in_team(self, need: Need, *, takes_busy: bool) -> None:
        """Remove a worker of another function of the team, which holds its full share: an idle READY worker, or if the
        function has waited, a worker of a function with several."""
        team = self._shares.team_of(need.key[0])
        candidates = [*self._idle, *(self._allocator.surplus_of_others(need) if takes_busy else ())]
        for worker in candidates:
            if worker.key[0] == need.key[0] or worker in self._removals or self._shares.team_of(worker.key[0]) != team:
                continue
            if self._allocator.can_spare(worker, need):
                reason = f"makes room for {need.key[0]}: {need.team_limit}"
                if not self._removals.park(worker, reason, Cause.ROOM):
                    self._removals.drain(worker, reason, Cause.ROOM)
                return

    def _within_teams(
        self, need: Need, surplus: list[WorkerView], *, include_own: bool, include_others: bool
    ) -> list[WorkerView]:
        """Return the busy workers that may be taken for `need`: from `surplus` its own team's, and workers that other
        teams have borrowed."""
        mine = self._shares.team_of(need.key[0])
        own = [each for each in surplus if include_own and self._shares.team_of(each.key[0]) == mine]
        if not include_others:
            return own
        preemptible = [each for each in self._allocator.workers_of_low_priority() if each not in surplus]
        return [*own, *(each for each in (*surplus, *preemptible) if self._shares.is_borrowed(each, need))]

    def _idle_of_other_revisions(self, need: Need) -> list[WorkerView]:
        """Return idle workers of other revisions of the function. For a revision that failed to start, return only
        workers that have been idle for the backoff. The old revision takes back no worker of the next one, which is
        idle until calls go to it, unless the next one fails."""
        function = self._world.functions[need.key[0]]
        following = (function.name, function.active)
        is_failing = self._world.view(following).circuit.state(self._now) is not CircuitState.CLOSED
        may_be_taken = is_failing or function.active == function.serving
        return [
            worker
            for worker in self._idle
            if worker.key[0] == need.key[0]
            and worker.key != need.key
            and (may_be_taken or worker.key != following)
            and (self._world.idle_for(worker, self._now) or 0.0) >= need.view.circuit.backoff_s
        ]

    def _begin_move(self, move: Move, need: Need) -> None:
        """Start the replacement of a worker that leaves once the replacement is READY (`Removals.end_moves`)."""
        worker = move.worker.assignment
        reason = f"moves from {worker.node} to make room for {need.key[0]}; {move.to.why}"
        self._actions.append(actions.Start(*move.worker.key, move.to.node, move.to.share, reason))
        until = self._now + self._world.revisions[move.worker.key].spec.startup_timeout_s
        self._world.moving[worker.worker] = Moving(need.key[0], until)
