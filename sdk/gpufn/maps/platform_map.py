"""A map that the platform stores. This process sends the items (`sender`) and reads their outcomes (`reader`)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self, TypedDict

from gpufn.call.result_decoding import PLAIN, ResultReader, remote_traceback
from gpufn.call.threads import in_thread
from gpufn.call.transport_protocol import MapTransport, Target
from gpufn.client.responses import error_of
from gpufn.client.views.calls import MapView
from gpufn.declare.hints.argument_checks import check_count, check_seconds
from gpufn.maps.progress_bar import WaitDisplay
from gpufn.maps.reader import ArrivalOrder, Cursor, ItemOrder, ItemOutcome, OutcomeReader, retry_while_unavailable
from gpufn.maps.sender import MAX_WAIT_S, ItemSender
from gpufn_core.encoding import media
from gpufn_core.errors import Conflict, GpufnError, InvalidInput, InvocationNotFound, MapNotFound
from gpufn_core.ids import is_client_id, item_id
from gpufn_core.spec.naming.names import can_mean
from gpufn_core.spec.naming.variant_names import function_of, split

WINDOW = 10_000
_REPORT_EVERY = 64  # results that are taken between two reports to the sender


class MapKeywords(TypedDict, total=False):
    """The keyword arguments of `map` and `starmap`, which become MapOptions."""

    ordered: bool
    return_exceptions: bool
    window: int | None
    progress: bool | None
    id: str | None
    after: str | None
    max_wait: float | None


class MapOptions(NamedTuple):
    """The options of a map. None means the default: for `progress`, True in a notebook.

    A limit of the API key that lasts longer than `max_wait` seconds (60) raises RateLimited; the map waits for a
    shorter one.
    """

    ordered: bool = True
    return_exceptions: bool = False
    window: int | None = None
    progress: bool | None = None
    id: str | None = None
    after: str | None = None
    max_wait: float | None = None

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Self:
        """Build the options. Raises TypeError for an unknown option, as a wrong call does, else InvalidInput."""
        if unknown := sorted(keywords.keys() - set(cls._fields)):
            raise TypeError(
                f"a map has no option {unknown[0]!r}; it has {', '.join(cls._fields)}, and arguments of the function "
                "are iterables, with one value per call"
            )
        return cls(**keywords).checked()

    def checked(self) -> Self:
        """Return these options. Raises InvalidInput for a wrong value."""
        if self.window is not None:
            check_count("window", self.window)
        check_seconds("max_wait", self.max_wait)
        if self.id is not None and not (isinstance(self.id, str) and is_client_id(self.id)):
            raise InvalidInput(f"{self.id!r} is not a map's id, which has 26 letters and digits")
        if self.after and self.id is None:
            raise InvalidInput("after is a cursor of an existing map: set its id, too")
        Cursor.parse(self.after or "")
        return self


class PlatformMap:
    """A map that the platform stores: this process's sender and reader of it."""

    def __init__(
        self,
        transport: MapTransport,
        id: str,  # noqa: A002
        options: MapOptions,
        reader: ResultReader = PLAIN,
    ) -> None:
        after = Cursor.parse(options.after or "")
        if options.ordered and options.after and after.item is None:
            raise InvalidInput("this cursor is of a map with ordered=False: set ordered=False", field="after")
        self.id = id
        self.order = ItemOrder(after) if options.ordered else ArrivalOrder(after)
        self.is_over = False
        self.wait_display = WaitDisplay()
        self._transport = transport
        self._result_reader = reader
        self._options = options
        self._reader = OutcomeReader(lambda cursor: transport.outcomes(id, cursor), after)
        self._sender: ItemSender | None = None
        self._taken = after.item if after.item is not None else after.ended_count
        self._unreported = 0
        weakref.finalize(self, self._reader.stop)

    def begin(
        self, target: Target, source: Iterable[Any] | None, encode: Callable[[Any], bytes], *, total: int | None = None
    ) -> None:
        """Send the items of `source` that were not accepted before. `total` is their number, if known.

        Without a source, `offer` sends the items. Raises Conflict if the id belongs to another map.
        """
        first = 0
        if self._options.id is not None:
            with contextlib.suppress(MapNotFound):  # no item was accepted yet
                view = self._transport.map_status(self.id)
                _check_same_map(view, target, total)
                first, is_open = _accepted(view)
                if not is_open:
                    self.follow()
                    return
        transport, map_id = self._transport, self.id
        window = self._options.window or WINDOW
        self._sender = sender = ItemSender(
            lambda at, items, is_last: transport.send_items(target, map_id, at, items, is_last=is_last),
            lambda: _accepted(transport.map_status(map_id)),
            window=window,
            first=first,
            taken=self._taken,
            max_wait_s=MAX_WAIT_S if self._options.max_wait is None else self._options.max_wait,
            on_wait=self.wait_display,
        )
        weakref.finalize(self, sender.stop)
        if first:
            self.follow()
        accepted = (lambda: None) if first else self._reader.start
        sender.start(source, encode, accepted=accepted, failed=self._reader.fail)

    def follow(self) -> None:
        """Start to read the outcomes."""
        self._reader.start()

    async def offer(self, source: AsyncIterable[Any], encode: Callable[[Any], bytes]) -> None:
        """Send the items of an asynchronous source, after `begin` without a source."""
        if (sender := self._sender) is None:
            return  # the map was already closed
        skipped = 0
        try:
            async for item in source:
                if skipped < sender.first:
                    skipped += 1
                    continue
                if not await in_thread(sender.wait_for_room):
                    return
                sender.encode(item, encode)
            sender.close()
        except Exception as error:
            self._reader.fail(error)

    def outcomes(self) -> Iterator[ItemOutcome]:
        """Yield the outcomes of the items, in the order that the options set. Closing the iterator calls `stop`."""
        try:
            while (outcome := self._next()) is not None:
                yield outcome
        finally:
            self.stop()

    def results(self) -> Iterator[Any]:
        """Yield the results of the items. A failure is raised, or yielded with `return_exceptions`."""
        for outcome in self.outcomes():
            yield self._value(outcome)

    async def results_async(self) -> AsyncIterator[Any]:
        """Like `results`."""
        try:
            while (outcome := await self._next_async()) is not None:
                is_elsewhere = outcome.kind is media.MapOutcomeKind.BY_REFERENCE
                yield await in_thread(self._value, outcome) if is_elsewhere else self._value(outcome)
        finally:
            self.stop()

    def result_of(self, outcome: ItemOutcome) -> tuple[str, bytes]:
        """Return the result of an item, or raise its error."""
        match outcome.kind:
            case media.MapOutcomeKind.RESULT:
                return outcome.content_type, outcome.body
            case media.MapOutcomeKind.BY_REFERENCE:
                return retry_while_unavailable(lambda: self._transport.result(item_id(self.id, outcome.item)))
            case media.MapOutcomeKind.PROBLEM:
                raise error_of(0, {}, outcome.body)
            case media.MapOutcomeKind.EMPTY:
                raise InvocationNotFound(f"the outcome of item {outcome.item} is no longer stored")

    def stop(self) -> None:
        """Stop sending and reading."""
        self._reader.stop()
        if self._sender is not None:
            self._sender.stop()

    def close(self) -> None:
        """Stop accepting items. Items that were already accepted still run."""
        if self._sender is not None and self._sender.is_sending:
            self._sender.close()
        else:
            view = self._transport.map_status(self.id)
            accepted, is_open = _accepted(view)
            if is_open:
                function, _, method = view.function.partition(".")
                self._transport.send_items(Target(function, method), self.id, accepted, [], is_last=True)

    def cancel(self) -> bool:
        """Cancel the items that have not ended. Return False if all had ended."""
        if self._sender is not None:
            self._sender.stop()
        try:
            return self._transport.cancel_map(self.id)
        except MapNotFound:  # no item was accepted yet
            self._reader.stop()
            return False

    def _next(self) -> ItemOutcome | None:
        """Wait for the next outcome. Return None after the last one."""
        while (outcome := self._take()) is None:
            if not self._wait_for_more():
                return self._missing()
        return outcome

    async def _next_async(self) -> ItemOutcome | None:
        """Like `_next`. A thread only waits: if it consumed the outcome, a cancelled reader would lose it."""
        while (outcome := self._take()) is None:
            if not await in_thread(self._wait_for_more):
                return self._missing()
        return outcome

    def _wait_for_more(self) -> bool:
        """Wait for more outcomes. Return False if there are none."""
        self._report_taken()
        if self.is_over or self._has_all() or (outcomes := self._reader.take()) is None:
            self.is_over = self.is_over or self._has_all() or self._reader.is_over  # else the reader was stopped
            return False
        for outcome in outcomes:
            self.order.add(outcome)
        return True

    def _missing(self) -> ItemOutcome | None:
        """Return a placeholder for an outcome that is no longer stored, if outcomes of later items wait behind it."""
        item = self.order.skip()
        return None if item is None else ItemOutcome(media.MapOutcomeKind.EMPTY, item, 0, 0, "", b"")

    def _take(self) -> ItemOutcome | None:
        outcome = self.order.take()
        if outcome is not None:
            self._taken += 1
            self._unreported += 1
            if self._unreported >= _REPORT_EVERY:
                self._report_taken()
        return outcome

    def _report_taken(self) -> None:
        if self._unreported and self._sender is not None:
            self._sender.report_taken(self._unreported)
        self._unreported = 0

    def _has_all(self) -> bool:
        """Return whether all outcomes were taken. Does not wait for the end of the gateway's stream."""
        return self._sender is not None and self._sender.total is not None and self._taken >= self._sender.total

    def _value(self, outcome: ItemOutcome) -> Any:
        try:
            with remote_traceback():
                return self._result_reader.decode(self.result_of(outcome))
        except GpufnError as error:
            if self._options.return_exceptions:
                return error
            raise


def _check_same_map(view: MapView, target: Target, total: int | None) -> None:
    """Raise Conflict if the map is of another function, or is closed and has fewer items.

    A gateway checks this when it receives items, but a closed map is not sent any.
    """
    function, _, method = view.function.partition(".")
    if not can_mean(split(target.function).function, function_of(function)) or method != target.method:
        raise Conflict(f"map {view.id} is of {view.function}: choose another id")
    if view.state in {"running", "ended"} and total is not None and total > view.accepted:
        raise Conflict(f"map {view.id} was closed after {view.accepted:,} items: choose another id for {total:,}")


def _accepted(view: MapView) -> tuple[int, bool]:
    """Return the number of accepted items, and whether the map is open."""
    return view.accepted, view.state == "open"
