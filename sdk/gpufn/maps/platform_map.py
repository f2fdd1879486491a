"""A map that the platform keeps, as this process sends its items (`_map_items`) and reads their ends (`_map_ends`)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self, TypedDict

from gpufn.call.result_decoding import PLAIN, ResultReader, remote_traceback
from gpufn.call.threads import in_thread
from gpufn.call.transport_protocol import KeepsMaps, MapTarget
from gpufn.client.responses import error_of
from gpufn.client.views import MapView
from gpufn.declare.argument_checks import check_count, check_seconds
from gpufn.maps.progress_bar import Waits
from gpufn.maps.reader import AsTheyCome, Cursor, End, Inbox, InOrder, patiently
from gpufn.maps.sender import MAX_WAIT_S, Outbox
from gpufn_core.encoding import media
from gpufn_core.errors import Conflict, GpufnError, InvalidInput, InvocationNotFound, MapNotFound
from gpufn_core.ids import is_invocation_id, item_id
from gpufn_core.spec.function_spec import function_name

WINDOW = 10_000
_TELL_EACH = 64  # results that are taken before the Outbox hears of it


class MapKeywords(TypedDict, total=False):
    """MapOptions, as `map` and `starmap` are given them."""

    ordered: bool
    return_exceptions: bool
    window: int | None
    progress: bool
    id: str | None
    after: str | None
    max_wait: float | None


class MapOptions(NamedTuple):
    """What a map can be asked for. `window` None is as many as usual. A limit of the API key that lasts longer than
    `max_wait` seconds (60) raises RateLimited; a shorter one is waited for."""

    ordered: bool = True
    return_exceptions: bool = False
    window: int | None = None
    progress: bool = False
    id: str | None = None
    after: str | None = None
    max_wait: float | None = None

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Self:
        """Raises TypeError, as a wrong call does, and InvalidInput."""
        if unknown := sorted(keywords.keys() - set(cls._fields)):
            raise TypeError(
                f"a map has no option {unknown[0]!r}; it has {', '.join(cls._fields)}, and arguments of the function "
                "are iterables, with one value per call"
            )
        return cls(**keywords).checked()

    def checked(self) -> Self:
        """Raises InvalidInput."""
        if self.window is not None:
            check_count("window", self.window)
        check_seconds("max_wait", self.max_wait)
        if self.id is not None and not (isinstance(self.id, str) and is_invocation_id(self.id)):
            raise InvalidInput(f"{self.id!r} is not a map's id, which has 26 letters and digits")
        if self.after and self.id is None:
            raise InvalidInput("after is a cursor in the map that id names")
        Cursor.read(self.after or "")
        return self


class KeptMap:
    """A map that the platform keeps, as this process sends and reads it."""

    def __init__(
        self,
        keeper: KeepsMaps,
        id: str,  # noqa: A002
        options: MapOptions,
        reader: ResultReader = PLAIN,
    ) -> None:
        after = Cursor.read(options.after or "")
        if options.ordered and options.after and after.item is None:
            raise InvalidInput("this cursor is of results as they came: give ordered=False", field="after")
        self.id = id
        self.order = InOrder(after) if options.ordered else AsTheyCome(after)
        self.is_over = False
        self.waits = Waits()
        self._keeper = keeper
        self._reader = reader
        self._options = options
        self._inbox = Inbox(lambda cursor: keeper.outcomes(id, cursor), after)
        self._outbox: Outbox | None = None
        self._taken = after.item if after.item is not None else after.ended
        self._untold = 0
        weakref.finalize(self, self._inbox.stop)

    def begin(
        self,
        target: MapTarget,
        source: Iterable[Any] | None,
        encode: Callable[[Any], bytes],
        *,
        total: int | None = None,
    ) -> None:
        """Send the items of `source`, which are `total`, that were not accepted before; without one, `offer` them.
        Raises Conflict for an id that is another map's."""
        first = 0
        if self._options.id is not None:
            with contextlib.suppress(MapNotFound):  # nothing was accepted yet
                known = self._keeper.map_status(self.id)
                _check(known, target, total)
                first, is_open = _accepted(known)
                if not is_open:
                    self.follow()
                    return
        keeper, map_id = self._keeper, self.id
        window = self._options.window or WINDOW
        self._outbox = outbox = Outbox(
            lambda at, items, is_last: keeper.send_items(target, map_id, at, items, is_last=is_last),
            lambda: _accepted(keeper.map_status(map_id)),
            window=window,
            first=first,
            taken=self._taken,
            max_wait_s=MAX_WAIT_S if self._options.max_wait is None else self._options.max_wait,
            on_wait=self.waits,
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
                outbox.encode(item, encode)
            outbox.close()
        except Exception as error:
            self._inbox.fail(error)

    def ends(self) -> Iterator[End]:
        """Of its items, as `options` say. Who leaves it stops what is sent and read for him."""
        try:
            while (end := self._next()) is not None:
                yield end
        finally:
            self.stop()

    def results(self) -> Iterator[Any]:
        """Each item's, or its error raised; with `return_exceptions`, given out."""
        for end in self.ends():
            yield self._value(end)

    async def results_async(self) -> AsyncIterator[Any]:
        """As `results`."""
        try:
            while (end := await self._next_async()) is not None:
                is_elsewhere = end.kind is media.OutcomeKind.ELSEWHERE
                yield await in_thread(self._value, end) if is_elsewhere else self._value(end)
        finally:
            self.stop()

    def raised(self, end: End) -> tuple[str, bytes]:
        """The result of an item, or its error raised."""
        match end.kind:
            case media.OutcomeKind.RESULT:
                return end.content_type, end.body
            case media.OutcomeKind.ELSEWHERE:
                return patiently(lambda: self._keeper.result(item_id(self.id, end.item)))
            case media.OutcomeKind.PROBLEM:
                raise error_of(0, {}, end.body)
            case media.OutcomeKind.NOTHING:
                raise InvocationNotFound(f"the end of item {end.item} is not kept any more")

    def stop(self) -> None:
        """Send and read no more."""
        self._inbox.stop()
        if self._outbox is not None:
            self._outbox.stop()

    def close(self) -> None:
        """No more items come."""
        if self._outbox is not None and self._outbox.is_sending:
            self._outbox.close()
        else:
            known = self._keeper.map_status(self.id)
            accepted, is_open = _accepted(known)
            if is_open:
                function, _, method = known.function.partition(".")
                self._keeper.send_items(MapTarget(function, method), self.id, accepted, [], is_last=True)

    def cancel(self) -> bool:
        """End what has not ended; False when all had."""
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
            if not self._have_more():
                return self._forgotten()
        return end

    async def _next_async(self) -> End | None:
        """As `_next`. What a thread waits for is taken here: its reader may be gone when it comes."""
        while (end := self._at_hand()) is None:
            if not await in_thread(self._have_more):
                return self._forgotten()
        return end

    def _have_more(self) -> bool:
        """Wait for more ends; False when there are none."""
        self._tell()
        if self.is_over or self._has_all() or (ends := self._inbox.take()) is None:
            self.is_over = self.is_over or self._has_all() or self._inbox.is_over  # else it was left
            return False
        for each in ends:
            self.order.add(each)
        return True

    def _forgotten(self) -> End | None:
        """Of an item that has ended, and whose end is not kept any more, if others wait behind it."""
        missing = self.order.skip()
        return None if missing is None else End(media.OutcomeKind.NOTHING, missing, 0, 0, "", b"")

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
                return self._reader.decode(self.raised(end))
        except GpufnError as error:
            if self._options.return_exceptions:
                return error
            raise


def _check(known: MapView, target: MapTarget, total: int | None) -> None:
    """What a gateway refuses when it is sent items: of a map that is closed it is sent none."""
    function, _, method = known.function.partition(".")
    if (function, method) != (function_name(target.function), target.method):
        raise Conflict(f"map {known.id} is of {known.function}: choose another id")
    if known.state in {"running", "ended"} and total is not None and total > known.accepted:
        raise Conflict(f"map {known.id} was closed behind {known.accepted:,} items: choose another id for {total:,}")


def _accepted(view: MapView) -> tuple[int, bool]:
    return view.accepted, view.state == "open"
