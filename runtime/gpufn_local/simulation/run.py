"""Discrete event simulation of a trace on a GPU: `compare(load, gpu) -> Comparison`.

1. A call arrives and waits for its turn.
2. The turn starts. If its worker is not warm, the start of the worker is part of the turn, because the GPU is loading.
3. The turn ends. The next one starts, or the GPU is held for a function whose next call is expected.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random

import msgspec

from gpufn_core.domain.devices.gpu_fair_queue import Arrivals, FairQueueing, Order, ShortestFirst, Turn
from gpufn_core.errors import InvalidInput
from gpufn_local.simulation.figures import Ended, Figures, figures
from gpufn_local.simulation.gpu import Gpu, Residents
from gpufn_local.simulation.traces import Call, Load, calls, functions


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of each order on the same calls, by the order's name."""

    load: Load
    gpu: Gpu
    orders: dict[str, Figures]


def compare(load: Load, gpu: Gpu) -> Comparison:
    """Simulate all orders. Raises InvalidInput if there are no calls, or a function does not fit on the GPU."""
    rng = random.Random(load.seed)  # noqa: S311  reproducible for a seed
    population = functions(load, rng)
    if (largest_gib := max(each.memory_gib for each in population)) > gpu.memory_gib:
        raise InvalidInput(f"a function uses {largest_gib:.1f} GiB: give the GPU more memory", field="--memory")
    trace = calls(population, load, rng)
    if not trace:
        raise InvalidInput("no call arrives in this time: simulate a longer time", field="--seconds")
    fcfs_residents, sjf_residents, mqfq_residents = Residents(gpu), Residents(gpu), Residents(gpu)
    mqfq: FairQueueing[Call] = FairQueueing(gpu.turns, overrun_s=gpu.overrun_s, is_warm=mqfq_residents.__contains__)
    orders = {
        "fcfs": play(trace, Arrivals(gpu.turns), fcfs_residents),
        "sjf": play(trace, ShortestFirst(gpu.turns), sjf_residents),
        "mqfq": play(trace, mqfq, mqfq_residents),
    }
    return Comparison(load=load, gpu=gpu, orders=orders)


def play(trace: list[Call], order: Order[Call], residents: Residents) -> Figures:
    ended: list[Ended] = []
    busy_s = 0.0
    # An event is a turn that ends, or None: check which flow is next. Events at equal times keep their order.
    events: list[tuple[float, int, Turn[Call] | None]] = []
    numbers = itertools.count()
    arriving = iter(trace)
    call = next(arriving, None)
    while events or call is not None:
        if call is not None and (not events or call.at <= events[0][0]):
            now = call.at
            order.wait(call.function.name, call, now)
            call = next(arriving, None)
        else:
            now, _, ending = heapq.heappop(events)
            if ending is not None:
                order.end(ending, now)
                residents.release(ending.what.function, now)
                ended.append(Ended(ending.what, ending.began, now))
        while (turn := order.next(now)) is not None:
            turn_s = residents.take(turn.what.function, now) + turn.what.service_s
            busy_s += turn_s
            heapq.heappush(events, (now + turn_s, next(numbers), turn))
        if (check_at := order.next_check_at(now)) < math.inf:
            heapq.heappush(events, (check_at, next(numbers), None))
    return figures(
        ended, cold_starts=residents.cold_starts, resumes=residents.resumes, busy_s=busy_s / residents.gpu.turns
    )
