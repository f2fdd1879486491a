"""Scale-down: the workers that a step drains, parks or deletes, each at most once. Pure.

A parking worker takes host memory of its node, which is reserved for it until the next step. If none is left, parked
workers of less worth are drained, and the worker parks when they have ended.
"""

from __future__ import annotations

from gpufn_core.domain.revision import Function
from gpufn_core.domain.worker import Cause, ParkedMemory, WorkerState
from gpufn_core.protocol.launch import RECONNECT_S
from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_gateway.controller.decide.actions import Action, Delete, Drain, Park, RevisionDecision
from gpufn_gateway.controller.decide.room.parking import Admission, admit
from gpufn_gateway.controller.decide.scaling import policy
from gpufn_gateway.controller.decide.scaling.rollout import Role
from gpufn_gateway.controller.state.views import WorkerView
from gpufn_gateway.controller.state.world import World

START_OVERDUE_S = 30.0  # beyond the timeout that the runner, or the worker itself, enforces


def idle_longest_first(world: World, worker: WorkerView, now: float) -> tuple[float, str]:
    return -(world.idle_for(worker, now) or 0.0), worker.assignment.worker


class Removals:
    """`actions` are the actions of the step, in order; `names` are the workers that leave."""

    def __init__(self, world: World, now: float, actions: list[Action]) -> None:
        self._world = world
        self._now = now
        self._actions = actions
        self.names: set[str] = set()
        self._reserved: dict[str, int] = {}  # node -> bytes for workers that this step parks

    def __contains__(self, worker: WorkerView) -> bool:
        return worker.assignment.worker in self.names

    def delete(self, worker: WorkerView, reason: str) -> None:
        """Delete the assignment of a worker on a silent node: no process would act on a drain."""
        self.names.add(worker.assignment.worker)
        self._actions.append(Delete(worker.assignment.worker, reason))

    def drain(self, worker: WorkerView, reason: str, cause: Cause = Cause.IDLE) -> None:
        """Drain a worker: all processes of a gang."""
        for process in self._world.ranks(worker):
            if process not in self and (process is worker or not (process.drain_requested or process.is_gone)):
                self.names.add(process.assignment.worker)
                self._actions.append(Drain(process.assignment.worker, reason, cause))

    def end_broken_gangs(self) -> None:
        """Drain the rest of each gang that lacks a process: its ranks end together."""
        for gang, processes in self._world.gangs():
            running = {each.assignment.worker: each for each in processes if self._stays(each)}
            ended = next((rank for rank, each in enumerate(gang.ranks) if each.worker not in running), None)
            if ended is None:
                continue
            for process in processes:
                if not (process.is_gone or process.drain_requested or process in self):
                    self.drain(process, f"{gang.describe(ended)} has ended, and so has its gang", Cause.ERROR)

    def _stays(self, process: WorkerView) -> bool:
        return process not in self and process.state not in (WorkerState.DRAINING, WorkerState.FAILED)

    def drain_all(self, function: str, reason: str) -> None:
        for number in self._world.numbers(function):
            for worker in self._world.view((function, number)).workers.values():
                if worker.state not in (WorkerState.DRAINING, WorkerState.FAILED):
                    self.drain(worker, reason, Cause.DELETE)

    def drain_surplus(self, decided: RevisionDecision, function: Function) -> None:
        """Park or drain the workers above their revision's count, longest idle first."""
        held = decided.view.in_state(WorkerState.READY, WorkerState.STARTING, WorkerState.RESUMING)
        held = [worker for worker in held if worker not in self]
        if self._world.drained:
            held = [worker for worker in held if not self._world.must_leave(worker)]
        moving = sum(worker.assignment.worker in self._world.moving for worker in held)  # besides their replacements
        surplus = len(held) - moving - decided.decision.count
        if decided.revision is not None:
            for worker in held:
                # A worker that was READY reconnects to a new runner, within its own timeout for that.
                within_s = RECONNECT_S if worker.was_ready else decided.revision.spec.startup_timeout_s
                overdue_s = within_s + START_OVERDUE_S
                if worker.state is WorkerState.STARTING and self._now - worker.since > overdue_s:
                    self.drain(worker, f"not ready after {self._now - worker.since:.0f} s", Cause.ERROR)
                    surplus -= 1
            if decided.role in (Role.SERVING, Role.SPLIT):
                scaling = policy.effective(decided.revision.spec.scaling, function)
                surplus -= self._drain_excess_starting(held, scaling, moving)
        if surplus <= 0:
            return
        candidates = sorted(held, key=lambda worker: idle_longest_first(self._world, worker, self._now))
        # A retired revision with an empty queue loses busy workers too: draining lets a call finish.
        is_replaced = decided.decision.count == 0 and decided.role is Role.RETIRED
        if not (is_replaced or decided.gives_way):
            candidates = [worker for worker in candidates if self._world.idle_for(worker, self._now) is not None]
        for worker in candidates[:surplus]:
            cause = Cause.IDLE if decided.role in (Role.SERVING, Role.SPLIT) else Cause.DEPLOY
            self._park_or_drain(worker, decided.decision.reason, cause)

    def end_moves(self, decided: RevisionDecision, function: Function) -> None:
        """Drain the workers whose replacements are READY. Cancel moves without a replacement that starts in time."""
        moving_workers = self._world.moving
        if decided.revision is None or not moving_workers:
            return
        ready, starting = decided.view.in_state(WorkerState.READY), decided.view.in_state(WorkerState.STARTING)
        staying = sum(worker.assignment.worker not in moving_workers for worker in ready)
        for worker in list(decided.view.workers.values()):
            moving = moving_workers.get(worker.assignment.worker)
            if moving is None:
                continue
            if staying >= policy.effective(decided.revision.spec.scaling, function).min_workers:
                self.drain(worker, f"has moved to make room for {moving.for_function}", Cause.ROOM)
            elif starting and self._now < moving.until and worker.state is WorkerState.READY:
                continue
            del moving_workers[worker.assignment.worker]

    def leave_nodes(self, decided: RevisionDecision) -> None:
        """Drain the workers on drained nodes that have no calls and do not wait for any: they start elsewhere."""
        states = (WorkerState.STARTING, WorkerState.RESUMING, WorkerState.PARKING, WorkerState.PARKED)
        for worker in decided.view.in_state(*states):
            if self._world.must_leave(worker) and worker not in self:
                self._leave_node(worker)

    def leave_replaced(self, decided: RevisionDecision, keep: int) -> None:
        """Drain the READY workers on drained nodes but `keep`, longest idle first. Busy ones finish their calls."""
        ready = [each for each in decided.view.in_state(WorkerState.READY) if self._world.must_leave(each)]
        ready = [each for each in ready if each not in self]
        ready.sort(key=lambda worker: idle_longest_first(self._world, worker, self._now))
        for worker in ready[: max(0, len(ready) - keep)]:
            self._leave_node(worker)

    def _leave_node(self, worker: WorkerView) -> None:
        nodes = {process.assignment.node for process in self._world.ranks(worker)} & self._world.drained
        self.drain(worker, f"node {min(nodes)} is drained", Cause.STOP)

    def _drain_excess_starting(self, held: list[WorkerView], scaling: ScalingPolicy, moving: int) -> int:
        """Drain starting workers above max_workers, newest first, because they would not be used. Return how many."""
        held = [worker for worker in held if worker not in self]
        new = [worker for worker in held if worker.state is WorkerState.STARTING and not worker.was_ready]
        excess = new[::-1][: max(0, len(held) - moving - scaling.max_workers)]
        for worker in excess:
            self.drain(worker, f"ready and starting workers exceed max_workers={scaling.max_workers}")
        return len(excess)

    def drain_parked(self, decided: RevisionDecision, function: Function) -> None:
        """Drain parked workers of replaced revisions, those past their park timeout, and those above max_workers."""
        parked = decided.view.in_state(WorkerState.PARKED)
        if decided.role is not Role.SERVING and decided.demand is not None and not decided.demand.calls:
            for worker in parked:
                self.drain(worker, "its revision was replaced", Cause.DEPLOY)
        if decided.role is not Role.SERVING or decided.revision is None:
            return
        spec = decided.revision.spec
        for worker in parked:
            idle_s = self._world.idle_for(worker, self._now) or 0.0
            if idle_s >= spec.scaling.idle_timeout_s + spec.park_timeout_s:
                self.drain(worker, f"parked and idle for {idle_s:.0f} s")
        held = decided.view.in_state(WorkerState.READY, WorkerState.STARTING, WorkerState.RESUMING)
        parked = [worker for worker in parked if worker not in self]
        excess = len(held) + len(parked) - policy.effective(spec.scaling, function).max_workers
        parked.sort(key=lambda worker: idle_longest_first(self._world, worker, self._now))
        for worker in parked[: max(0, excess)]:
            self.drain(worker, "ready and parked workers exceed max_workers")

    def _park_or_drain(self, worker: WorkerView, reason: str, cause: Cause) -> None:
        if self.park(worker, reason, cause):
            return
        admission = self._admit(worker)
        for name in admission.victims:  # the worker parks when they have ended
            victim = self._world.workers[name]
            self._world.holdings.host_memory(victim.assignment.node).evict(name)
            self.drain(victim, f"its host memory is needed to park a worker of {worker.key[0]}", Cause.ROOM)
        if not admission.victims:
            self.drain(worker, f"{reason}; not parked: {admission.why}" if admission.why else reason, cause)

    def park(self, worker: WorkerView, reason: str, cause: Cause) -> bool:
        """Park a worker. Return False if it cannot be parked; then it stays."""
        admission = self._admit(worker)
        if admission.host_bytes:
            node = worker.assignment.node
            self._reserved[node] = self._reserved.get(node, 0) + admission.expected_bytes
            self.names.add(worker.assignment.worker)
            name, host_bytes, expected_bytes = worker.assignment.worker, admission.host_bytes, admission.expected_bytes
            self._actions.append(Park(name, host_bytes, expected_bytes, reason, cause))
        return admission.host_bytes > 0

    def memory_if_parked(self, worker: WorkerView) -> ParkedMemory | None:
        """Return the memory that the worker would hold if it parked now; None when it cannot."""
        admission = self._admit(worker)
        return ParkedMemory(admission.expected_bytes) if admission.host_bytes else None

    def _admit(self, worker: WorkerView) -> Admission:
        return admit(self._world, worker, self._reserved.get(worker.assignment.node, 0))

    def undo(self, action: Action) -> None:
        """Forget a worker whose action was dropped."""
        if isinstance(action, (Drain, Park)):
            self.names.discard(action.worker)
        if isinstance(action, Park):
            self._reserved[self._world.workers[action.worker].assignment.node] -= action.expected_bytes
