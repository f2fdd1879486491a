"""Plays a trace on a GPU, event by event: `simulate(load, gpu, ...) -> {order: Figures}`.

1. a call comes and waits for its turn
2. it begins: its worker is warm, or the start of one is part of its turn, for the GPU loads meanwhile
3. it ends; the next begins, or the turn is held for a function whose call may be on its way
"""

from __future__ import annotations

import heapq
import itertools
import math
import random

from gpufn.turns import Arrivals, FairQueueing, Order, ShortestFirst, Turn

from .figures import Ended, Figures, figures
from .gpu import Gpu, Residents
from .traces import Call, Load, calls, functions


def simulate(
    load: Load, gpu: Gpu, *, at_once: int = 1, overrun_s: float = 10.0, hold_s: float = 0.0
) -> dict[str, Figures]:
    """Each order on the same calls, of which there has to be one."""
    rng = random.Random(load.seed)  # noqa: S311  the same again for the same seed
    trace = calls(functions(load, rng), load, rng)
    fair = Residents(gpu)
    return {
        "fcfs": play(trace, Arrivals(at_once), Residents(gpu)),
        "sjf": play(trace, ShortestFirst(at_once), Residents(gpu)),
        "mqfq": play(trace, FairQueueing(at_once, overrun_s=overrun_s, hold_s=hold_s, is_warm=fair.__contains__), fair),
    }


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
    return figures(ended, cold_starts=residents.cold_starts, busy_s=busy_s)
