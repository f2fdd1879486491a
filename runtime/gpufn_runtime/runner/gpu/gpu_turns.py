"""Turns on this node's time-shared GPUs.

`gpufn_core.domain.devices.gpu_fair_queue` chooses the next worker. This module adds workers and timers.

1. A READY worker on such a GPU has a seat. Turns are required while the seats belong to several functions and outnumber
   the turns.
2. An attempt requests to begin at its worker's seat. It begins at once if no turn is required or the worker has a turn;
   otherwise it waits.
3. During the worker's turn more of its attempts may begin, until other workers have a better claim.
4. The turn ends when none of the worker's attempts runs. After 10 s it is passed on although they still run: a GPU can
   serve several workers, only more slowly. A call that calls functions passes its turn on too, because those may wait
   for a turn themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Protocol

from gpufn_core.domain.devices.device import DeviceShare, Share
from gpufn_core.domain.devices.gpu_fair_queue import FairQueueing, Turn
from gpufn_platform.process.clock import Clock
from gpufn_runtime.runner.core.attempt import Attempt

# All waiting workers are warm, so a switch is cheap. A turn only needs to be long compared to one call.
_OVERRUN_S: Final = 0.2
_HOLD_S: Final = 0.02  # the next delivery arrives after 1 ms, a client's next call a little later
_MAX_TURN_S: Final = 10.0

Begin = Callable[[], None]


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]


class NodeTurns:
    """Turns on all GPUs of the node. `max_turns` is the number of workers that may have a turn on one GPU at once.
    `call_later` is the event loop's."""

    def __init__(self, clock: Clock, max_turns: int, call_later: CallLater) -> None:
        self._clock = clock
        self._max_turns = max_turns
        self._call_later = call_later
        self._gpus: dict[str, GpuTurns] = {}

    def seat(self, function: str, share: DeviceShare) -> Seat | None:
        """Return a seat for a worker with this share, or None if it does not share a GPU by time."""
        if share.mode is not Share.TIME or not share.gpus:
            return None
        (gpu,) = share.gpus
        if gpu not in self._gpus:
            self._gpus[gpu] = GpuTurns(gpu, self._clock, self._max_turns, self._call_later)
        return Seat(self._gpus[gpu], function)


class Seat:
    """One worker's seat at a GPU: its `waiting` attempts, in order, and those `running` in its turn."""

    def __init__(self, turns: GpuTurns, function: str) -> None:
        self.function = function
        self.turn: Turn[Seat] | None = None
        self.waiting: dict[Attempt, Begin] = {}
        self.running: set[Attempt] = set()
        self._turns = turns

    @property
    def must_take_turns(self) -> bool:
        return self._turns.are_required

    @property
    def gpu(self) -> str:
        return self._turns.gpu

    @property
    def waits_on(self) -> str:
        """The GPU for whose turn the worker waits; "" if it does not wait."""
        return self.gpu if self.waiting and self.turn is None else ""

    def join(self) -> None:
        """Add the seat: the worker is READY."""
        self._turns.join(self)

    def leave(self) -> None:
        """Remove the seat: the worker has ended, and its waiting attempts were removed."""
        self._turns.leave(self)

    def request(self, attempt: Attempt, begin: Begin) -> None:
        """Call `begin` now, or when the turn comes."""
        self._turns.request(self, attempt, begin)

    def remove_waiting(self) -> list[Attempt]:
        """Remove all waiting attempts at once, so that none begins because another one was removed."""
        return self._turns.remove_waiting(self)

    def done(self, attempt: Attempt) -> None:
        """Report that the attempt ended, waits no longer, or needs no turn any longer. May be repeated."""
        self._turns.done(self, attempt)


