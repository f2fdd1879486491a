"""Ownership of the runner's socket.

Normally the reader thread reads it and passes each call to a user thread: that costs two thread switches, which take
longer than a short call. So while calls are short, it lends the socket to the user thread that runs them: read, run,
respond, read. The reader thread watches, and takes the socket back when a call takes long. Cancel, Credit and the
responses to nested calls must be received while it runs, and other user threads must get their calls.

Measured: docs/decisions/0002.
"""

from __future__ import annotations

import threading
import time

LONG_CALL_S = 0.002
_QUIET_CHECKS = 50  # checks without activity before the reader thread sleeps until the next call


class SocketHandoff:
    """Temporary ownership of the socket by a user thread; the reader thread owns it otherwise.

    The user thread passes the number of its handoff, because the reader may have handed the socket to another thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._is_out = False
        self._busy_since = 0.0  # 0: the user thread waits for the next frame
        self._returned = threading.Event()
        self._wake = threading.Event()
        self._error: Exception | None = None

    # --- the user thread ----------------------------------------------------------------------------------------------

    def begin_call(self) -> None:
        self._busy_since = time.monotonic()
        if not self._wake.is_set():
            self._wake.set()

    def is_mine(self, number: int) -> bool:
        """Return whether the user thread still owns the socket. Called when no call runs and it is about to read."""
        with self._lock:
            if not self._is_out or number != self._number:
                return False
            self._busy_since = 0.0
            return True

    def give_back(self, error: Exception | None = None) -> None:
        """Return the socket. `error` is raised in the waiting reader thread."""
        with self._lock:
            self._is_out = False
            self._error = error
        self._returned.set()
        self._wake.set()

    # --- the reader thread --------------------------------------------------------------------------------------------

    @property
    def is_handed_off(self) -> bool:
        return self._is_out

    def hand_off(self) -> int:
        """Hand the socket to a user thread, which counts as busy until it starts. Return the number of the handoff."""
        self._returned.clear()
        with self._lock:
            self._number += 1
            self._is_out = True
            self._busy_since = time.monotonic()
        self._wake.set()
        return self._number

    def wait(self) -> None:
        """Return when the reader thread owns the socket again: given back, or taken back during a long call."""
        quiet = 0
        while not self._returned.wait(LONG_CALL_S):
            with self._lock:
                since = self._busy_since
                if since and time.monotonic() - since >= LONG_CALL_S:
                    self._is_out = False
                    return
            quiet = 0 if since else quiet + 1
            if quiet >= _QUIET_CHECKS:
                self._wake.clear()
                if not self._busy_since and not self._returned.is_set():  # a call that has begun needs checks
                    self._wake.wait()
                quiet = 0
        error, self._error = self._error, None
        if error is not None:
            raise error
