"""`Function.map` and `Function.starmap`: one function over many items.

    Map            what they return: an iterator of the results, with the id under which the platform keeps them
    AsyncMap       the same for asyncio
    KeptMap        one that the platform keeps: what is sent, and what is read

Where the platform keeps maps, the items become calls that are stored in chunks (`_map_items`) and their ends are one
stream (`_map_ends`). A process that has gone is followed by one that knows the id. Elsewhere, inside a worker or in
`gpufn.testing`, and of a few items, each is a call by itself (`_map_calls`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeVar, cast

from gpufn import _map_calls, _transport, media
from gpufn._answers import error_of
from gpufn._decode import decode, remote_traceback
from gpufn._map_ends import AsTheyCome, Cursor, End, Inbox, InOrder
from gpufn._map_items import Outbox
from gpufn._map_progress import Bar
from gpufn._threads import in_thread
from gpufn._transport import KeepsMaps, MapTarget
from gpufn._views import MapView
from gpufn.errors import GpufnError, InvalidInput, InvocationNotFound, MapNotFound
from gpufn.ids import is_invocation_id, item_id, new_map_id

V = TypeVar("V")

WINDOW = 10_000
_FEW = 8  # so many calls by themselves are sooner done than a map is begun
_TELL_EACH = 64  # results that are taken before the Outbox hears of it


class MapOptions(NamedTuple):
    """What `map` and `starmap` can be asked for. `window` None is as many as usual."""

    ordered: bool = True
    return_exceptions: bool = False
    window: int | None = None
    progress: bool = False
    id: str | None = None
    after: str | None = None

    def checked(self) -> Self:
        """Raises InvalidInput."""
        if self.window is not None and self.window < 1:
            raise InvalidInput(f"window is at least 1, not {self.window}")
        if self.id is not None and not is_invocation_id(self.id):
            raise InvalidInput(f"{self.id!r} is not a map's id, which has 26 letters and digits")
        if self.after and self.id is None:
            raise InvalidInput("after is a cursor in the map that id names")
        return self


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
    ) -> Map[Any]:
        """A map that was begun elsewhere, or earlier: its results from the first one on, or behind the cursor `after`.

        It ends when the map is closed: with the last item that was sent, or by `close`.
        """
        options = MapOptions(ordered, return_exceptions, id=id, after=after).checked()
        kept = KeptMap(_keeper(), id, options)
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
        if self._kept is None:
            cast("Any", self._results).close()
        elif not self._kept.is_over:
            self._kept.cancel()

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

    async def cancel(self) -> bool:
        """As a Map's."""
        return self._kept is not None and await in_thread(self._kept.cancel)

    async def __anext__(self) -> V:
        return await anext(self._results)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._kept is None:
            await cast("Any", self._results).aclose()
        elif not self._kept.is_over:
            await self.cancel()


class KeptMap:
    """A map that the platform keeps, as this process sends and reads it."""

    def __init__(self, keeper: KeepsMaps, id: str, options: MapOptions) -> None:  # noqa: A002
        after = Cursor.read(options.after or "")
        if options.ordered and options.after and after.item is None:
            raise InvalidInput("this cursor is of results as they came: give ordered=False", field="after")
        self.id = id
        self.order = InOrder(after) if options.ordered else AsTheyCome(after)
        self.is_over = False
        self._keeper = keeper
        self._options = options
        self._inbox = Inbox(lambda cursor: keeper.outcomes(id, cursor), after)
        self._outbox: Outbox | None = None
        self._target: MapTarget | None = None
        self._taken = after.item if after.item is not None else after.ended
        self._untold = 0
        weakref.finalize(self, self._inbox.stop)

    def begin(self, target: MapTarget, source: Iterable[Any] | None, encode: Callable[[Any], bytes]) -> None:
        """Send the items of `source` that were not accepted before; without one, `offer` them."""
        first = 0
        if self._options.id is not None:
            with contextlib.suppress(MapNotFound):  # nothing was accepted yet
                first, is_open = _accepted(self._keeper.map_status(self.id))
                if not is_open:
                    self.follow()
                    return
        keeper, map_id = self._keeper, self.id
        window = self._options.window or WINDOW
        self._target = target
        self._outbox = outbox = Outbox(
            lambda at, items, is_last: keeper.send_items(target, map_id, at, items, is_last=is_last),
            lambda: _accepted(keeper.map_status(map_id)),
            window=window,
            first=first,
            taken=self._taken,
        )
        weakref.finalize(self, outbox.stop)
        if first:
            self.follow()
        accepted = (lambda: None) if first else self._inbox.start
        outbox.start(source, encode, accepted=accepted, failed=self._inbox.fail)

    def follow(self) -> None:
        """Read its ends."""
        self._inbox.start()

    async def offer(self, source: AsyncIterable[Any], encode: Callable[[Any], bytes]) -> None:
        """Send what comes; in place of a source for `begin`."""
        if (outbox := self._outbox) is None:
            return  # it was closed before
        skipped = 0
        try:
            async for item in source:
                if skipped < outbox.first:
                    skipped += 1
                    continue
                if not await in_thread(outbox.wait_for_room):
                    return
                outbox.put(encode(item))
            outbox.close()
        except Exception as error:
            self._inbox.fail(error)

    def ends(self) -> Iterator[End]:
        """Of its items, as `options` say."""
        while (end := self._next()) is not None:
            yield end

    def results(self) -> Iterator[Any]:
        """Each item's, or its error raised; with `return_exceptions`, given out."""
        for end in self.ends():
            yield self._value(end)

    async def results_async(self) -> AsyncIterator[Any]:
        """As `results`."""
        while (end := self._at_hand() or await in_thread(self._next)) is not None:
            is_elsewhere = end.kind is media.OutcomeKind.ELSEWHERE
            yield await in_thread(self._value, end) if is_elsewhere else self._value(end)

    def raised(self, end: End) -> tuple[str, bytes]:
        """The result of an item, or its error raised."""
        match end.kind:
            case media.OutcomeKind.RESULT:
                return end.content_type, end.body
            case media.OutcomeKind.ELSEWHERE:
                return self._keeper.result(item_id(self.id, end.item))
            case media.OutcomeKind.PROBLEM:
                raise error_of(0, {}, end.body)
            case media.OutcomeKind.NOTHING:
                raise InvocationNotFound(f"the end of item {end.item} is not kept any more")

    def close(self) -> None:
        if self._outbox is not None and self._outbox.total is None:
            self._outbox.close()
        else:
            known = self._keeper.map_status(self.id)
            accepted, is_open = _accepted(known)
            if is_open:
                function, _, method = known.function.partition(".")
                self._keeper.send_items(MapTarget(function, method), self.id, accepted, [], is_last=True)

    def cancel(self) -> bool:
        if self._outbox is not None:
            self._outbox.stop()
        try:
            return self._keeper.cancel_map(self.id)
        except MapNotFound:  # it had none of its items yet
            self._inbox.stop()
            return False

    def _next(self) -> End | None:
        """Wait for the next end; None after the last one."""
        while (end := self._at_hand()) is None:
            self._tell()
            if self.is_over or self._has_all() or (ends := self._inbox.take()) is None:
                self.is_over = True
                self._inbox.stop()
                missing = self.order.skip()
                return None if missing is None else End(media.OutcomeKind.NOTHING, missing, 0, 0, "", b"")
            for each in ends:
                self.order.add(each)
        return end

    def _at_hand(self) -> End | None:
        end = self.order.take()
        if end is not None:
            self._taken += 1
            self._untold += 1
            if self._untold >= _TELL_EACH:
                self._tell()
        return end

    def _tell(self) -> None:
        if self._untold and self._outbox is not None:
            self._outbox.taken(self._untold)
        self._untold = 0

    def _has_all(self) -> bool:
        """Without waiting for the gateway to say so."""
        return self._outbox is not None and self._outbox.total is not None and self._taken >= self._outbox.total

    def _value(self, end: End) -> Any:
        try:
            with remote_traceback():
                return decode(self.raised(end))
        except GpufnError as error:
            if self._options.return_exceptions:
                return error
            raise


