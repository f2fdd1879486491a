"""Maps that the platform does not store, for workers, `gpufn.testing` and short maps.

Each item is a separate call. Results may come before their turn, so an item that is retried delays only items that
follow it by more than the window.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

from gpufn.call.cancellable_wait import CancelScope
from gpufn.call.threads import Outcome, capture
from gpufn.declare.hints.argument_checks import unpack_arguments

T = TypeVar("T")

_WINDOW: Final = 256  # the default: items ahead of the results that were read, so results that are kept
AT_A_TIME: Final = 32  # calls at a time, unless a window is given


def results(
    call: Callable[..., T],
    arguments: Iterable[Iterable[Any]],
    *,
    name: str,
    window: int | None,
    ordered: bool,
    return_exceptions: bool,
) -> Iterator[T | BaseException]:
    """Yield the result of `call` for each tuple of arguments. The calls run in threads. A `window` is the number of
    items ahead of the results that were read, and of calls at a time."""
    from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait  # noqa: PLC0415

    pending: deque[Future[Outcome[T]]] = deque()
    scope = CancelScope()
    run: Callable[..., Outcome[T]] = scope.run
    ahead = window or _WINDOW
    pool = ThreadPoolExecutor(window or AT_A_TIME, thread_name_prefix=f"gpufn-map-{name}")

    def next_result() -> T | BaseException:
        if not ordered:
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            pending.remove(first := next(iter(done)))
            pending.appendleft(first)
        return _value(pending.popleft().result(), return_exceptions)

    try:
        for args in arguments:
            pending.append(pool.submit(contextvars.copy_context().run, run, capture, call, *unpack_arguments(args)))
            while pending and (len(pending) >= ahead or _has_result(pending, ordered)):
                yield next_result()
        while pending:
            yield next_result()
    except KeyboardInterrupt:
        scope.cancel()  # Python waits for the threads of the pool at exit
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


async def results_async(
    call: Callable[..., Awaitable[T]],
    arguments: Iterable[Iterable[Any]] | AsyncIterable[Iterable[Any]],
    *,
    window: int | None,
    ordered: bool,
    return_exceptions: bool,
) -> AsyncIterator[T | BaseException]:
    """Like `results`. The calls run in tasks."""
    import asyncio  # noqa: PLC0415

    pending: deque[asyncio.Task[Outcome[T]]] = deque()
    ahead = window or _WINDOW
    slots = asyncio.Semaphore(window or AT_A_TIME)

    async def run(args: Iterable[Any]) -> Outcome[T]:
        async with slots:
            return await _capture(call(*args))

    async def next_result() -> T | BaseException:
        if not ordered:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            pending.remove(first := next(iter(done)))
            pending.appendleft(first)
        return _value(await pending.popleft(), return_exceptions)

    try:
        async for args in _iterate(arguments):
            pending.append(asyncio.ensure_future(run(unpack_arguments(args))))
            while pending and (len(pending) >= ahead or _has_result(pending, ordered)):
                yield await next_result()
        while pending:
            yield await next_result()
    finally:
        for task in pending:
            task.cancel()


async def _iterate(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def _has_result(pending: deque[Any], ordered: bool) -> bool:
    return bool(pending[0].done()) if ordered else any(call.done() for call in pending)


def _value(outcome: Outcome[T], return_exceptions: bool) -> T | BaseException:
    if return_exceptions and isinstance(outcome.error, Exception):
        return outcome.error
    return outcome.get()


async def _capture(awaitable: Awaitable[T]) -> Outcome[T]:
    try:
        return Outcome(await awaitable)
    except Exception as error:
        return Outcome(error=error)
