"""Waits that another thread ends: nobody reads the answer of a call whose task was cancelled, so it shall not run on.

1. who may leave        wait = Wait(); wait.run(f, x) in a thread; wait.leave() in another
2. what waits in there  with woken_by(wake): ...
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_here: contextvars.ContextVar[Wait | None] = contextvars.ContextVar("gpufn_wait", default=None)


class Wait:
    """Of one call, which may wait for one thing after another, or in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakes: set[Callable[[], None]] = set()
        self._is_left = False

    def run(self, function: Callable[..., T], *args: Any) -> T:
        token = _here.set(self)
        try:
            return function(*args)
        finally:
            _here.reset(token)

    def leave(self) -> None:
        """What waits now is woken, and what would wait later does not begin to."""
        with self._lock:
            self._is_left = True
            for wake in self._wakes:
                wake()

    @contextlib.contextmanager
    def on(self, wake: Callable[[], None]) -> Iterator[None]:
        with self._lock:
            if self._is_left:
                wake()
            self._wakes.add(wake)
        try:
            yield
        finally:
            with self._lock:
                self._wakes.discard(wake)


def woken_by(wake: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """`wake` ends the wait in here. It is called from any thread, also before the wait has begun, and waits for
    nothing itself; never after."""
    wait = _here.get()
    return contextlib.nullcontext() if wait is None else wait.on(wake)
