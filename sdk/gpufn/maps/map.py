"""`Function.map` and `Function.starmap`: one function over many items.

    Map            what they return: an iterator of the results, with the id under which the platform keeps them
    AsyncMap       the same for asyncio

Where the platform keeps maps, the items become calls that are stored in chunks and their ends are one stream
(`_kept_map`). A process that has gone is followed by one that knows the id. Elsewhere, inside a worker or in
`gpufn.testing`, and of a few items, each is a call by itself (`_map_calls`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, cast

from gpufn.call import transport as _transport
from gpufn.call.result_decoding import PLAIN, ResultReader
from gpufn.call.threads import in_thread
from gpufn.call.transport_protocol import KeepsMaps, MapTarget
from gpufn.maps import local_map
from gpufn.maps.platform_map import KeptMap, MapKeywords, MapOptions
from gpufn.maps.progress_bar import Bar
from gpufn_core.errors import InvalidInput, MapNotFound
from gpufn_core.ids import new_map_id

V = TypeVar("V")

_FEW = 8  # so many calls by themselves are sooner done than a map is begun


class Map(Iterator[V]):
    """The results of a map, in the order of its items or, with `ordered=False`, as they come.

    It begins at once, and goes on when this process ends: `Map.from_id(map.id)` finds it again. `with` cancels what has
    not ended when it is left.

    >>> from gpufn import gpu_function
    >>> from gpufn.testing import run_locally
    >>> @gpu_function
    ... def square(x: int) -> int:
    ...     return x * x
    >>> with run_locally():
    ...     list(square.map(range(5)))
    [0, 1, 4, 9, 16]
    """

    def __init__(self, results: Iterator[V], kept: KeptMap | None = None) -> None:
        self._results = results
        self._kept = kept

    @classmethod
    def from_id(
        cls,
        id: str,  # noqa: A002
        *,
        after: str | None = None,
        ordered: bool = True,
        return_exceptions: bool = False,
        trust_results: bool = False,
    ) -> Map[Any]:
        """A map that was begun elsewhere, or earlier: its results from the first one on, or behind the cursor `after`.

        It ends when the map is closed: with the last item that was sent, or by `close`. With `trust_results` pickled
        results are read, which runs code that the function chose.
        """
        options = MapOptions(ordered, return_exceptions, id=id, after=after).checked()
        kept = KeptMap(_keeper(), id, options, PLAIN.trusting() if trust_results else PLAIN)
        kept.follow()
        return Map(kept.results(), kept)

    @property
    def id(self) -> str | None:
        """None of a map that the platform does not keep: one of up to 8 items, whose length is known, without an id, or
        one inside a worker."""
        return None if self._kept is None else self._kept.id

    @property
    def cursor(self) -> str | None:
        """Where this reader is: what it has given out is not given out again by `Map.from_id(id, after=cursor)`."""
        return None if self._kept is None else str(self._kept.order.cursor)

    def close(self) -> None:
        """No more items come; those that were accepted run to their ends."""
        if self._kept is not None:
            self._kept.close()
        else:
            cast("Any", self._results).close()

    def cancel(self) -> bool:
        """End what has not ended; False when all had."""
        if self._kept is None:
            self.close()
            return False
        return self._kept.cancel()

    def __next__(self) -> V:
        return next(self._results)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._kept is None or not self._kept.is_over:
            self.cancel()

    def __repr__(self) -> str:
        return f"Map({self.id!r})"


class AsyncMap(AsyncIterator[V]):
    """A Map to be used with `async for`, and its methods to await."""

    def __init__(self, results: AsyncIterator[V], kept: KeptMap | None = None) -> None:
        self._results = results
        self._kept = kept

    @property
    def id(self) -> str | None:
        """As a Map's."""
        return None if self._kept is None else self._kept.id

    @property
    def cursor(self) -> str | None:
        """As a Map's."""
        return None if self._kept is None else str(self._kept.order.cursor)

    async def close(self) -> None:
        """As a Map's."""
        if self._kept is not None:
            await in_thread(self._kept.close)
        else:
            with contextlib.suppress(RuntimeError):  # a task waits in it for the next result
                await cast("Any", self._results).aclose()

    async def cancel(self) -> bool:
        """As a Map's."""
        if self._kept is None:
            await self.close()
            return False
        return await in_thread(self._kept.cancel)

    async def __anext__(self) -> V:
        return await anext(self._results)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._kept is None or not self._kept.is_over:
            await self.cancel()


