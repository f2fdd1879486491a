"""Turns on this node's GPUs that are shared by time: `gpufn_core.domain.gpu_fair_queue` says who is next, here are workers and timers.

1. a READY worker on such a GPU has a seat there. While those of several functions have, and they are more than there
   are turns, turns are *taken*
2. an attempt asks its worker's seat: it begins at once where turns are not taken, or in the worker's turn; or it waits
3. the turn is the worker's: more of its attempts may begin in it, until others have a better claim
4. it ends when none of them runs any more. After 10 s it is passed on while they run: a GPU takes more than one worker,
   only more slowly. And it is passed on by a call that calls functions, which might wait for a turn themselves
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Protocol

from gpufn_core.domain.device import DeviceShare, Share
from gpufn_core.domain.gpu_fair_queue import FairQueueing, Turn
from gpufn_platform.process.clock import Clock
from gpufn_runtime.runner.attempts.attempt import Attempt

# All who wait are warm, so changing costs little; a stretch only has to be long beside one call.
_OVERRUN_S: Final = 0.2
_HOLD_S: Final = 0.02  # the next delivery is here after a millisecond, a client's next call after some more
_LONGEST_S: Final = 10.0

Begin = Callable[[], None]


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]


class NodeTurns:
    """`at_once`: how many workers may have their turn on one GPU at a time. `call_later` is the event loop's."""

    def __init__(self, clock: Clock, at_once: int, call_later: CallLater) -> None:
        self._clock = clock
        self._at_once = at_once
        self._call_later = call_later
        self._gpus: dict[str, GpuTurns] = {}

    def seat(self, function: str, share: DeviceShare) -> Seat | None:
        """For a worker with this share; None for one that shares no GPU by time."""
        if share.mode is not Share.TIME or not share.gpus:
            return None
        (gpu,) = share.gpus
        if gpu not in self._gpus:
            self._gpus[gpu] = GpuTurns(gpu, self._clock, self._at_once, self._call_later)
        return Seat(self._gpus[gpu], function)


class Seat:
    """One worker's place at a GPU: what of it `waits`, in order, and what has `begun` in its turn."""

    def __init__(self, turns: GpuTurns, function: str) -> None:
        self.function = function
        self.turn: Turn[Seat] | None = None
        self.waits: dict[Attempt, Begin] = {}
        self.begun: set[Attempt] = set()
        self._turns = turns

    @property
    def takes_turns(self) -> bool:
        return self._turns.are_taken

    @property
    def gpu(self) -> str:
        return self._turns.gpu

    @property
    def waits_on(self) -> str:
        """The GPU that its worker waits for its turn on; empty when it does not."""
        return self.gpu if self.waits and self.turn is None else ""

    def join(self) -> None:
        """Its worker is READY."""
        self._turns.join(self)

    def leave(self) -> None:
        """Its worker has gone, and what waited was taken from it."""
        self._turns.leave(self)

    def ask(self, attempt: Attempt, begin: Begin) -> bool:
        """Call `begin` now, or in its turn. False: it waits."""
        return self._turns.ask(self, attempt, begin)

    def give_up_waits(self) -> list[Attempt]:
        """All that waits, taken out at once: none of it begins because another went."""
        return self._turns.give_up_waits(self)

    def done(self, attempt: Attempt) -> None:
        """It ended, waits no longer, or needs no turn any more. Again is fine."""
        self._turns.done(self, attempt)


class GpuTurns:
    def __init__(self, gpu: str, clock: Clock, at_once: int, call_later: CallLater) -> None:
        self.gpu = gpu
        self.are_taken = False
        self._clock = clock
        self._at_once = at_once
        self._call_later = call_later
        self._order: FairQueueing[Seat] = FairQueueing(at_once, overrun_s=_OVERRUN_S, hold_s=_HOLD_S)
        self._seats: list[Seat] = []
        self._timer: Timer | None = None

    def join(self, seat: Seat) -> None:
        if seat not in self._seats:
            self._seats.append(seat)
            self._count()

    def leave(self, seat: Seat) -> None:
        if seat not in self._seats:
            return
        now = self._clock.monotonic()
        self._seats.remove(seat)
        self._count()
        seat.begun.clear()
        if seat.turn is not None:
            self._end_turn(seat, now)
        if all(other.function != seat.function for other in self._seats):
            self._order.forget(seat.function)
        if not self.are_taken:
            self._let_all_begin()
        self._serve(now)

    def ask(self, seat: Seat, attempt: Attempt, begin: Begin) -> bool:
        if not self.are_taken:
            begin()
            return True
        now = self._clock.monotonic()
        seat.waits[attempt] = begin
        if seat.turn is None and len(seat.waits) == 1:
            self._order.wait(seat.function, seat, now)
        self._serve(now)
        return attempt not in seat.waits

    def give_up_waits(self, seat: Seat) -> list[Attempt]:
        waits = list(seat.waits)
        seat.waits.clear()
        if waits and seat.turn is None:
            self._order.leave(seat.function, seat)
        return waits

    def done(self, seat: Seat, attempt: Attempt) -> None:
        now = self._clock.monotonic()
        if attempt in seat.waits:
            del seat.waits[attempt]
            if seat.turn is None and not seat.waits:
                self._order.leave(seat.function, seat)
        elif attempt in seat.begun:
            seat.begun.remove(attempt)
            if seat.turn is not None and not seat.begun:
                self._end_turn(seat, now)
        else:
            return  # it began when turns were not taken, or has passed its turn on
        self._serve(now)

    def _count(self) -> None:
        is_shared = len({seat.function for seat in self._seats}) > 1
        self.are_taken = is_shared and len(self._seats) > self._at_once

    def _serve(self, now: float) -> None:
        """Begin all that may: in turns that are on, and in those that are free."""
        for seat in self._seats:
            self._go_on(seat, now)
        while (turn := self._order.next(now)) is not None:
            turn.what.turn = turn
            self._begin_next(turn.what)
            self._go_on(turn.what, now)
        if self._timer is not None:
            self._timer.cancel()
        turns = [seat.turn.began + _LONGEST_S for seat in self._seats if seat.turn is not None]
        at = min(self._order.ask_again_at(now), *turns, math.inf)
        self._timer = None if at == math.inf else self._call_later(max(0.0, at - now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = self._clock.monotonic()
        for seat in self._seats:
            if seat.turn is not None and now >= seat.turn.began + _LONGEST_S:
                seat.begun.clear()
                self._end_turn(seat, now)
        self._serve(now)

    def _go_on(self, seat: Seat, now: float) -> None:
        """Begin in its turn what may."""
        while seat.waits and seat.turn is not None and self._order.may_go_on(seat.turn, now):
            self._begin_next(seat)

    def _begin_next(self, seat: Seat) -> None:
        attempt = next(iter(seat.waits))
        begin = seat.waits.pop(attempt)
        seat.begun.add(attempt)
        begin()

    def _end_turn(self, seat: Seat, now: float) -> None:
        assert seat.turn is not None
        self._order.end(seat.turn, now)
        seat.turn = None
        if seat.waits:
            self._order.wait(seat.function, seat, now)

    def _let_all_begin(self) -> None:
        """There is a turn for everybody, or one function only."""
        for seat in self._seats:
            if seat.turn is None and seat.waits:
                self._order.leave(seat.function, seat)
            while seat.waits:
                self._begin_next(seat)