class GpuTurns:
    def __init__(self, gpu: str, clock: Clock, max_turns: int, call_later: CallLater) -> None:
        self.gpu = gpu
        self.are_required = False
        self._clock = clock
        self._max_turns = max_turns
        self._call_later = call_later
        self._queue: FairQueueing[Seat] = FairQueueing(max_turns, overrun_s=_OVERRUN_S, hold_s=_HOLD_S)
        self._seats: list[Seat] = []
        self._timer: Timer | None = None

    def join(self, seat: Seat) -> None:
        if seat not in self._seats:
            self._seats.append(seat)
            self._update_required()

    def leave(self, seat: Seat) -> None:
        if seat not in self._seats:
            return
        now = self._clock.monotonic()
        self._seats.remove(seat)
        self._update_required()
        seat.running.clear()
        if seat.turn is not None:
            self._end_turn(seat, now)
        if all(other.function != seat.function for other in self._seats):
            self._queue.forget(seat.function)
        if not self.are_required:
            self._begin_all()
        self._serve(now)

    def request(self, seat: Seat, attempt: Attempt, begin: Begin) -> None:
        if not self.are_required:
            begin()
            return
        now = self._clock.monotonic()
        seat.waiting[attempt] = begin
        if seat.turn is None and len(seat.waiting) == 1:
            self._queue.wait(seat.function, seat, now)
        self._serve(now)

    def remove_waiting(self, seat: Seat) -> list[Attempt]:
        waiting = list(seat.waiting)
        seat.waiting.clear()
        if waiting and seat.turn is None:
            self._queue.leave(seat.function, seat)
        return waiting

    def done(self, seat: Seat, attempt: Attempt) -> None:
        now = self._clock.monotonic()
        if attempt in seat.waiting:
            del seat.waiting[attempt]
            if seat.turn is None and not seat.waiting:
                self._queue.leave(seat.function, seat)
        elif attempt in seat.running:
            seat.running.remove(attempt)
            if seat.turn is not None and not seat.running:
                self._end_turn(seat, now)
        else:
            return  # it began when no turn was required, or has passed its turn on
        self._serve(now)

    def _update_required(self) -> None:
        is_shared = len({seat.function for seat in self._seats}) > 1
        self.are_required = is_shared and len(self._seats) > self._max_turns

    def _serve(self, now: float) -> None:
        """Begin all attempts that may: in current turns, and in free ones."""
        for seat in self._seats:
            self._continue_turn(seat, now)
        while (turn := self._queue.next(now)) is not None:
            turn.what.turn = turn
            self._begin_next(turn.what)
            self._continue_turn(turn.what, now)
        if self._timer is not None:
            self._timer.cancel()
        turns = [seat.turn.began + _MAX_TURN_S for seat in self._seats if seat.turn is not None]
        next_time = min(self._queue.next_check_at(now), *turns, math.inf)
        self._timer = None if next_time == math.inf else self._call_later(max(0.0, next_time - now), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = self._clock.monotonic()
        for seat in self._seats:
            if seat.turn is not None and now >= seat.turn.began + _MAX_TURN_S:
                seat.running.clear()
                self._end_turn(seat, now)
        self._serve(now)

    def _continue_turn(self, seat: Seat, now: float) -> None:
        """Begin attempts in the seat's current turn."""
        while seat.waiting and seat.turn is not None and self._queue.may_continue(seat.turn, now):
            self._begin_next(seat)

    def _begin_next(self, seat: Seat) -> None:
        attempt = next(iter(seat.waiting))
        begin = seat.waiting.pop(attempt)
        seat.running.add(attempt)
        begin()

    def _end_turn(self, seat: Seat, now: float) -> None:
        assert seat.turn is not None
        self._queue.end(seat.turn, now)
        seat.turn = None
        if seat.waiting:
            self._queue.wait(seat.function, seat, now)

    def _begin_all(self) -> None:
        """Begin all attempts: turns are no longer required."""
        for seat in self._seats:
            if seat.turn is None and seat.waiting:
                self._queue.leave(seat.function, seat)
            while seat.waiting:
                self._begin_next(seat)
