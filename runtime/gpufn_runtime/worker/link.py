"""The worker's one way out: its unix socket to the runner, and what to say again when the runner comes back.

Everything is sent under one lock with blocking calls, so that output waits for a slow runner instead of filling memory.
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
from gpufn_runtime.worker.process import leave_as_script

_RETRY_S = 0.005  # a unix socket costs nothing to try
_SLOWEST_RETRY_S = 0.2
_READ_BYTES = 1 << 18
# The main thread runs signal handlers only between two bytecodes: a signal that comes just as it falls asleep wakes
# nobody. So no sleep of its is longer.
LONGEST_SLEEP_S = 2
_RECEIVE_TIMEOUT = struct.pack("ll", LONGEST_SLEEP_S, 0)  # a timeval; costs no system call each time, as a poll does

Left = tuple[int, tuple[Unfinished, ...]]  # by earlier connections: attempts that run on unheard; that may be adopted


class Link:
    """`number` counts the connections made: what belongs to an older one is not sent any more.

    `frames` are those that have arrived and nobody has looked at yet.
    """

    def __init__(self, path: str, worker: str) -> None:
        self.number = 0
        self.frames: deque[tuple[RunnerFrame, bytes]] = deque()
        self._reader: FrameReader[RunnerFrame] = FrameReader(RunnerFrame)
        self._path = path
        self._worker = worker
        self._lock = threading.RLock()
        self._sending = False
        self._unsent: deque[bytes] = deque()
        self._socket: socket.socket | None = None
        self._ready: Ready | None = None
        self._was_ready = False
        self.on_quiet: Callable[[], object] = lambda: None  # nothing came for a while
        self.is_parents = False  # this process is a child that the user's code forked
        self._has_peer = threading.Event()
        os.register_at_fork(after_in_child=self._forget)

    def connect(self, within_s: float, left: Callable[[], Left] = lambda: (0, ())) -> bool:
        """Reach the runner, which may listen a moment later, and greet it. False when it does not come in time.

        `left()` is what earlier connections left: how many attempts that run on, and those that it may adopt.
        """
        give_up_at = time.monotonic() + within_s
        wait_s = _RETRY_S
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(self._path)
            except OSError:
                connection.close()
                if time.monotonic() >= give_up_at:
                    return False
                time.sleep(wait_s)
                wait_s = min(wait_s * 1.5, _SLOWEST_RETRY_S)
                continue
            running, unfinished = left()
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
                self._send(greeting)  # before anything else is said
            return True

    def peer_lost(self) -> None:
        """The runner has hung up: who asks it for something waits for the next."""
        self._has_peer.clear()

    def peer_back(self) -> None:
        self._has_peer.set()

    def wait_for_peer(self) -> None:
        self._has_peer.wait()

    def announce(self, ready: Ready) -> None:
        """Say that this worker is ready, or parked: now and on every later connection."""
        with self._lock:
            self._ready = ready
            self._was_ready = True
        self._send(frames.encode(ready))

    def take_back(self) -> None:
        """It is what it announced no more, until it announces itself again."""
        with self._lock:
            self._ready = None

    def send(self, frame: msgspec.Struct, body: bytes = b"", *, link: int | None = None) -> None:
        """Send, if connection `link` is still the one. A broken one is not an error here: the reader sees it too."""
        self._send(frames.encode(frame, body), link)

    def send_packed(self, data: bytes, *, link: int | None = None) -> bool:
        """Send frames that are encoded already. False when the runner is known not to have got them."""
        return self._send(data, link)

    def _send(self, data: bytes, link: int | None = None) -> bool:
        with self._lock:
            if self._socket is None or (link is not None and link != self.number):
                return False
            self._unsent.append(data)
            # A signal handler or a __del__ of the user's can get here in the middle of a send, in the same thread: its
            # frames go out after that one.
            while self._unsent and not self._sending:
                self._sending = True
                try:
                    self._socket.sendall(self._unsent.popleft())
                except OSError:
                    self._unsent.clear()  # the runner is gone, and `receive` says so
                    return False
                finally:
                    self._sending = False
        return True

    def receive(self, wait_s: float | None = None) -> bool:
        """Wait for frames, a while or at most `wait_s`, and add them to `frames`. False when the runner has hung up.

        One thread at a time. ProtocolMismatch when it does not speak our protocol.
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
        except BlockingIOError:  # nothing came for LONGEST_SLEEP_S
            self.on_quiet()
            return True
        except OSError:
            data = b""
        self.frames.extend(self._reader.feed(data))
        return bool(data)

    def stop_receiving(self) -> None:
        """Let `receive` return False, in whichever thread it waits. Safe in a signal handler."""
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        with self._lock:
            connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def leave_if_parents(self, error: BaseException | None = None) -> None:
        """A child that the user's code forked ends with what it ran, and with `error` if that raised: what waits in the
        worker is its parent's. In the worker itself, nothing."""
        if self.is_parents:
            leave_as_script(error)

    def _forget(self) -> None:
        """In a child that the user's code forked: it is no worker, and must not keep the connection open."""
        self.is_parents = True
        self._lock = threading.RLock()
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
