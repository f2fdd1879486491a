"""The policy's input, derived from the world: a revision's Demand and its Workers. Pure."""

from __future__ import annotations

from gpufn_core.domain.revision import RevisionKey
from gpufn_core.domain.worker import WorkerState
from gpufn_gateway.controller.decide.scaling.policy import Demand, Workers
from gpufn_gateway.controller.state.views import RevisionView
from gpufn_gateway.controller.state.world import World

_UNKNOWN_START_S = 30.0


def demand_of(world: World, key: RevisionKey, now: float) -> Demand | None:
    """Return the demand of a revision; None when it is unknown."""
    view = world.view(key)
    calls = world.calls(key, now)
    if world.has_wakeup(key):
        if calls is None and view.in_state(WorkerState.STARTING, WorkerState.READY, WorkerState.RESUMING):
            return None
        calls = max(calls or 0, 1)
    if calls is None:
        return None
    left_over = sum(worker.left_over for worker in view.workers.values())
    running = min(max(0, (world.running(view, now) or 0) - left_over), calls)
    return Demand(
        queued=calls - running,
        running=running,
        stuck=left_over,
        average_in_flight=view.in_flight.at(now),
        arrivals_per_s=view.arrivals.per_second(now),
        peak_calls_60s=view.peak_calls_60s.at(now),
        peak_calls_6s=view.peak_calls_6s.at(now),
        service_s=_service_s(view, now),
        cold_start_s=view.cold_start_s,
        idle_s=None if calls else _idle_s(world, view, now),
        expected=world.arrivals.expected(key[0], now, view.cold_start_s or _UNKNOWN_START_S),
    )


def workers_of(world: World, view: RevisionView, slots: int, now: float, *, with_leaving: bool = False) -> Workers:
    """Count the workers. `with_leaving` includes workers on drained nodes."""
    ready = view.in_state(WorkerState.READY)
    starting = view.in_state(WorkerState.STARTING, WorkerState.RESUMING)
    if world.drained and not with_leaving:
        ready, starting = ([each for each in some if not world.must_leave(each)] for some in (ready, starting))
    return Workers(
        ready=len(ready),
        starting=len(starting),
        idle=sum(world.idle_for(worker, now) is not None for worker in ready),
        slots=slots,
    )


def _idle_s(world: World, view: RevisionView, now: float) -> float | None:
    """Return how long no worker of the revision has had a call; None when a worker has one or it is unknown."""
    shortest: float | None = None
    for worker in view.workers.values():
        if worker.state in (WorkerState.STARTING, WorkerState.RESUMING):
            return None
        if worker.state in (WorkerState.READY, WorkerState.PARKED):
            idle = world.idle_for(worker, now)
            if idle is None:
                return None
            shortest = idle if shortest is None else min(shortest, idle)
    return shortest


def _service_s(view: RevisionView, now: float) -> float | None:
    """Return the seconds per call. While no call has ended, at least the time that the first call has run."""
    if view.busy_since is None:
        return view.service_s
    return max(view.service_s or 0.0, now - view.busy_since) or None
