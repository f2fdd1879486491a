"""A map where the platform does not keep one, inside a worker or in `gpufn.testing`: each item is a call by itself, and
at most `window` are under way."""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

from gpufn.call.cancellable_wait import Wait
from gpufn.call.threads import Caught, caught
from gpufn.declare.argument_checks import unpack_arguments

T = TypeVar("T")

WINDOW = 32


def results(
    call: Callable[..., T],
    arguments: Iterable[Iterable[Any]],
    *,
    name: str,
    window: int,
    ordered: bool,
    return_exceptions: bool,
) -> Iterator[T | BaseException]:
    """What `call` returns for each tuple of arguments, from threads of its own."""
    from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait  # noqa: PLC0415

    pending: deque[Future[Caught[T]]] = deque()
    left = Wait()
    run: Callable[..., Caught[T]] = left.run
    pool = ThreadPoolExecutor(window, thread_name_prefix=f"gpufn-map-{name}")

    def next_one() -> T | BaseException:
        if not ordered:
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            pending.remove(first := next(iter(done)))
            pending.appendleft(first)
        return _value(pending.popleft().result(), return_exceptions)

    try:
        for args in arguments:
            pending.append(pool.submit(contextvars.copy_context().run, run, caught, call, *unpack_arguments(args)))
            while pending and (len(pending) >= window or _has_one(pending, ordered)):
                yield next_one()
        while pending:
            yield next_one()
    except KeyboardInterrupt:
        left.leave()  # Python waits for the pool's threads when it ends
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


async def results_async(
    call: Callable[..., Awaitable[T]],
    arguments: Iterable[Iterable[Any]] | AsyncIterable[Iterable[Any]],
    *,
    window: int,
    ordered: bool,
    return_exceptions: bool,
) -> AsyncIterator[T | BaseException]:
    """As `results`, in tasks."""
    import asyncio  # noqa: PLC0415

    pending: deque[asyncio.Task[Caught[T]]] = deque()

    async def next_one() -> T | BaseException:
        if not ordered:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            pending.remove(first := next(iter(done)))
            pending.appendleft(first)
        return _value(await pending.popleft(), return_exceptions)

    try:
        async for args in each(arguments):
            pending.append(asyncio.ensure_future(_caught(call(*unpack_arguments(args)))))
            while pending and (len(pending) >= window or _has_one(pending, ordered)):
                yield await next_one()
        while pending:
            yield await next_one()
    finally:
        for task in pending:
            task.cancel()


async def each(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def _has_one(pending: deque[Any], ordered: bool) -> bool:
    return bool(pending[0].done()) if ordered else any(each.done() for each in pending)


def _value(ended: Caught[T], return_exceptions: bool) -> T | BaseException:
    if return_exceptions and isinstance(ended.error, Exception):
        return ended.error
    return ended.get()


async def _caught(awaitable: Awaitable[T]) -> Caught[T]:
    try:
        return Caught(await awaitable)
    except Exception as error:
        return Caught(error=error)