class Mapped(Protocol):
    """The remote side of a callable, as far as a map needs it."""

    @property
    def reader(self) -> ResultReader: ...

    def target(self) -> MapTarget: ...

    def encoded(self, arguments: Iterable[Any]) -> bytes:
        """One item. Raises TypeError when it does not fit the signature."""
        ...


def begin(
    mapped: Mapped,
    call: Callable[..., Any],
    arguments: Iterable[Iterable[Any]],
    total: int | None,
    keywords: MapKeywords,
) -> Map[Any]:
    """A map of `arguments`, which are `total`; `call` makes one call by itself."""
    options = MapOptions.of(keywords)
    target = mapped.target()
    kept = None
    transport = _transport.current()
    if isinstance(transport, KeepsMaps) and not _is_short(total, options):
        kept = KeptMap(transport, options.id or new_map_id(), options, mapped.reader)
        kept.begin(target, arguments, mapped.encoded, total=total)
        results = kept.results()
    else:
        results = local_map.results(call, arguments, name=target.function, **_unkept(options))
    if options.progress:
        results = _with_bar(results, target.function, total, kept)
    return Map(results, kept)


def begin_async(
    mapped: Mapped,
    call: Callable[..., Awaitable[Any]],
    arguments: Iterable[Iterable[Any]] | AsyncIterable[Iterable[Any]],
    total: int | None,
    keywords: MapKeywords,
) -> AsyncMap[Any]:
    """As `begin`, when its first result is asked for."""
    options = MapOptions.of(keywords)
    kept = None
    transport = _transport.current()
    if isinstance(transport, KeepsMaps) and not _is_short(total, options):
        kept = KeptMap(transport, options.id or new_map_id(), options, mapped.reader)
        results = _kept_async(kept, mapped, arguments, total)
    else:
        results = local_map.results_async(call, arguments, **_unkept(options))
    if options.progress:
        results = _with_bar_async(results, mapped.target().function, total, kept)
    return AsyncMap(results, kept)


async def _kept_async(
    kept: KeptMap,
    mapped: Mapped,
    arguments: Iterable[Iterable[Any]] | AsyncIterable[Iterable[Any]],
    total: int | None,
) -> AsyncIterator[Any]:
    import asyncio  # noqa: PLC0415

    offering = None
    if isinstance(arguments, AsyncIterable):
        await in_thread(kept.begin, mapped.target(), None, mapped.encoded)
        offering = asyncio.ensure_future(kept.offer(arguments, mapped.encoded))
    else:
        await in_thread(functools.partial(kept.begin, mapped.target(), arguments, mapped.encoded, total=total))
    try:
        async for result in kept.results_async():
            yield result
    finally:
        if offering is not None:
            offering.cancel()


def _is_short(total: int | None, options: MapOptions) -> bool:
    return total is not None and total <= _FEW and options.id is None


def _unkept(options: MapOptions) -> dict[str, Any]:
    if options.id is not None:
        raise InvalidInput("a map has an id where a gateway keeps it, not inside a worker or in gpufn.testing")
    return {
        "window": options.window or local_map.WINDOW,
        "ordered": options.ordered,
        "return_exceptions": options.return_exceptions,
    }


def _keeper() -> KeepsMaps:
    transport = _transport.current()
    if isinstance(transport, KeepsMaps):
        return transport
    raise MapNotFound("maps are kept where a gateway serves them, not inside a worker or in gpufn.testing")


def _with_bar(results: Iterator[V], name: str, total: int | None, kept: KeptMap | None) -> Iterator[V]:
    with Bar(name, total) as bar:
        if kept is not None:
            kept.waits.bar = bar
        for result in results:
            bar.advance()
            yield result


async def _with_bar_async(
    results: AsyncIterator[V], name: str, total: int | None, kept: KeptMap | None
) -> AsyncIterator[V]:
    with Bar(name, total) as bar:
        if kept is not None:
            kept.waits.bar = bar
        async for result in results:
            bar.advance()
            yield result
