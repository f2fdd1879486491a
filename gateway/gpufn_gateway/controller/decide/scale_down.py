"""Who leaves in this step of the controller: the workers that it drains, parks or gives up, each told once. Pure.

A worker that parks takes of its node's memory, which is promised to it until the next step; where there is none left,
those go that are worth less, and it parks when they have gone.
"""

from __future__ import annotations

from gpufn_core.domain.revision import Function
from gpufn_core.domain.worker import ParkedMemory, WorkerState
from gpufn_core.protocol.launch import RECONNECT_S
from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_gateway.controller.decide import policy
from gpufn_gateway.controller.decide.actions import Action, Decided, Delete, Drain, Park
from gpufn_gateway.controller.decide.parking import Admission, admit
from gpufn_gateway.controller.decide.rollout import Role
from gpufn_gateway.controller.state.views import WorkerView
from gpufn_gateway.controller.state.world import World

START_OVERDUE_S = 30.0  # beyond the time that it may take, which is the runner's to enforce, or its own


def idle_longest_first(world: World, worker: WorkerView, now: float) -> tuple[float, str]:
    return -(world.idle_for(worker, now) or 0.0), worker.assignment.worker


class Leaving:
    """`actions` are the step's, in their order; `names` are the workers that leave."""

    def __init__(self, world: World, now: float, actions: list[Action]) -> None:
        self._world = world
        self._now = now
        self._actions = actions
        self.names: set[str] = set()
        self._promised: dict[str, int] = {}  # bytes of a node's memory, to workers that this step parks

    def __contains__(self, worker: WorkerView) -> bool:
        return worker.assignment.worker in self.names

    def give_up(self, worker: WorkerView, reason: str) -> None:
        """Nobody would hear that it shall go."""
        self.names.add(worker.assignment.worker)
        self._actions.append(Delete(worker.assignment.worker, reason))

    def drain(self, worker: WorkerView, reason: str) -> None:
        if worker not in self:
            self.names.add(worker.assignment.worker)
            self._actions.append(Drain(worker.assignment.worker, reason))

    def drain_all(self, function: str, reason: str) -> None:
        for number in self._world.numbers(function):
            for worker in self._world.view((function, number)).workers.values():
                if worker.state not in (WorkerState.DRAINING, WorkerState.FAILED):
                    self.drain(worker, reason)

    def drain_surplus(self, one: Decided, function: Function) -> None:
        """Workers above their revision's count park, or drain, the longest idle first."""
        held = one.view.in_state(WorkerState.READY, WorkerState.STARTING, WorkerState.RESUMING)
        held = [worker for worker in held if worker not in self]
        surplus = len(held) - one.decision.count
        if one.revision is not None:
            for worker in held:
                # One that was READY has a new runner, and no more time than it gives itself to come back to that.
                within_s = RECONNECT_S if worker.was_ready else one.revision.spec.startup_timeout_s
                overdue_s = within_s + START_OVERDUE_S
                if worker.state is WorkerState.STARTING and self._now - worker.since > overdue_s:
                    self.drain(worker, f"not ready after {self._now - worker.since:.0f} s")
                    surplus -= 1
            if one.role is Role.SERVING:
                surplus -= self._drain_before_they_start(held, policy.effective(one.revision.spec.scaling, function))
        if surplus <= 0:
            return
        going = sorted(held, key=lambda worker: idle_longest_first(self._world, worker, self._now))
        # What is retired with nothing queued goes as it is: draining lets a call finish.
        may_be_busy = one.decision.count == 0 and one.role is Role.RETIRED
        if not may_be_busy:
            going = [worker for worker in going if self._world.idle_for(worker, self._now) is not None]
        for worker in going[:surplus]:
            self._park_or_drain(worker, one.decision.reason)

    def _drain_before_they_start(self, held: list[WorkerView], scaling: ScalingPolicy) -> int:
        """As many of those above max_workers as are on their way, the newest, for nobody would use them. How many."""
        held = [worker for worker in held if worker not in self]
        new = [worker for worker in held if worker.state is WorkerState.STARTING and not worker.was_ready]
        going = new[::-1][: max(0, len(held) - scaling.max_workers)]
        for worker in going:
            self.drain(worker, f"there are more than max_workers={scaling.max_workers} with those that start")
        return len(going)

    def drain_parked(self, one: Decided, function: Function) -> None:
        """Those of a revision that nobody calls any more, those whose time is over, and those above max_workers."""
        parked = one.view.in_state(WorkerState.PARKED)
        if one.role is not Role.SERVING and one.demand is not None and not one.demand.calls:
            for worker in parked:
                self.drain(worker, "its revision is replaced")
        if one.role is not Role.SERVING or one.revision is None:
            return
        spec = one.revision.spec
        for worker in parked:
            idle_s = self._world.idle_for(worker, self._now) or 0.0
            if idle_s >= spec.scaling.idle_timeout_s + spec.park_timeout_s:
                self.drain(worker, f"parked, and idle for {idle_s:.0f} s")
        held = one.view.in_state(WorkerState.READY, WorkerState.STARTING, WorkerState.RESUMING)
        parked = [worker for worker in parked if worker not in self]
        excess = len(held) + len(parked) - policy.effective(spec.scaling, function).max_workers
        parked.sort(key=lambda worker: idle_longest_first(self._world, worker, self._now))
        for worker in parked[: max(0, excess)]:
            self.drain(worker, "there are more than max_workers with those that are parked")

    def _park_or_drain(self, worker: WorkerView, reason: str) -> None:
        if self.park(worker, reason):
            return
        found = self._admit(worker)
        for name in found.victims:  # it parks when they have gone
            victim = self._world.workers[name]
            self._world.holdings.host_memory(victim.assignment.node).evict(name)
            self.drain(victim, f"its memory is for {worker.key[0]}, which parks")
        if not found.victims:
            self.drain(worker, f"{reason}; not parked: {found.why}" if found.why else reason)

    def park(self, worker: WorkerView, reason: str) -> bool:
        """False: it cannot be parked, and stays."""
        found = self._admit(worker)
        if found.host_bytes:
            node = worker.assignment.node
            self._promised[node] = self._promised.get(node, 0) + found.expected_bytes
            self.names.add(worker.assignment.worker)
            self._actions.append(Park(worker.assignment.worker, found.host_bytes, found.expected_bytes, reason))
        return found.host_bytes > 0

    def would_hold(self, worker: WorkerView) -> ParkedMemory | None:
        """What it would take if it parked now; None when it cannot."""
        found = self._admit(worker)
        return ParkedMemory(found.expected_bytes) if found.host_bytes else None

    def _admit(self, worker: WorkerView) -> Admission:
        return admit(self._world, worker, self._promised.get(worker.assignment.node, 0))

    def take_back(self, action: Action) -> None:
        """It is not done after all."""
        if isinstance(action, (Drain, Park)):
            self.names.discard(action.worker)
        if isinstance(action, Park):
            self._promised[self._world.workers[action.worker].assignment.node] -= action.expected_bytes
