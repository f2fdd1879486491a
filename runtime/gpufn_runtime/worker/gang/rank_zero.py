"""Rank 0 of a gang: the runner of the other ranks.

1. `listen`: the other ranks connect while all ranks load the code. Rank 0 is ready when all are (`wait_until_ready`).
2. `begin`: each call goes to all ranks, with the same arguments. `join`: it ends when it has ended on all of them.
3. A rank that raises gives the others RAISED_GRACE_S to end as well, because they may wait for it without an end. A
   cancelled call has CANCELLED_GRACE_S: all ranks received Cancel, and may still clean up.
4. A rank disconnects, or the others do not end in time: the gang fails (`on_gang_failed`), and this process exits. The
   other ranks exit when their connection to rank 0 closes.
5. `drain`: no further calls; the other ranks run their exit hooks.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.worker import Gang
from gpufn_core.errors import (
    ErrorInfo,
    GpufnError,
    InvalidInput,
    PayloadTooLarge,
    PlatformStopping,
    ProtocolMismatch,
    WorkerLost,
)
from gpufn_core.protocol import frames
from gpufn_core.protocol.codec import PROTOCOL
from gpufn_core.protocol.frames import FrameReader, WorkerFrame
from gpufn_core.protocol.limits import MESSAGE_BYTES
from gpufn_core.spec.units import format_bytes
from gpufn_runtime.worker.arguments.loader import LoadError
from gpufn_runtime.worker.execute.attempts import Attempt
from gpufn_runtime.worker.execute.results import End
from gpufn_runtime.worker.gang import connection
from gpufn_runtime.worker.link import Link
from gpufn_runtime.worker.process import exit_on_failure

RAISED_GRACE_S: Final = 2.0
CANCELLED_GRACE_S: Final = 10.0  # longer than the runner waits for a cancelled call
_NAMED_BEFORE_S = 2.0  # the runner ends a start that is late, and names no rank: rank 0 goes first
_EXIT_REPORTED_S = 1.0  # the agent's report of a rank's exit has the exit code and the last output: it goes first
_ACCEPT_RETRY_S = 0.1
_NODE_IS_LOST = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)  # the kernel's keepalive got no answer
_READ_BYTES = 1 << 18
_UNLIMITED = 1 << 53  # credits of a stream whose items are dropped
_SUCCEEDED = OutcomeKind.SUCCEEDED
_Checkpoint = tuple[ErrorInfo | None, str, bytes]  # why it could not be read, or its content type and body


class Hooks(Protocol):
    """The worker of rank 0. Its methods are called in threads of the gang."""

    def on_gang_failed(self, attempt: Attempt | None, end: End) -> None:
        """End `attempt`, if one runs, and this process."""
        ...

    def on_rank_draining(self) -> None: ...

    def restore(self, attempt: Attempt) -> tuple[str, bytes]:
        """Return the checkpoint of the attempt's call. Raises GpufnError."""
        ...


class _Call:
    """The call that runs. `ends` has the end of each other rank that is done."""

    def __init__(self, attempt: Attempt, checkpoint: _Checkpoint) -> None:
        self.attempt = attempt
        self.checkpoint = checkpoint
        self.ends: dict[int, End] = {}


