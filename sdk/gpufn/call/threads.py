"""Work in threads: for asyncio, which must not wait, and for coroutines where no loop may run."""

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


class Caught(NamedTuple, Generic[T]):
    """How a call in a thread ended: raised again where it is awaited, it shows no frame of the thread pool."""

    value: T | None = None
    error: BaseException | None = None

    def get(self) -> T:
        if self.error is not None:
            raise self.error
        return cast("T", self.value)


def caught(function: Callable[..., T], *args: Any) -> Caught[T]:
    try:
        return Caught(function(*args))
    except BaseException as error:
        return Caught(error=error)


class _Threads:
    """As many as work is done at a time, at most. None keeps the process from ending: a call goes on though nobody
    awaits it any more."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._unfinished = 0
        self._lock = threading.Lock()
        self._work: SimpleQueue[tuple[Callable[[], Any], Callable[[Caught[Any]], None]]] = SimpleQueue()

    def run(self, work: Callable[[], T], tell: Callable[[Caught[T]], None]) -> None:
        """`tell` is called in the thread, and waits for nothing. Raises RuntimeError when no thread can be had."""
        with self._lock:
            if self._count < min(self._unfinished + 1, self._most):
                threading.Thread(target=self._serve, name=f"gpufn-aio-{self._count + 1}", daemon=True).start()
                self._count += 1
            self._unfinished += 1
        self._work.put((work, tell))

    def _serve(self) -> None:
        while True:
            work, tell = self._work.get()
            ended = caught(work)
            with self._lock:
                self._unfinished -= 1  # before whoever is told has more for us
            tell(ended)
            del work, tell, ended


@functools.cache
def _threads() -> _Threads:
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has none of them
    return _Threads(_AIO_THREADS)


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    import asyncio  # noqa: PLC0415

    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Caught[T]] = loop.create_future()

    def take(ended: Caught[T]) -> None:
        if not future.done():
            future.set_result(ended)

    def tell(ended: Caught[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(take, ended)

    _threads().run(functools.partial(context.run, function, *args), tell)
    return (await future).get()


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Its result, also when this thread runs a loop already."""
    import asyncio  # noqa: PLC0415

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    ended: SimpleQueue[Caught[T]] = SimpleQueue()
    context = contextvars.copy_context()
    _threads().run(functools.partial(context.run, asyncio.run, coroutine), ended.put)
    return ended.get().get()
