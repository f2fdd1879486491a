"""Plays a trace on a GPU, event by event: `compare(load, gpu) -> Comparison`.

1. a call comes and waits for its turn
2. it begins: its worker is warm, or the start of one is part of its turn, for the GPU loads meanwhile
3. it ends; the next begins, or the turn is held for a function whose call may be on its way
"""

from __future__ import annotations

import heapq
import itertools
import math
import random

import msgspec

from gpufn_core.domain.gpu_fair_queue import Arrivals, FairQueueing, Order, ShortestFirst, Turn
from gpufn_core.errors import InvalidInput
from gpufn_local.simulation.figures import Ended, Figures, figures
from gpufn_local.simulation.gpu import Gpu, Residents
from gpufn_local.simulation.traces import Call, Load, calls, functions


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What each order, by its name, made of the same calls."""

    load: Load
    gpu: Gpu
    orders: dict[str, Figures]


def compare(load: Load, gpu: Gpu) -> Comparison:
    """Raises InvalidInput when no call comes, or a function does not fit on the GPU."""
    rng = random.Random(load.seed)  # noqa: S311  the same again for the same seed
    called = functions(load, rng)
    if (largest_gib := max(each.memory_gib for each in called)) > gpu.memory_gib:
        raise InvalidInput(f"a function takes {largest_gib:.1f} GiB: give the GPU more", field="--memory")
    trace = calls(called, load, rng)
    if not trace:
        raise InvalidInput("no call comes in so short a time: simulate longer", field="--seconds")
    arrivals, shortest, fair = Residents(gpu), Residents(gpu), Residents(gpu)
    fairly: FairQueueing[Call] = FairQueueing(gpu.turns, overrun_s=gpu.overrun_s, is_warm=fair.__contains__)
    orders = {
        "fcfs": play(trace, Arrivals(gpu.turns), arrivals),
        "sjf": play(trace, ShortestFirst(gpu.turns), shortest),
        "mqfq": play(trace, fairly, fair),
    }
    return Comparison(load=load, gpu=gpu, orders=orders)


def play(trace: list[Call], order: Order[Call], residents: Residents) -> Figures:
    ended: list[Ended] = []
    busy_s = 0.0
    # An event is a turn that ends, or None: look who is next. Equal times go by their number.
    events: list[tuple[float, int, Turn[Call] | None]] = []
    numbers = itertools.count()
    coming = iter(trace)
    call = next(coming, None)
    while events or call is not None:
        if call is not None and (not events or call.at <= events[0][0]):
            now = call.at
            order.wait(call.function.name, call, now)
            call = next(coming, None)
        else:
            now, _, over = heapq.heappop(events)
            if over is not None:
                order.end(over, now)
                residents.release(over.what.function, now)
                ended.append(Ended(over.what, over.began, now))
        while (turn := order.next(now)) is not None:
            turn_s = residents.take(turn.what.function, now) + turn.what.service_s
            busy_s += turn_s
            heapq.heappush(events, (now + turn_s, next(numbers), turn))
        if (again := order.ask_again_at(now)) < math.inf:
            heapq.heappush(events, (again, next(numbers), None))
    return figures(
        ended,
        cold_starts=residents.cold_starts,
        resumes=residents.resumes,
        busy_s=busy_s / residents.gpu.turns,
    )
