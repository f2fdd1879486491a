"""Work in threads: for asyncio, which must not wait, and for coroutines where no loop may run."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Coroutine
from queue import Empty, SimpleQueue
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
    """Of which none keeps the process from ending: a call goes on though nobody awaits it any more."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._lock = threading.Lock()
        self._idle = threading.Semaphore(0)
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def run(self, work: Callable[[], None]) -> None:
        self._work.put(work)
        if self._idle.acquire(blocking=False):
            return
        with self._lock:
            if self._count < self._most:
                self._count += 1
                threading.Thread(target=self._serve, name=f"gpufn-aio-{self._count}", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                work = self._work.get_nowait()
            except Empty:
                self._idle.release()
                work = self._work.get()
            work()
            del work


@functools.cache
def _threads() -> _Threads:
    return _Threads(_AIO_THREADS)


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    import asyncio  # noqa: PLC0415

    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Caught[T]] = loop.create_future()

    def tell(ended: Caught[T]) -> None:
        if not future.done():
            future.set_result(ended)

    def work() -> None:
        ended = context.run(caught, function, *args)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, ended)

    _threads().run(work)
    return (await future).get()


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Its result, also when this thread runs a loop already."""
    import asyncio  # noqa: PLC0415

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    ended: SimpleQueue[Caught[T]] = SimpleQueue()
    _threads().run(lambda: ended.put(caught(asyncio.run, coroutine)))
    return ended.get().get()
