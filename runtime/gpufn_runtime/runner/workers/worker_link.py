"""One worker as its runner sees it: the socket, the state, the slots, the attempts under way.

    1. the runner listens on the worker's socket; the first process that connects, of the user who owns the worker's
       folder, is the worker: our own user, or, in a container, one of its own
    2. Hello, then Ready (or StartFailed): STARTING → READY. Between them, what an earlier runner began there is adopted
    3. Run out, Result and Items in; Log and Call at any time
    4. `drain`: nothing new; when no slot is in use, Drain goes out and the worker ends
    5. `park`: nothing new; when no slot is in use, Park goes out: READY → PARKING → PARKED. `resume`: back
    6. a frame that makes no sense, or a closed socket, ends the link: the owner settles what was running

Everything that arrives is treated as hostile: it is bounded, checked against what was sent, and never decoded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Protocol

from gpufn_core.domain.revision import Revision
from gpufn_core.domain.worker import ColdStart, ParkedMemory, WorkerState, can_become
from gpufn_core.errors import ErrorInfo, ProtocolMismatch
from gpufn_core.protocol import frames
from gpufn_core.protocol.codec import PROTOCOL
from gpufn_core.protocol.limits import PROGRESS_CHARS
from gpufn_core.spec.function_spec import MOST_MODULES, is_module_name
from gpufn_runtime.runner.attempts.attempt import Attempt
from gpufn_runtime.runner.attempts.busy_time import BusyTime
from gpufn_runtime.runner.dispatch.pull_credits import ACK_WAIT_S
from gpufn_runtime.runner.gpu.gpu_turns import Seat
from gpufn_runtime.runner.workers.slots import SlotPool
from gpufn_runtime.runner.workers.worker_socket import WorkerSocket

log = logging.getLogger(__name__)

_LONGEST_START_S = 86_400.0
_MOST_ATTEMPTS = 1 << 53  # of one worker; each number once
_MAX_OPEN_CALLS = 1024  # that one worker may have of the platform at a time


class LinkQueue(Protocol):
    """What a link tells of its slots: to the queue of its revision."""

    def on_result(self, attempt: Attempt, result: frames.Result, body: bytes) -> None: ...
    def on_freed(self, link: WorkerLink, parcel: str = "") -> None: ...
    def on_unfinished(self, link: WorkerLink, unfinished: tuple[frames.Unfinished, ...]) -> None: ...


class LinkOwner(Protocol):
    """What a link tells of its worker: to the workers of its revision."""

    def on_ready(self, link: WorkerLink) -> None: ...
    def on_start_failed(self, link: WorkerLink, phase: str, error: ErrorInfo) -> None: ...
    def on_draining(self, link: WorkerLink) -> None: ...
    def on_parked(self, link: WorkerLink) -> None: ...
    def on_not_parked(self, link: WorkerLink, error: ErrorInfo, needs_bytes: int) -> None: ...
    def on_lost(self, link: WorkerLink, why: str, *, runs_on: bool) -> None: ...


class LinkRelay(Protocol):
    """What a link passes on, for whoever shall hear what its worker says."""

    def on_item(self, attempt: Attempt, item: frames.Item, body: bytes) -> None: ...
    def on_log(self, link: WorkerLink, attempt: Attempt | None, stream: str, text: bytes) -> None: ...
    def on_progress(self, attempt: Attempt, fraction: float, message: str) -> None: ...
    def on_call(self, link: WorkerLink, call: frames.Call, body: bytes) -> None: ...
    def on_close_call(self, link: WorkerLink, call: int) -> None: ...
    def on_call_credit(self, link: WorkerLink, call: int, items: int) -> None: ...


class WorkerLink:
    """`gpus_charged`: what its calls are charged of GPUs while they run, 0.25 for a quarter of one. `is_inherited`: it
    was assigned before this runner was there, and may look for it still."""

    def __init__(
        self,
        worker: str,
        revision: Revision,
        path: Path,
        *,
        queue: LinkQueue,
        owner: LinkOwner,
        relay: LinkRelay,
        created_at: float,
        seat: Seat | None = None,
        gpus_charged: float = 0.0,
        is_inherited: bool = False,
    ) -> None:
        self.worker = worker
        self.revision = revision
        self.path = path
        self.state = WorkerState.STARTING
        self.slots = SlotPool(revision.spec.slots)
        self.busy = BusyTime()
        self.gpus_charged = gpus_charged
        self.is_inherited = is_inherited
        self.seat = seat  # None: it shares no GPU by time
        self.attempts: dict[int, Attempt] = {}
        self.open_calls: set[int] = set()
        self.created_at = created_at  # unix seconds, as is ready_at
        self.listening_since = 0.0  # monotonic, as is idle_since
        self.was_ready = False  # when it connected: it comes from another runner
        self.is_asked_to_drain = False
        self.is_asked_to_park = False
        self.park_bytes = 0  # of the host's memory, that it may take for it
        self.parked: ParkedMemory | None = None  # as it says itself
        self.told_at: float | None = None  # monotonic: it parks, or resumes, since then
        self._leftovers = 0  # slots in use by attempts of an earlier runner that nobody hears of any more
        self._unadopted: set[int] = set()  # attempts of an earlier runner, in a slot each, that would be heard
        self._unheard: list[tuple[frames.WorkerFrame, bytes]] | None = None  # said before it is known which of them are
        self.ready_at: float | None = None
        self.idle_since: float | None = None
        self.cold_start: ColdStart | None = None
        self.modules: tuple[str, ...] = ()
        self._queue = queue
        self._owner = owner
        self._relay = relay
        self._server: asyncio.Server | None = None
        self._peer: WorkerSocket | None = None
        self._last_attempt = 0

    async def listen(self, now: float) -> None:
        """Raises OSError."""
        self.listening_since = now
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.unlink(missing_ok=True)
        # Not serving yet: that gives up the loop, and who is cancelled or closed then has to find it.
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: WorkerSocket(self), str(self.path), start_serving=False
        )
        self.path.chmod(0o666)  # the folder is closed to all but its owner
        await self._server.start_serving()

    @property
    def takes_calls(self) -> bool:
        """A worker with a poisoned slot is on its way out."""
        return self.state is WorkerState.READY and not self.slots.poisoned

    @property
    def free(self) -> int:
        """Slots for another attempt."""
        return self.slots.free if self.takes_calls else 0

    def left_over(self, now: float) -> int:
        """Slots in use by what is no call of the queue any more: cancelled attempts that have not stopped yet, and
        those of an earlier runner whose calls the queue has given out again."""
        unwanted = sum(attempt.is_cancelled for attempt in self.attempts.values())
        left = self._leftovers + len(self._unadopted)
        return unwanted + (left if now - self.listening_since > ACK_WAIT_S else 0)

    @property
    def waits_for_own(self) -> int:
        """Slots in use by attempts that wait for other calls of the same function."""
        return sum(attempt.waits_for_own for attempt in self.attempts.values())

    @property
    def needs_turn(self) -> bool:
        """An attempt would have to ask for a turn on the GPU."""
        return self.seat is not None and self.seat.takes_turns and self.seat.turn is None

    def next_attempt_number(self) -> int:
        self._last_attempt += 1
        return self._last_attempt

    def adopt(self, attempt: Attempt) -> None:
        """It is ours from now on, in the slot that it has."""
        self._unadopted.remove(attempt.number)
        self.attempts[attempt.number] = attempt

    def refuse(self, number: int) -> None:
        """Nobody wants this unfinished attempt; its slot is in use until it has stopped."""
        self.send(frames.Cancel(number))

    def hear_on(self) -> None:
        """Those that were unfinished are adopted, or refused: now it is heard what else it says."""
        unheard, self._unheard = self._unheard or [], None
        if self._peer is not None:
            self._peer.hear_on(unheard)

    def send(self, frame: frames.RunnerFrame, body: bytes = b"") -> None:
        if self._peer is not None:
            self._peer.write(frames.encode(frame, body))

    def drain(self) -> None:
        """Take nothing new; when nothing runs, tell the worker to end. One that is not READY yet hears it then."""
        self.is_asked_to_drain = True
        if self.state in (WorkerState.READY, WorkerState.PARKED) or self._is_about_to_park:
            self.state = WorkerState.DRAINING
        if self.state is WorkerState.DRAINING and not self.slots.in_use:
            self.send(frames.Drain())

    def park(self, now: float) -> None:
        """Take nothing new; when nothing runs, have the worker give its GPU up. One that is not READY yet hears it
        then, and one that drains never."""
        self.is_asked_to_park = True
        if self.takes_calls:
            self.state = WorkerState.PARKING
        if self._is_about_to_park and not self.slots.in_use:
            self.told_at = now
            self.send(frames.Park(self.park_bytes))

    def resume(self, now: float) -> None:
        """Have a parked worker take its GPU again. One that was not told to park yet goes on as it was; one that parks
        hears it then."""
        self.is_asked_to_park = False
        if self._is_about_to_park:
            self.state = WorkerState.READY
        elif self.state is WorkerState.PARKED:
            self.state = WorkerState.RESUMING
            self.told_at = now
            self.send(frames.Resume())

    @property
    def _is_about_to_park(self) -> bool:
        return self.state is WorkerState.PARKING and self.told_at is None

    def close(self, state: WorkerState = WorkerState.STOPPED) -> None:
        """Hear nothing more of this worker."""
        if can_become(self.state, state):
            self.state = state
        elif self.state.live:
            self.state = WorkerState.FAILED
        if self._server is not None:
            self._server.close()
            self._server = None
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.transport.abort()

    def remove_socket(self) -> None:
        """The worker is gone, or never came; and the folder, if nobody else has anything in it: the agent may have
        buried the worker before we began to listen."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
            self.path.parent.rmdir()

    # --- from the socket ----------------------------------------------------------------------------------------------

    def accept(self, peer: WorkerSocket) -> bool:
        """Whether this is the worker: nobody is before it."""
        if self._peer is not None or not self.state.live:
            return False
        self._peer = peer
        if self._server is not None:  # one connection: its code runs there as well, and could try without end
            self._server.close()
            self._server = None
        return True

    def hears(self, peer: WorkerSocket) -> bool:
        return self._peer is peer

    def take(self, frame: frames.WorkerFrame, body: bytes) -> None:
        """Raises ProtocolMismatch."""
        if self._unheard is None:
            self._TAKE[type(frame)](self, frame, body)
        else:
            self._unheard.append((frame, body))

    def _on_hello(self, hello: frames.Hello, _: bytes) -> None:
        if hello.protocol != PROTOCOL or hello.worker != self.worker:
            raise ProtocolMismatch(f"hello from {hello.worker} with protocol {hello.protocol}, ours is {PROTOCOL}")
        self.was_ready = hello.was_ready
        while self._leftovers < hello.running and self.slots.free:
            self.slots.take()
            self._leftovers += 1
        if hello.unfinished:
            self._on_unfinished(hello.unfinished)

    def _on_unfinished(self, unfinished: tuple[frames.Unfinished, ...]) -> None:
        """A result, or a question, must not come before it is known whose it is."""
        numbers = {each.attempt for each in unfinished}
        if self._last_attempt or not len(numbers) == len(unfinished) <= self.slots.free:
            raise ProtocolMismatch("it says that it has more unfinished attempts than it can have")
        if not 0 < min(numbers) <= max(numbers) < _MOST_ATTEMPTS:
            raise ProtocolMismatch("it says that it has attempts that nobody can have given it")
        for _ in numbers:
            self.slots.take()
        self._last_attempt = max(numbers)
        self._unadopted = numbers
        self._unheard = []
        if self._peer is not None:
            self._peer.transport.pause_reading()
        self._queue.on_unfinished(self, unfinished)

    def _on_ready(self, ready: frames.Ready, _: bytes) -> None:
        self.modules = tuple(filter(is_module_name, ready.modules[:MOST_MODULES]))
        if ready.parked is not None:
            self._is_parked(ready.parked)
            return
        if self.state is WorkerState.STARTING:
            self.state = WorkerState.READY
            self.cold_start = ColdStart(load_s=_seconds(ready.load_s), warm_s=_seconds(ready.warm_s))
        elif self.state is WorkerState.RESUMING:
            self.state = WorkerState.READY
            self.parked = None
        else:
            raise ProtocolMismatch("it says that it is ready, and nobody has asked")
        self._owner.on_ready(self)
        if self.is_asked_to_drain:
            self.drain()

    def _is_parked(self, claimed: ParkedMemory) -> None:
        if not can_become(self.state, WorkerState.PARKED):
            raise ProtocolMismatch("it says that it is parked, and was not told to park")
        self.state = WorkerState.PARKED
        self.parked = ParkedMemory(max(0, claimed.host_bytes), max(0, claimed.device_bytes))
        self.told_at = None
        self.ready_at = None
        self._owner.on_parked(self)

    def _on_not_parked(self, answer: frames.NotParked, _: bytes) -> None:
        if self.state is not WorkerState.PARKING or self.told_at is None:
            raise ProtocolMismatch("it says that it is not parked, and was not told to park")
        self.told_at = None
        self._owner.on_not_parked(self, answer.error, max(0, answer.needs_bytes))

    def _on_freed(self, _: frames.Freed, __: bytes) -> None:
        if self._leftovers:
            self._leftovers -= 1
            self.slots.release()
            self._queue.on_freed(self)

    def _on_draining(self, _: frames.Draining, __: bytes) -> None:
        if not self.is_asked_to_drain:
            self._owner.on_draining(self)

    def _on_start_failed(self, failed: frames.StartFailed, _: bytes) -> None:
        self._owner.on_start_failed(self, failed.phase, failed.error)

    def _on_result(self, result: frames.Result, body: bytes) -> None:
        if (attempt := self.attempts.pop(result.attempt, None)) is not None:
            self._queue.on_result(attempt, result, body)
        elif result.attempt in self._unadopted:
            self._unadopted.remove(result.attempt)
            self.slots.release()
            self._queue.on_freed(self, result.parcel)
        else:
            raise ProtocolMismatch("a result of an attempt that does not run here")

    def _on_item(self, item: frames.Item, body: bytes) -> None:
        self._relay.on_item(self._attempt(item.attempt), item, body)

    def _on_log(self, line: frames.Log, text: bytes) -> None:
        self._relay.on_log(self, self.attempts.get(line.attempt), line.stream, text)

    def _on_progress(self, progress: frames.Progress, _: bytes) -> None:
        """Of an attempt that has been given up already: nobody asks for it any more."""
        if (attempt := self.attempts.get(progress.attempt)) is not None:
            fraction = min(max(progress.fraction, 0.0), 1.0) if progress.fraction == progress.fraction else 0.0
            self._relay.on_progress(attempt, fraction, progress.message[:PROGRESS_CHARS])

    def _on_call(self, call: frames.Call, body: bytes) -> None:
        if call.call in self.open_calls or len(self.open_calls) >= _MAX_OPEN_CALLS:
            raise ProtocolMismatch(f"more than {_MAX_OPEN_CALLS} calls at a time, or a call opened twice")
        self.open_calls.add(call.call)
        self._relay.on_call(self, call, body)

    def _on_close_call(self, close: frames.CloseCall, _: bytes) -> None:
        self._relay.on_close_call(self, close.call)

    def _on_call_credit(self, credit: frames.CallCredit, _: bytes) -> None:
        self._relay.on_call_credit(self, credit.call, credit.items)

    def _attempt(self, number: int) -> Attempt:
        attempt = self.attempts.get(number)
        if attempt is None:
            raise ProtocolMismatch("an item of an attempt that does not run here")
        if attempt.run.items >= attempt.run.granted:
            raise ProtocolMismatch("an item without credit")
        return attempt

    def lost(self, peer: WorkerSocket, why: str, *, runs_on: bool) -> None:
        if self.hears(peer):
            self._peer = None
            self._owner.on_lost(self, why, runs_on=runs_on)

    _TAKE: ClassVar[dict[type, Callable[..., None]]] = {
        frames.Hello: _on_hello,
        frames.Ready: _on_ready,
        frames.StartFailed: _on_start_failed,
        frames.Result: _on_result,
        frames.Item: _on_item,
        frames.Log: _on_log,
        frames.Progress: _on_progress,
        frames.Call: _on_call,
        frames.CloseCall: _on_close_call,
        frames.CallCredit: _on_call_credit,
        frames.Freed: _on_freed,
        frames.Draining: _on_draining,
        frames.NotParked: _on_not_parked,
    }

    def __repr__(self) -> str:
        return f"<WorkerLink {self.worker} {self.revision} {self.state} {self.slots!r}>"


def _seconds(said: float) -> float:
    """A duration that a worker claims, as far as it can be one."""
    return said if 0 <= said <= _LONGEST_START_S else 0.0
