"""Waits that another thread can cancel, so that a call ends when its asyncio task is cancelled.

the caller          scope = CancelScope(); scope.run(f, x) in a thread; scope.cancel() in another
code that waits     with wake_on_cancel(wake): ...
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_current_scope: contextvars.ContextVar[CancelScope | None] = contextvars.ContextVar("gpufn_cancel_scope", default=None)


class CancelScope:
    """The waits of one call, which may wait several times and in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakes: set[Callable[[], None]] = set()
        self._is_cancelled = False

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function` in this scope."""
        token = _current_scope.set(self)
        try:
            return function(*args)
        finally:
            _current_scope.reset(token)

    def cancel(self) -> None:
        """Wake the current waits, and every later wait as it begins."""
        with self._lock:
            self._is_cancelled = True
            for wake in self._wakes:
                wake()

    @contextlib.contextmanager
    def register(self, wake: Callable[[], None]) -> Iterator[None]:
        with self._lock:
            if self._is_cancelled:
                wake()
            self._wakes.add(wake)
        try:
            yield
        finally:
            with self._lock:
                self._wakes.discard(wake)


def wake_on_cancel(wake: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Call `wake`, which ends the wait in this block, when the current scope is cancelled.

    `wake` is called in any thread, possibly before the wait has begun, but never after the block. It must not block.
    """
    scope = _current_scope.get()
    return contextlib.nullcontext() if scope is None else scope.register(wake)
