"""Work in threads: for asyncio, which must not wait, and for coroutines where no loop may run."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

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


@functools.cache
def _threads() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

    return ThreadPoolExecutor(_AIO_THREADS, thread_name_prefix="gpufn-aio")


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    import asyncio  # noqa: PLC0415

    context = contextvars.copy_context()
    ended = await asyncio.get_running_loop().run_in_executor(_threads(), context.run, caught, function, *args)
    return ended.get()


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Its result, also when this thread runs a loop already."""
    import asyncio  # noqa: PLC0415

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    return _threads().submit(asyncio.run, coroutine).result()
