"""The worker's connection to its runner, a unix socket, and the state to send again after a reconnect. In a gang, the
ranks above 0 have rank 0 for a runner, over TCP (`gang.connection`).

All sends are blocking and under one lock, so that output waits for a slow runner instead of filling memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from gpufn_core.protocol import frames
from gpufn_core.protocol.codec import PROTOCOL
from gpufn_core.protocol.frames import FrameReader, Hello, Ready, RunnerFrame, Unfinished
from gpufn_runtime.worker.process import exit_like_script

_RETRY_S = 0.005  # connecting to a unix socket is cheap
_SLOWEST_RETRY_S = 0.2
_READ_BYTES = 1 << 18
# The main thread runs signal handlers only between two bytecodes: a signal that arrives just before a blocking call
# does not interrupt it. So no blocking call of the main thread is longer than this.
LONGEST_SLEEP_S = 2
_RECEIVE_TIMEOUT = struct.pack("ll", LONGEST_SLEEP_S, 0)  # a timeval; a poll would cost a system call per receive

Leftovers = tuple[int, tuple[Unfinished, ...]]  # of earlier connections: running attempts; attempts that can be adopted


Dial = Callable[[], socket.socket]  # connects once; raises OSError


def unix_dialer(path: str) -> Dial:
    def dial() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            raise
        return connection

    return dial


class Link:
    """`number` counts the connections: frames of an older connection are no longer sent.

    `frames` have arrived and are not processed yet.
    """

    def __init__(self, dial: Dial, worker: str) -> None:
        self.number = 0
        self.frames: deque[tuple[RunnerFrame, bytes]] = deque()
        self._reader: FrameReader[RunnerFrame] = FrameReader(RunnerFrame)
        self._dial = dial
        self._worker = worker
        self._lock = threading.RLock()
        self._sending = False
        self._unsent: deque[bytes] = deque()
        self._socket: socket.socket | None = None
        self._ready: Ready | None = None
        self._was_ready = False
        self.is_forked_child = False  # this process is a child that user code forked
        self.has_peer = threading.Event()  # requests wait for it
        os.register_at_fork(after_in_child=self._forget)

    def connect(self, within_s: float, leftovers: Callable[[], Leftovers] = lambda: (0, ())) -> bool:
        """Connect to the runner, which may start listening later, and send Hello. False on timeout.

        `leftovers()` describes earlier connections: the number of running attempts, and those to adopt.
        """
        deadline = time.monotonic() + within_s
        wait_s = _RETRY_S
        while True:
            try:
                connection = self._dial()
            except OSError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(wait_s)
                wait_s = min(wait_s * 1.5, _SLOWEST_RETRY_S)
                continue
            running, unfinished = leftovers()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _RECEIVE_TIMEOUT)
            with self._lock:
                self._socket = connection
                self._reader = FrameReader(RunnerFrame)
                self.frames.clear()
                self._unsent.clear()
                self.number += 1
                greeting = frames.encode(Hello(PROTOCOL, self._worker, self._was_ready, running, unfinished))
                if self._ready is not None:
                    greeting += frames.encode(self._ready)
                self.send_packed(greeting)  # before any other frame
            return True

    def announce(self, ready: Ready) -> None:
        """Send Ready, or parked: now and on every later connection."""
        with self._lock:
            self._ready = ready
            self._was_ready = True
        self.send(ready)

    def withdraw_ready(self) -> None:
        """Stop announcing Ready on new connections until the next `announce`."""
        with self._lock:
            self._ready = None

    def send(self, frame: msgspec.Struct, body: bytes = b"", *, link: int | None = None) -> None:
        """Send a frame, unless connection `link` is outdated. A broken connection is no error: `receive` detects it."""
        self.send_packed(frames.encode(frame, body), link=link)

    def send_packed(self, data: bytes, *, link: int | None = None) -> bool:
        """Send encoded frames. False if the runner certainly did not receive them."""
        with self._lock:
            if self._socket is None or (link is not None and link != self.number):
                return False
            self._unsent.append(data)
            # A signal handler or __del__ of user code can get here in the middle of a send of the same thread: its
            # frames are sent after that frame.
            while self._unsent and not self._sending:
                self._sending = True
                try:
                    self._socket.sendall(self._unsent.popleft())
                except OSError:
                    self._unsent.clear()  # the runner has disconnected; `receive` reports it
                    return False
                finally:
                    self._sending = False
        return True

    def receive(self, wait_s: float | None = None) -> bool:
        """Wait for frames, for a limited time or at most `wait_s`, and add them to `frames`. False if the runner
        disconnected.

        Only one thread at a time. Raises ProtocolMismatch if the runner uses another protocol.
        """
        connection = self._socket
        if connection is None:
            return False
        if wait_s is not None:
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            if not poll.poll(wait_s * 1000):
                return True
        try:
            data = connection.recv(_READ_BYTES)
        except BlockingIOError:  # nothing arrived for LONGEST_SLEEP_S
            return True
        except OSError:
            data = b""
        self.frames.extend(self._reader.feed(data))
        return bool(data)

    def stop_receiving(self) -> None:
        """Make `receive` return False, in any thread. Safe in a signal handler."""
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        with self._lock:
            connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def exit_if_forked(self, error: BaseException | None = None) -> None:
        """Exit if this is a child that user code forked, with `error` if the code raised: queued calls belong to the
        parent. Does nothing in the worker itself."""
        if self.is_forked_child:
            exit_like_script(error)

    def _forget(self) -> None:
        """In a child that user code forked: it is not a worker and must not keep the connection open."""
        self.is_forked_child = True
        self._lock = threading.RLock()
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
