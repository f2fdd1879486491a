"""Connection to one worker: its socket, state, slots and running attempts.

    1. The runner listens on the worker's socket. The first process that connects with the uid that owns the worker's
       folder is the worker. That is our own user or, in a container, its own uid.
    2. Hello, then Ready (or StartFailed): STARTING → READY. In between, attempts of an earlier runner are adopted.
    3. Run is sent; Result and Items are received; Log and Call are received at any time.
    4. `drain`: no new attempts. When no slot is in use, Drain is sent and the worker ends.
    5. `park`: no new attempts. When no slot is in use, Park is sent: READY → PARKING → PARKED. `resume` reverses that.
    6. An invalid frame or a closed socket ends the link. The owner settles the running attempts.

All received data is considered hostile: its size is limited, it is checked against the sent data, and bodies are never
decoded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Protocol

from gpufn_core.domain.revision import Revision
from gpufn_core.domain.worker import Cause, ColdStart, ParkedMemory, WorkerState, can_become
from gpufn_core.errors import ErrorInfo, ProtocolMismatch
from gpufn_core.protocol import frames
from gpufn_core.protocol.codec import PROTOCOL
from gpufn_core.spec.function_spec import MAX_MODULES, is_module_name
from gpufn_runtime.runner.core import events
from gpufn_runtime.runner.core.attempt import Attempt
from gpufn_runtime.runner.core.busy_time import BusyTime
from gpufn_runtime.runner.core.machine import ACK_WAIT_S
from gpufn_runtime.runner.core.slots import SlotPool
from gpufn_runtime.runner.gpu.gpu_turns import Seat
from gpufn_runtime.runner.workers.worker_socket import WorkerSocket

log = logging.getLogger(__name__)

_READY = WorkerState.READY  # each call needs it several times, and Python looks up a member of an enum slowly
_MAX_START_S = 86_400.0
_MAX_ATTEMPTS = 1 << 53  # per worker; each number is used once


Relay = Callable[["WorkerLink", frames.WorkerFrame, bytes], None]


class LinkOwner(Protocol):
    """Receives events about the worker: the workers of the revision. `dispatch` feeds the state machine."""

    @property
    def dispatch(self) -> Callable[[events.Event], None]: ...
    def on_unfinished(self, link: WorkerLink, unfinished: tuple[frames.Unfinished, ...], /) -> None: ...
    def on_ready(self, link: WorkerLink) -> None: ...
    def on_start_failed(self, link: WorkerLink, phase: str, error: ErrorInfo) -> None: ...
    def on_draining(self, link: WorkerLink) -> None: ...
    def on_parked(self, link: WorkerLink) -> None: ...
    def on_not_parked(self, link: WorkerLink, error: ErrorInfo, needs_bytes: int) -> None: ...
    def on_lost(self, link: WorkerLink, reason: str, *, runs_on: bool) -> None: ...


class WorkerLink:
    """Connection to one worker. `relay` handles the messages of running calls. `gpus_charged` is the number of GPUs
    that its calls are charged for while they run: 0.25 for a quarter of one. `gpus` are their uuids. `is_inherited`:
    the worker was assigned before this runner started, and may still be trying to reconnect."""

    def __init__(
        self,
        worker: str,
        revision: Revision,
        path: Path,
        *,
        owner: LinkOwner,
        relay: Relay,
        created_at: float,
        seat: Seat | None = None,
        gpus: tuple[str, ...] = (),
        gpus_charged: float = 0.0,
        is_inherited: bool = False,
    ) -> None:
        self.id = worker
        self.revision = revision
        self.path = path
        self.state = WorkerState.STARTING
        self.slots = SlotPool(revision.spec.slots, revision.spec.calls_per_worker)
        self.busy = BusyTime()
        self.gpus = gpus
        self.gpus_charged = gpus_charged
        self.is_inherited = is_inherited
        self.seat = seat  # None if it shares no GPU by time
        self.attempts: dict[int, Attempt] = {}
        self.open_calls: set[int] = set()
        self.created_at = created_at  # unix seconds, as is ready_at
        self.listening_since = 0.0  # monotonic, as is idle_since
        self.was_ready = False  # when it connected: it comes from an earlier runner
        self.drain_requested = False
        self.park_requested = False
        self.cause: Cause | None = None  # of the last demand to park, resume or end
        self.park_bytes = 0  # host memory that it may use for parking
        self.parked: ParkedMemory | None = None  # as the worker reports it
        self.requested_at: float | None = None  # monotonic: when Park or Resume was sent; None when it is done
        self._leftover_slots = 0  # slots used by attempts of an earlier runner whose results are dropped
        self._unadopted: set[int] = set()  # attempts of an earlier runner, each in a slot, that may be adopted
        self._deferred: list[tuple[frames.WorkerFrame, bytes]] | None = None  # frames received before the adoption ends
        self.ready_at: float | None = None
        self.idle_since: float | None = None
        self.cold_start: ColdStart | None = None
        self.modules: tuple[str, ...] = ()
        self._owner = owner
        self._relay = relay
        self._server: asyncio.Server | None = None
        self.peer: WorkerSocket | None = None
        self._last_attempt = 0

    async def listen(self, now: float) -> None:
        """Listen on the socket. Raises OSError."""
        self.listening_since = now
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.unlink(missing_ok=True)
        # Do not serve yet: that would yield to the event loop, and a cancel or close must find the server.
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: WorkerSocket(self), str(self.path), start_serving=False
        )
        self.path.chmod(0o666)  # only the owner can enter the folder
        await self._server.start_serving()

    @property
    def accepts_calls(self) -> bool:
        """Whether it accepts attempts. A worker with a poisoned slot is about to end."""
        return self.state is _READY and not self.slots.poisoned

    @property
    def free(self) -> int:
        """Number of slots for further attempts."""
        return self.slots.free if self.accepts_calls else 0

    def left_over(self, now: float) -> int:
        """Return the number of slots used by attempts that no longer belong to queued calls: cancelled attempts that
        have not stopped, and attempts of an earlier runner whose calls NATS has redelivered."""
        unwanted = sum(attempt.is_cancelled for attempt in self.attempts.values())
        leftover = self._leftover_slots + len(self._unadopted)
        return unwanted + (leftover if now - self.listening_since > ACK_WAIT_S else 0)

    @property
    def longest_attempt(self) -> Attempt | None:
        """The running attempt that began first."""
        begun = (attempt for attempt in self.attempts.values() if attempt.begun is not None)
        return min(begun, key=lambda attempt: attempt.run.began, default=None)

    @property
    def waits_for_own(self) -> int:
        """Number of slots used by attempts that wait for calls of their own function."""
        return sum(attempt.waits_for_own for attempt in self.attempts.values())

    @property
    def shares_by_time(self) -> bool:
        """Whether it shares its GPU by time."""
        return self.seat is not None

    @property
    def must_take_turns(self) -> bool:
        """Whether its GPU is contended: turns are required there."""
        return self.seat is not None and self.seat.must_take_turns

    @property
    def gpu(self) -> str:
        """The GPU that it shares by time; "" if none."""
        return self.seat.gpu if self.seat is not None else ""

    @property
    def needs_turn(self) -> bool:
        """Whether an attempt would have to request a turn on the GPU."""
        return self.seat is not None and self.seat.must_take_turns and self.seat.turn is None

    def next_attempt_number(self) -> int:
        self._last_attempt += 1
        return self._last_attempt

    def adopt(self, attempt: Attempt) -> None:
        """Adopt the attempt in the slot that it occupies."""
        self._unadopted.remove(attempt.number)
        self.attempts[attempt.number] = attempt

    def resume_reading(self) -> None:
        """Handle the deferred frames and resume reading, after all unfinished attempts were adopted or refused."""
        deferred, self._deferred = self._deferred or [], None
        if self.peer is not None:
            self.peer.resume_reading(deferred)

    def send(self, frame: frames.RunnerFrame, body: bytes = b"") -> None:
        if self.peer is not None:
            self.peer.write(frames.encode(frame, body))

    def drain(self) -> None:
        """Accept no new attempts, and send Drain when no slot is in use. Deferred until the worker is READY."""
        self.drain_requested = True
        if self.state in (WorkerState.READY, WorkerState.PARKED) or self._is_about_to_park:
            self.state = WorkerState.DRAINING
        if self.state is WorkerState.DRAINING and not self.slots.in_use:
            self.send(frames.Drain(self.cause))

    def park(self, now: float) -> None:
        """Accept no new attempts, and send Park when no slot is in use. Deferred until the worker is READY; ignored
        while it drains."""
        self.park_requested = True
        if self.accepts_calls:
            self.state = WorkerState.PARKING
        if self._is_about_to_park and not self.slots.in_use:
            self.requested_at = now
            self.send(frames.Park(self.park_bytes, self.cause))

    def resume(self, now: float) -> None:
        """Send Resume to a parked worker. A worker to which Park was not sent yet just continues; for a parking worker,
        Resume is deferred."""
        self.park_requested = False
        if self._is_about_to_park:
            self.state = WorkerState.READY
        elif self.state is WorkerState.PARKED:
            self.state = WorkerState.RESUMING
            self.requested_at = now
            self.send(frames.Resume(self.cause))

    @property
    def _is_about_to_park(self) -> bool:
        return self.state is WorkerState.PARKING and self.requested_at is None

    def close(self, state: WorkerState = WorkerState.STOPPED) -> None:
        """Close the connection."""
        if can_become(self.state, state):
            self.state = state
        elif self.state.live:
            self.state = WorkerState.FAILED
        if self._server is not None:
            self._server.close()
            self._server = None
        peer, self.peer = self.peer, None
        if peer is not None:
            peer.transport.abort()

    def remove_socket(self) -> None:
        """Remove the socket of an ended worker, and its folder if it is empty: the agent may have cleaned up before the
        runner began to listen."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
            self.path.parent.rmdir()

    # --- from the socket ----------------------------------------------------------------------------------------------

    def accept(self, peer: WorkerSocket) -> bool:
        """Accept the connection if it is the first one."""
        if self.peer is not None or not self.state.live:
            return False
        self.peer = peer
        if self._server is not None:  # accept one connection only: user code could connect endlessly
            self._server.close()
            self._server = None
        return True

    def handle(self, frame: frames.WorkerFrame, body: bytes) -> None:
        """Handle a frame. Raises ProtocolMismatch."""
        if self._deferred is not None:
            self._deferred.append((frame, body))
        elif (handler := self._HANDLERS.get(type(frame))) is not None:
            handler(self, frame, body)
        else:
            self._relay(self, frame, body)

    def _on_hello(self, hello: frames.Hello, _: bytes) -> None:
        if hello.protocol != PROTOCOL or hello.worker != self.id:
            raise ProtocolMismatch(f"hello from {hello.worker} with protocol {hello.protocol}, ours is {PROTOCOL}")
        self.was_ready = hello.was_ready
        if hello.was_ready and self.revision.spec.calls_per_worker is not None:
            self.drain_requested = True  # how many calls it has run is not known
            self.cause = Cause.MAX_CALLS
        while self._leftover_slots < hello.running and self.slots.free:
            self.slots.take()
            self._leftover_slots += 1
        if hello.unfinished:
            self._on_unfinished(hello.unfinished)

    def _on_unfinished(self, unfinished: tuple[frames.Unfinished, ...]) -> None:
        """Take slots for unfinished attempts and defer all further frames until their adoption is decided."""
        numbers = {item.attempt for item in unfinished}
        if self._last_attempt or not len(numbers) == len(unfinished) <= self.slots.free:
            raise ProtocolMismatch("it reports more unfinished attempts than it can have")
        if not 0 < min(numbers) <= max(numbers) < _MAX_ATTEMPTS:
            raise ProtocolMismatch("it reports attempt numbers that no runner can have assigned")
        for _ in numbers:
            self.slots.take()
        self._last_attempt = max(numbers)
        self._unadopted = numbers
        self._deferred = []
        if self.peer is not None:
            self.peer.transport.pause_reading()
        self._owner.on_unfinished(self, unfinished)

    def _on_ready(self, ready: frames.Ready, _: bytes) -> None:
        self.modules = tuple(filter(is_module_name, ready.modules[:MAX_MODULES]))
        if ready.parked is not None:
            self._on_parked(ready.parked)
            return
        if self.state is WorkerState.STARTING:
            self.state = WorkerState.READY
            self.cold_start = ColdStart(load_s=_seconds(ready.load_s), warm_s=_seconds(ready.warm_s))
        elif self.state is WorkerState.RESUMING:
            self.state = WorkerState.READY
            self.parked = None
        else:
            raise ProtocolMismatch("it reports that it is ready without being asked")
        self._owner.on_ready(self)
        if self.drain_requested:
            self.drain()

    def _on_parked(self, reported: ParkedMemory) -> None:
        if not can_become(self.state, WorkerState.PARKED):
            raise ProtocolMismatch("it reports that it is parked, but was not told to park")
        self.state = WorkerState.PARKED
        self.parked = ParkedMemory(max(0, reported.host_bytes), max(0, reported.device_bytes))
        self.requested_at = None
        self.ready_at = None
        self._owner.on_parked(self)

    def _on_not_parked(self, message: frames.NotParked, _: bytes) -> None:
        if self.state is not WorkerState.PARKING or self.requested_at is None:
            raise ProtocolMismatch("it reports that it is not parked, but was not told to park")
        self.requested_at = None
        self._owner.on_not_parked(self, message.error, max(0, message.needs_bytes))

    def _on_freed(self, _: frames.Freed, __: bytes) -> None:
        if self._leftover_slots:
            self._leftover_slots -= 1
            self.slots.release()
            self._owner.dispatch(events.SlotFreed(self))

    def _on_draining(self, _: frames.Draining, __: bytes) -> None:
        if not self.drain_requested:
            self._owner.on_draining(self)

    def _on_start_failed(self, failed: frames.StartFailed, _: bytes) -> None:
        self._owner.on_start_failed(self, failed.phase, failed.error)

    def _on_result(self, result: frames.Result, body: bytes) -> None:
        if (attempt := self.attempts.pop(result.attempt, None)) is not None:
            self._owner.dispatch(events.ResultReceived(attempt, result, body))
        elif result.attempt in self._unadopted:
            self._unadopted.remove(result.attempt)
            self.slots.release()
            self._owner.dispatch(events.SlotFreed(self, result.shared_body))
        else:
            raise ProtocolMismatch("a result of an attempt that does not run here")

    def on_disconnected(self, peer: WorkerSocket, reason: str, *, runs_on: bool) -> None:
        if self.peer is peer:
            self.peer = None
            self._owner.on_lost(self, reason, runs_on=runs_on)

    _HANDLERS: ClassVar[dict[type, Callable[..., None]]] = {
        frames.Hello: _on_hello,
        frames.Ready: _on_ready,
        frames.StartFailed: _on_start_failed,
        frames.Result: _on_result,
        frames.Freed: _on_freed,
        frames.Draining: _on_draining,
        frames.NotParked: _on_not_parked,
    }

    def __repr__(self) -> str:
        return f"<WorkerLink {self.id} {self.revision} {self.state} {self.slots!r}>"


def _seconds(value: float) -> float:
    """Return a duration that a worker reports, or 0 if it is not plausible."""
    return value if 0 <= value <= _MAX_START_S else 0.0
