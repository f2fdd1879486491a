"""`Function.map` and `Function.starmap`: calls of one function for many items.

    Map            the iterator of the results that they return, with the id under which the platform stores the map
    AsyncMap       the same for asyncio

If the Transport stores maps, the items are stored in chunks and their outcomes are one stream (`platform_map`). Another
process that knows the id can continue such a map. Otherwise, as in a worker or in `gpufn.testing`, each item is a
separate call (`local_map`). A map of a few items is run in this way, too.
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
from gpufn.call.transport_protocol import MapTransport, Target
from gpufn.maps import local_map
from gpufn.maps.platform_map import MapKeywords, MapOptions, PlatformMap
from gpufn.maps.progress_bar import bar_of
from gpufn.notebook.kernel import is_notebook
from gpufn_core.errors import InvalidInput, MapNotFound
from gpufn_core.ids import new_map_id

V = TypeVar("V")

_SHORT = 8  # up to this many items, single calls are faster than the start of a map


class Map(Iterator[V]):
    """The results of a map, in the order of its items, or with `ordered=False` as they come.

    A map starts at once, and continues when this process ends: `Map.from_id(map.id)` returns it again. The end of a
    `with` block cancels the items that have not ended.

    >>> from gpufn import gpu_function
    >>> from gpufn.testing import run_locally
    >>> @gpu_function
    ... def square(x: int) -> int:
    ...     return x * x
    >>> with run_locally():
    ...     list(square.map(range(5)))
    [0, 1, 4, 9, 16]
    """

    def __init__(self, results: Iterator[V], platform_map: PlatformMap | None = None) -> None:
        self._results = results
        self._platform_map = platform_map

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
        """Return a map that was started elsewhere or earlier. Its results start with the first, or `after` a cursor.

        The results end when the map is closed: by its last item, or by `close`. With `trust_results`, results may be
        pickles, which run code that the function chose.
        """
        options = MapOptions(ordered, return_exceptions, id=id, after=after).checked()
        platform_map = PlatformMap(_map_transport(), id, options, PLAIN.with_trust() if trust_results else PLAIN)
        platform_map.follow()
        return Map(platform_map.results(), platform_map)

    @property
    def id(self) -> str | None:
        """The id of the map, or None if the platform does not store it.

        The platform stores no map in a worker, and no map of up to 8 items whose length is known, unless it has an id.
        """
        return None if self._platform_map is None else self._platform_map.id

    @property
    def cursor(self) -> str | None:
        """The position of this reader. `Map.from_id(id, after=cursor)` continues after the results that it returned."""
        return None if self._platform_map is None else str(self._platform_map.order.cursor)

    def close(self) -> None:
        """Stop accepting items. Items that were already accepted still run."""
        if self._platform_map is not None:
            self._platform_map.close()
        else:
            cast("Any", self._results).close()

    def cancel(self) -> bool:
        """Cancel the items that have not ended. Returns False if all had ended."""
        if self._platform_map is None:
            self.close()
            return False
        return self._platform_map.cancel()

    def __next__(self) -> V:
        return next(self._results)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._platform_map is None or not self._platform_map.is_over:
            self.cancel()

    def __repr__(self) -> str:
        return f"Map({self.id!r})"


class AsyncMap(AsyncIterator[V]):
    """A Map for asyncio: use it with `async for`, and await its methods."""

    def __init__(self, results: AsyncIterator[V], platform_map: PlatformMap | None = None) -> None:
        self._results = results
        self._platform_map = platform_map

    @property
    def id(self) -> str | None:
        """See `Map.id`."""
        return None if self._platform_map is None else self._platform_map.id

    @property
    def cursor(self) -> str | None:
        """See `Map.cursor`."""
        return None if self._platform_map is None else str(self._platform_map.order.cursor)

    async def close(self) -> None:
        """See `Map.close`."""
        if self._platform_map is not None:
            await in_thread(self._platform_map.close)
        else:
            with contextlib.suppress(RuntimeError):  # another task is waiting in it for the next result
                await cast("Any", self._results).aclose()

    async def cancel(self) -> bool:
        """See `Map.cancel`."""
        if self._platform_map is None:
            await self.close()
            return False
        return await in_thread(self._platform_map.cancel)

    async def __anext__(self) -> V:
        return await anext(self._results)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._platform_map is None or not self._platform_map.is_over:
            await self.cancel()


class MappedFunction(Protocol):
    """The part of a Remote that a map needs."""

    @property
    def reader(self) -> ResultReader: ...

    def target(self) -> Target: ...

    def encode_item(self, arguments: Iterable[Any]) -> bytes:
        """Return one encoded item. Raises TypeError if it does not fit the signature."""
        ...


def begin(
    function: MappedFunction,
    call: Callable[..., Any],
    arguments: Iterable[Iterable[Any]],
    total: int | None,
    keywords: MapKeywords,
) -> Map[Any]:
    """Start a map of `arguments`. `total` is their number, if known. `call` makes a single call."""
    options = MapOptions.of(keywords)
    target = function.target()
    platform_map = None
    transport = _transport.current()
    if isinstance(transport, MapTransport) and not _is_short(total, options):
        platform_map = PlatformMap(transport, options.id or new_map_id(), options, function.reader)
        platform_map.begin(target, arguments, function.encode_item, total=total)
        results = platform_map.results()
    else:
        results = local_map.results(call, arguments, name=target.function, **_local_options(options))
    if _shows_progress(options):
        results = _with_bar(results, target.function, total, platform_map)
    return Map(results, platform_map)


def begin_async(
    function: MappedFunction,
    call: Callable[..., Awaitable[Any]],
    arguments: Iterable[Iterable[Any]] | AsyncIterable[Iterable[Any]],
    total: int | None,
    keywords: MapKeywords,
) -> AsyncMap[Any]:
    """Like `begin`, but the map starts when its first result is awaited."""
    options = MapOptions.of(keywords)
    platform_map = None
    transport = _transport.current()
    if isinstance(transport, MapTransport) and not _is_short(total, options):
        platform_map = PlatformMap(transport, options.id or new_map_id(), options, function.reader)
        results = _platform_results(platform_map, function, arguments, total)
    else:
        results = local_map.results_async(call, arguments, **_local_options(options))
    if _shows_progress(options):
        results = _with_bar_async(results, function.target().function, total, platform_map)
    return AsyncMap(results, platform_map)


async def _platform_results(
    platform_map: PlatformMap,
    function: MappedFunction,
    arguments: Iterable[Iterable[Any]] | AsyncIterable[Iterable[Any]],
    total: int | None,
) -> AsyncIterator[Any]:
    import asyncio  # noqa: PLC0415

    sending = None
    if isinstance(arguments, AsyncIterable):
        await in_thread(platform_map.begin, function.target(), None, function.encode_item)
        sending = asyncio.ensure_future(platform_map.offer(arguments, function.encode_item))
    else:
        await in_thread(
            functools.partial(platform_map.begin, function.target(), arguments, function.encode_item, total=total)
        )
    try:
        async for result in platform_map.results_async():
            yield result
    finally:
        if sending is not None:
            sending.cancel()


def _is_short(total: int | None, options: MapOptions) -> bool:
    return total is not None and total <= _SHORT and options.id is None


def _shows_progress(options: MapOptions) -> bool:
    return is_notebook() if options.progress is None else options.progress


def _local_options(options: MapOptions) -> dict[str, Any]:
    if options.id is not None:
        raise InvalidInput("only a map through a gateway has an id, not one inside a worker or in gpufn.testing")
    return {
        "window": options.window,
        "ordered": options.ordered,
        "return_exceptions": options.return_exceptions,
    }


def _map_transport() -> MapTransport:
    transport = _transport.current()
    if isinstance(transport, MapTransport):
        return transport
    raise MapNotFound("a map is found through a gateway only, not inside a worker or in gpufn.testing")


def _with_bar(results: Iterator[V], name: str, total: int | None, platform_map: PlatformMap | None) -> Iterator[V]:
    with bar_of(name, total) as bar:
        if platform_map is not None:
            platform_map.wait_display.bar = bar
        for result in results:
            bar.advance()
            yield result


async def _with_bar_async(
    results: AsyncIterator[V], name: str, total: int | None, platform_map: PlatformMap | None
) -> AsyncIterator[V]:
    with bar_of(name, total) as bar:
        if platform_map is not None:
            platform_map.wait_display.bar = bar
        async for result in results:
            bar.advance()
            yield result