class RankZero:
    def __init__(self, gang: Gang, link: Link, hooks: Hooks, start_by: float) -> None:
        self._gang = gang
        self._start_by = start_by
        self._link = link
        self._hooks = hooks
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._peers: dict[int, socket.socket] = {}
        self._failed_sends: dict[int, OSError] = {}
        self._strangers: deque[socket.socket] = deque()  # connections in their handshake, the oldest first
        self._ready: set[int] = set()
        self._draining: set[int] = set()  # ranks on nodes that stop
        self._call: _Call | None = None
        self._is_over = False  # the gang has failed, or drains

    @property
    def _others(self) -> range:
        return range(1, len(self._gang.ranks))

    def listen(self) -> None:
        """Accept the other ranks. Raises LoadError."""
        try:
            server = connection.listen(self._gang)
        except OSError as error:
            where = f"ports {self._gang.port} and {self._gang.master_port} of node {self._gang.ranks[0].node}"
            raise LoadError(f"rank 0 needs the {where}: {error.strerror}") from error
        os.register_at_fork(after_in_child=lambda: self._close_in_child(server))
        threading.Thread(target=self._accept, args=(server,), name="gpufn-gang", daemon=True).start()
        left_s = self._start_by - time.time()
        wait_s = max(left_s - _NAMED_BEFORE_S, left_s / 2)
        self._after(wait_s, self._check_joined, wait_s)

    def wait_until_ready(self) -> None:
        """Wait until all ranks have loaded the code. If one fails, `on_gang_failed` ends this process."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) == len(self._others))

    def begin(self, attempt: Attempt, body: bytes | memoryview) -> None:
        """Send a call to the other ranks, before it runs here. Raises PayloadTooLarge."""
        run = msgspec.structs.replace(
            attempt.run, stream=True, credits=_UNLIMITED, shared_body="", takes_shared_body=False, delivery=""
        )  # as a stream, because the other ranks then drop the items of a generator one by one
        try:
            packed = frames.encode(run, bytes(body))
        except PayloadTooLarge:
            raise PayloadTooLarge(
                f"the arguments have {len(body):,} bytes, and a call on several nodes has at most "
                f"{format_bytes(MESSAGE_BYTES)}: pass a path or an address that each rank can read"
            ) from None
        call = _Call(attempt, self._checkpoint(attempt))
        with self._changed:
            self._call = call
        self._send_all(packed)
        if attempt.cancel_requested:  # before the other ranks knew the call
            self.cancel(attempt.run.attempt)

    def join(self, attempt: Attempt, end: End) -> End:
        """Wait until the call has ended on all ranks. Return the end of the first rank that did not succeed, or else of
        rank 0."""
        with self._changed:
            call = self._call
            if call is None or call.attempt is not attempt:
                return end  # it was rejected before it began
            if end[0] is not _SUCCEEDED:
                self._after(_grace_s(end), self._check_ended, call, end)
            self._changed.wait_for(lambda: len(call.ends) == len(self._others))
            self._call = None
        ends = [end, *(call.ends[rank] for rank in self._others)]
        return next((each for each in ends if each[0] is not _SUCCEEDED), end)

    def cancel(self, attempt: int) -> None:
        self._send_all(frames.encode(frames.Cancel(attempt)))

    def drain(self) -> None:
        self._is_over = True
        self._send_all(frames.encode(frames.Drain()))

    def _close_in_child(self, server: socket.socket) -> None:
        """In a child that user code forked: the other ranks must detect the end of this process, not of the child."""
        for end in (server, *self._peers.values()):
            end.close()

    # --- threads of the gang ------------------------------------------------------------------------------------------

    def _accept(self, server: socket.socket) -> None:
        """Accept connections until all ranks have joined."""
        with server:
            while len(self._peers) < len(self._others):
                try:
                    peer, _ = server.accept()
                    self._add_stranger(peer)
                    serve = exit_on_failure(functools.partial(self._serve, peer, server))
                    threading.Thread(target=serve, name="gpufn-rank", daemon=True).start()
                except (OSError, RuntimeError):  # no descriptors or threads: the rank connects again
                    time.sleep(_ACCEPT_RETRY_S)

    def _add_stranger(self, peer: socket.socket) -> None:
        """Add a connection. Above the limit, disconnect the oldest: anyone can connect, and take descriptors."""
        with self._changed:
            self._strangers.append(peer)
            if len(self._strangers) > 2 * len(self._gang.ranks):
                with contextlib.suppress(OSError):  # it has disconnected itself
                    self._strangers.popleft().shutdown(socket.SHUT_RDWR)

    def _remove_stranger(self, peer: socket.socket) -> None:
        with self._changed, contextlib.suppress(ValueError):  # above the limit
            self._strangers.remove(peer)

    def _serve(self, peer: socket.socket, server: socket.socket) -> None:
        rank, error = 0, None
        try:
            try:
                connection.accept(self._gang, peer)
            finally:
                self._remove_stranger(peer)
            reader: FrameReader[WorkerFrame] = FrameReader(WorkerFrame)
            while data := peer.recv(_READ_BYTES):
                for frame, body in reader.feed(data):
                    if isinstance(frame, frames.Hello):
                        rank = self._join_gang(frame, peer, server)
                    elif rank:
                        self._handle(rank, frame, body)
        except (OSError, ProtocolMismatch) as caught:
            error = caught
        with contextlib.suppress(OSError):
            peer.close()
        if rank:
            if len(self._ready) < len(self._others):
                time.sleep(_EXIT_REPORTED_S)
            with self._sending:  # the kernel reports a lost node once: here, or to the thread that sends
                error = error or self._failed_sends.get(rank)
            self._fail(_lost(loss_of(self._gang.describe(rank), error, is_stopping=rank in self._draining)))

    def _join_gang(self, hello: frames.Hello, peer: socket.socket, server: socket.socket) -> int:
        rank = next((rank for rank in self._others if self._gang.ranks[rank].worker == hello.worker), 0)
        with self._changed:
            if hello.protocol != PROTOCOL or not rank or rank in self._peers:
                raise ProtocolMismatch(f"{hello.worker} is no rank of this gang, or has joined already")
            self._peers[rank] = peer
            if len(self._peers) == len(self._others):
                with contextlib.suppress(OSError):
                    server.shutdown(socket.SHUT_RD)  # `_accept` ends
        return rank

    def _handle(self, rank: int, frame: WorkerFrame, body: bytes) -> None:
        match frame:
            case frames.Ready():
                with self._changed:
                    self._ready.add(rank)
                    self._changed.notify_all()
            case frames.StartFailed():
                self._fail((OutcomeKind.LOST, self._named(rank, frame.error)))
            case frames.Result():
                self._on_result(rank, frame)
            case frames.Log():
                self._link.send(frames.Log(frame.attempt, frame.stream), b"[rank %d] %b" % (rank, body))
            case frames.Call():
                self._restore(rank, frame)
            case frames.Draining():
                self._draining.add(rank)
                self._hooks.on_rank_draining()
            case _:
                pass  # the caller receives the items and the progress of rank 0

    def _on_result(self, rank: int, result: frames.Result) -> None:
        with self._changed:
            call = self._call
            if call is None or call.attempt.run.attempt != result.attempt:
                return
            end = result.kind, None if result.error is None else self._named(rank, result.error)
            call.ends[rank] = end
            self._changed.notify_all()
        if result.kind is not _SUCCEEDED:
            self._after(_grace_s(end), self._check_ended, call, end)

    def _checkpoint(self, attempt: Attempt) -> _Checkpoint:
        """Return the checkpoint from which all ranks go on, read once: rank 0 may soon store the next one."""
        if attempt.run.number == 1:
            return None, "", b""
        try:
            return None, *self._hooks.restore(attempt)
        except GpufnError as error:
            return error.info(), "", b""

    def _restore(self, rank: int, request: frames.Call) -> None:
        call = self._call
        refused = InvalidInput("a rank above 0 can only restore the checkpoint of its call").info()
        answer: _Checkpoint = (refused, "", b"")
        if call is not None and request.verb == frames.Verb.RESTORE:
            answer = call.checkpoint
        error, content_type, body = answer
        kind = _SUCCEEDED if error is None else OutcomeKind.RAISED
        self._send(rank, frames.encode(frames.Answer(request.call, kind, error, content_type), body))

    # --- failures -----------------------------------------------------------------------------------------------------

    def _check_joined(self, waited_s: float) -> None:
        """Fail if a rank has not connected: its node still prepares it, or refuses the connection. A rank that gets no
        answer ends earlier (`connection.reaches`)."""
        late = next((rank for rank in self._others if rank not in self._peers), None)
        if late is not None:
            text = (
                f"{self._gang.describe(late)} has not started within {waited_s:.0f} s of {self._gang.describe(0)}: its "
                "node may still fetch weights or the bundle (set a longer startup_timeout), or cannot connect to "
                f"{self._gang.address}:{self._gang.port} (GPUFN_NODE_ADDRESS)"
            )
            self._fail(_lost(WorkerLost(text)))

    def _check_ended(self, call: _Call, end: End) -> None:
        """Fail if the call still runs on some rank."""
        if self._call is call:
            self._fail(end)

    def _fail(self, end: End) -> None:
        with self._changed:
            if self._is_over:
                return
            self._is_over = True
            attempt = self._call.attempt if self._call is not None else None
        self._hooks.on_gang_failed(attempt, end)

    def _named(self, rank: int, error: ErrorInfo) -> ErrorInfo:
        return msgspec.structs.replace(error, message=f"{self._gang.describe(rank)}: {error.message}")

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send_all(self, packed: bytes) -> None:
        for rank in self._others:
            self._send(rank, packed)

    def _send(self, rank: int, packed: bytes) -> None:
        """Send encoded frames. A broken connection is no error here: its reader detects it."""
        with self._sending:
            try:
                if (peer := self._peers.get(rank)) is not None:
                    peer.sendall(packed)
            except OSError as error:
                self._failed_sends.setdefault(rank, error)

    def _after(self, seconds: float, check: Callable[..., None], *args: object) -> None:
        timer = threading.Timer(seconds, check, args)
        timer.daemon = True
        timer.start()


def loss_of(rank: str, error: Exception | None, *, is_stopping: bool) -> GpufnError:
    """Return why a connection to a rank ended. A lost node is a fault of the platform: the call runs again and uses up
    no retry, as for a worker on one node. `is_stopping`: the rank's node stops.

    >>> loss_of("rank 1 on b", None, is_stopping=False)
    WorkerLost('rank 1 on b ended, and with it its gang')
    """
    if isinstance(error, OSError) and error.errno in _NODE_IS_LOST:
        return PlatformStopping(f"{rank} does not respond: its node is lost, and with it the gang ({error.strerror})")
    if is_stopping:
        return PlatformStopping(f"{rank} ended because its node stops, and with it its gang")
    return WorkerLost(f"{rank} ended, and with it its gang{'' if error is None else f' ({error})'}")


def _grace_s(end: End) -> float:
    """Return how long the other ranks may take to end."""
    return CANCELLED_GRACE_S if end[0] is OutcomeKind.CANCELLED else RAISED_GRACE_S


def _lost(error: GpufnError) -> End:
    return OutcomeKind.LOST, error.info()