def _accepted(view: MapView) -> tuple[int, bool]:
    return view.accepted, view.state == "open"


class Mapped(Protocol):
    """The remote side of a callable, as far as a map needs it."""

    def target(self) -> MapTarget: ...

    def encoded(self, arguments: Iterable[Any]) -> bytes:
        """One item. Raises TypeError when it does not fit the signature."""
        ...


def begin(
    mapped: Mapped, call: Callable[..., Any], arguments: Iterable[Iterable[Any]], total: int | None, options: MapOptions
) -> Map[Any]:
    """A map of `arguments`, which are `total`; `call` makes one call by itself."""
    options = options.checked()
    target = mapped.target()
    kept = None
    transport = _transport.current()
    if isinstance(transport, KeepsMaps) and not _is_short(total, options):
        kept = KeptMap(transport, options.id or new_map_id(), options)
        kept.begin(target, arguments, mapped.encoded)
        results = kept.results()
    else:
        results = _map_calls.results(call, arguments, name=target.function, **_unkept(options))
    if options.progress:
        results = _with_bar(results, target.function, total)
    return Map(results, kept)


def begin_async(
    mapped: Mapped,
    call: Callable[..., Awaitable[Any]],
    arguments: Iterable[Iterable[Any]] | AsyncIterable[Iterable[Any]],
    total: int | None,
    options: MapOptions,
) -> AsyncMap[Any]:
    """As `begin`, when its first result is asked for."""
    options = options.checked()
    kept = None
    transport = _transport.current()
    if isinstance(transport, KeepsMaps) and not _is_short(total, options):
        kept = KeptMap(transport, options.id or new_map_id(), options)
        results = _kept_async(kept, mapped, arguments)
    else:
        results = _map_calls.results_async(call, arguments, **_unkept(options))
    if options.progress:
        results = _with_bar_async(results, mapped.target().function, total)
    return AsyncMap(results, kept)


async def _kept_async(
    kept: KeptMap, mapped: Mapped, arguments: Iterable[Iterable[Any]] | AsyncIterable[Iterable[Any]]
) -> AsyncIterator[Any]:
    import asyncio  # noqa: PLC0415

    offering = None
    if isinstance(arguments, AsyncIterable):
        await in_thread(kept.begin, mapped.target(), None, mapped.encoded)
        offering = asyncio.ensure_future(kept.offer(arguments, mapped.encoded))
    else:
        await in_thread(kept.begin, mapped.target(), arguments, mapped.encoded)
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
        "window": options.window or _map_calls.WINDOW,
        "ordered": options.ordered,
        "return_exceptions": options.return_exceptions,
    }


def _keeper() -> KeepsMaps:
    transport = _transport.current()
    if isinstance(transport, KeepsMaps):
        return transport
    raise MapNotFound("maps are kept where a gateway serves them, not inside a worker or in gpufn.testing")


def _with_bar(results: Iterator[V], name: str, total: int | None) -> Iterator[V]:
    with Bar(name, total) as bar:
        for result in results:
            bar.advance()
            yield result


async def _with_bar_async(results: AsyncIterator[V], name: str, total: int | None) -> AsyncIterator[V]:
    with Bar(name, total) as bar:
        async for result in results:
            bar.advance()
            yield result
