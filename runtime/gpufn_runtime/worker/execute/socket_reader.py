"""Who reads the runner's socket.

The reader thread does, and hands each call to a user thread: that costs two switches between threads, which is more
than a short call takes. So while calls are short it lends the socket to the user thread that runs them: read, run,
answer, read. The reader thread looks on, and takes the socket back when a call lasts: then Cancel, Credit and the
answers of nested calls must be heard while it runs, and other user threads must get theirs.

Measured: docs/decisions/0002.
"""

from __future__ import annotations

import threading
import time

LONG_CALL_S = 0.002
_QUIET_LOOKS = 50  # with nothing to see before the reader sleeps until a call begins


class Loan:
    """The lender's side is the reader thread's. A borrower is one user thread; it shows the number of its loan, since
    by the time that it looks the socket may have been taken back and lent to another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._is_out = False
        self._busy_since = 0.0  # 0: the borrower waits for the next frame
        self._returned = threading.Event()
        self._look = threading.Event()
        self._error: Exception | None = None

    # --- the borrower -------------------------------------------------------------------------------------------------

    def begin_call(self) -> None:
        self._busy_since = time.monotonic()
        if not self._look.is_set():
            self._look.set()

    def is_mine(self, number: int) -> bool:
        """No call runs: the borrower is about to read, if the socket is still its own."""
        with self._lock:
            if not self._is_out or number != self._number:
                return False
            self._busy_since = 0.0
            return True

    def give_back(self, error: Exception | None = None) -> None:
        """`error` is raised where the lender waits."""
        with self._lock:
            self._is_out = False
            self._error = error
        self._returned.set()
        self._look.set()

    # --- the lender ---------------------------------------------------------------------------------------------------

    @property
    def is_out(self) -> bool:
        return self._is_out

    def lend(self) -> int:
        """The number of the loan. Until the borrower comes, it counts as busy."""
        self._returned.clear()
        with self._lock:
            self._number += 1
            self._is_out = True
            self._busy_since = time.monotonic()
        self._look.set()
        return self._number

    def wait(self) -> None:
        """Return when the socket is the lender's again: given back, or taken back from a call that lasts."""
        quiet = 0
        while not self._returned.wait(LONG_CALL_S):
            with self._lock:
                since = self._busy_since
                if since and time.monotonic() - since >= LONG_CALL_S:
                    self._is_out = False
                    return
            quiet = 0 if since else quiet + 1
            if quiet >= _QUIET_LOOKS:
                self._look.clear()
                if not self._busy_since and not self._returned.is_set():  # else it counts on us to look
                    self._look.wait()
                quiet = 0
        error, self._error = self._error, None
        if error is not None:
            raise error
