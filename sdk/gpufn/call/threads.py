"""Threads for blocking calls in asyncio, and for coroutines where an event loop already runs."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar, cast

T = TypeVar("T")

_AIO_THREADS = 128


class Outcome(NamedTuple, Generic[T]):
    """The outcome of a call in a thread. Raising its error in the caller shows no frame of the thread pool."""

    value: T | None = None
    error: BaseException | None = None

    def get(self) -> T:
        if self.error is not None:
            raise self.error
        return cast("T", self.value)


def capture(function: Callable[..., T], *args: Any) -> Outcome[T]:
    """Call `function` and return its outcome instead of raising its error."""
    try:
        return Outcome(function(*args))
    except BaseException as error:
        return Outcome(error=error)


class _ThreadPool:
    """A pool that starts a thread only if all its threads are busy, up to `max_threads`.

    The threads are daemons: a call that is no longer awaited continues, and must not keep the process alive.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._count = 0
        self._unfinished = 0
        self._lock = threading.Lock()
        self._work: SimpleQueue[tuple[Callable[[], Any], Callable[[Outcome[Any]], None]]] = SimpleQueue()

    def run(self, work: Callable[[], T], callback: Callable[[Outcome[T]], None]) -> None:
        """Run `work` in a thread, then call `callback` there. `callback` must not block.

        Raises RuntimeError if no thread can be started.
        """
        with self._lock:
            if self._count < min(self._unfinished + 1, self._max_threads):
                threading.Thread(target=self._run_thread, name=f"gpufn-aio-{self._count + 1}", daemon=True).start()
                self._count += 1
            self._unfinished += 1
        self._work.put((work, callback))

    def _run_thread(self) -> None:
        while True:
            work, callback = self._work.get()
            outcome = capture(work)
            with self._lock:
                self._unfinished -= 1  # before the callback, which may submit more work
            callback(outcome)
            del work, callback, outcome


@functools.cache
def _pool() -> _ThreadPool:
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked child has none of the threads
    return _ThreadPool(_AIO_THREADS)


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call `function` in a thread, with this task's context, and await its result."""
    import asyncio  # noqa: PLC0415

    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Outcome[T]] = loop.create_future()

    def set_result(outcome: Outcome[T]) -> None:
        if not future.done():
            future.set_result(outcome)

    def callback(outcome: Outcome[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(set_result, outcome)

    _pool().run(functools.partial(context.run, function, *args), callback)
    return (await future).get()


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result, even if an event loop already runs in this thread."""
    import asyncio  # noqa: PLC0415

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    outcome: SimpleQueue[Outcome[T]] = SimpleQueue()
    context = contextvars.copy_context()
    _pool().run(functools.partial(context.run, asyncio.run, coroutine), outcome.put)
    return outcome.get().get()
