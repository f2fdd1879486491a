"""Maps: outcomes in order with bounded memory, items in chunks, and both after a broken connection."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufn import Function, Map, gpu_function
from gpufn.call import transport
from gpufn.call.threads import in_thread
from gpufn.call.transport_protocol import Target
from gpufn.client.views.calls import MapView
from gpufn.maps import reader, sender
from gpufn.maps.platform_map import MapOptions, PlatformMap
from gpufn.maps.reader import ArrivalOrder, Cursor, ItemOrder, ItemOutcome, parse_outcomes
from gpufn.maps.sender import ItemSender
from gpufn.testing import run_locally
from gpufn_core.encoding import media, values
from gpufn_core.errors import (
    BusUnavailable,
    Conflict,
    FunctionRaised,
    GatewayUnavailable,
    InvalidInput,
    InvocationNotFound,
    MapNotFound,
    PayloadTooLarge,
    QueueFull,
    RateLimited,
    UnsupportedMediaType,
)
from gpufn_core.protocol.limits import CHUNK_ITEMS

RESULT = media.MapOutcomeKind.RESULT


@gpu_function
def squared(x: int) -> int:
    return x * x


@gpu_function
def cubed(x: int) -> int:
    return x * x * x


def outcomes(order: Sequence[int], body: bytes = b"") -> list[ItemOutcome]:
    """Return the outcomes of these items, in this order."""
    return [ItemOutcome(RESULT, item, 10 * (place + 1), place + 1, "", body) for place, item in enumerate(order)]


def record(end: ItemOutcome) -> bytes:
    name = end.content_type.encode()
    return media.OUTCOME.pack(end.kind, len(name), len(end.body), end.item, end.seq, end.ended_count) + name + end.body


def taken(order: ItemOrder | ArrivalOrder) -> list[int]:
    return [end.item for end in iter(order.take, None)]


# --- ends -------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 90))
def test_records_are_parsed_from_chunks_of_any_size(size: int) -> None:
    sent = [ItemOutcome(RESULT, 3, 7, 1, "application/json", b"[1]"), *outcomes([1, 2])]
    alive = media.OUTCOME.pack(media.MapOutcomeKind.EMPTY, 0, 0, 0, 0, 0)
    data = alive + b"".join(map(record, sent))
    chunks = (data[at : at + size] for at in range(0, len(data), size))
    assert list(itertools.chain.from_iterable(parse_outcomes(chunks))) == sent


def test_a_truncated_record_is_a_broken_connection() -> None:
    with pytest.raises(GatewayUnavailable, match="broke off"):
        list(parse_outcomes([record(outcomes([0])[0])[:-1]]))


@given(st.permutations(range(12)), st.integers(0, 12))
def test_outcomes_are_sorted_and_a_cursor_resumes_the_reader(arrival: Sequence[int], stop: int) -> None:
    arrived = outcomes(arrival)
    first = ItemOrder(Cursor())
    seen: list[int] = []
    for end in arrived:
        if len(seen) == stop:
            break
        first.add(end)
        while len(seen) < stop and (next_end := first.take()) is not None:
            seen.append(next_end.item)
    assert seen == list(range(len(seen)))
    cursor = Cursor.parse(str(first.cursor))
    again = ItemOrder(cursor)
    for end in arrived:
        if end.seq > cursor.seq:  # as the gateway sends them
            again.add(end)
    assert [*seen[: cursor.item], *taken(again)] == list(range(12))


def test_early_results_beyond_the_limit_are_requested_again() -> None:
    order = ItemOrder(Cursor(), max_bytes=100)
    for end in outcomes([1, 2, 3, 0], body=b"x" * 60):
        order.add(end)
    taken = [(end.item, end.kind) for end in iter(order.take, None)]
    elsewhere = media.MapOutcomeKind.BY_REFERENCE
    assert taken == [(0, RESULT), (1, RESULT), (2, elsewhere), (3, elsewhere)]


def test_unordered_outcomes_are_in_arrival_order() -> None:
    order = ArrivalOrder(Cursor())
    for end in outcomes([2, 0]):
        order.add(end)
    assert taken(order) == [2, 0]
    assert str(order.cursor) == "20.2"


@pytest.mark.parametrize("text", ["x", "1", "1.2.3.4", "1.-2", "1.٢"])
def test_a_wrong_cursor_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="cursor"):
        Cursor.parse(text)


# --- items ------------------------------------------------------------------------------------------------------------


class Sent:
    """Records what an ItemSender sends. Raises the errors `refuse` first."""

    def __init__(self, *refuse: Exception) -> None:
        self.refuse = list(refuse)
        self.accepted = 0
        self.chunks: list[tuple[int, list[bytes], bool]] = []
        self.error: BaseException | None = None
        self.changed = threading.Condition()

    def __call__(self, first: int, items: Sequence[bytes], is_last: bool) -> None:
        with self.changed:
            if self.refuse:
                raise self.refuse.pop(0)
            self.chunks.append((first, list(items), is_last))
            self.changed.notify_all()

    def get_accepted(self) -> tuple[int, bool]:
        return self.accepted, True

    def failed(self, error: BaseException) -> None:
        with self.changed:
            self.error = error
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=30)

    @property
    def items(self) -> list[bytes]:
        return [item for _, items, _ in self.chunks for item in items]


def start_sender(sent: Sent, source: Any, *, window: int = 10_000, first: int = 0) -> ItemSender:
    item_sender = ItemSender(sent, sent.get_accepted, window=window, first=first)
    item_sender.start(source, bytes, accepted=lambda: None, failed=sent.failed)
    return item_sender


def is_over(sent: Sent) -> bool:
    return bool(sent.chunks) and sent.chunks[-1][2]


def test_items_are_sent_in_chunks_of_limited_length_and_the_last_is_marked() -> None:
    sent = Sent()
    items = [b"%d" % number for number in range(2 * CHUNK_ITEMS + 1)]
    start_sender(sent, items)
    sent.wait(lambda: is_over(sent))
    assert sent.items == items
    assert max(len(chunk) for _, chunk, _ in sent.chunks) <= CHUNK_ITEMS
    assert [first for first, _, _ in sent.chunks] == [
        sum(len(chunk) for _, chunk, _ in sent.chunks[:place]) for place in range(len(sent.chunks))
    ]


def test_the_size_of_a_chunk_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_CHUNK_BYTES", 10)
    sent = Sent()
    start_sender(sent, [b"x" * 6, b"y" * 6, b"z" * 30])
    sent.wait(lambda: is_over(sent))
    assert [len(chunk) for _, chunk, _ in sent.chunks][:3] == [1, 1, 1]


def test_a_temporary_failure_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_MIN_BACKOFF_S", 0.0)
    sent = Sent(QueueFull("full", retry_after_s=0.001), GatewayUnavailable("restarting"))
    start_sender(sent, [b"a"])
    sent.wait(lambda: is_over(sent))
    assert sent.items == [b"a"]


def test_a_chunk_without_room_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(*(RateLimited("5 calls may be queued", retry_after_s=0.0) for _ in range(4)))
    items = [b"%d" % number for number in range(100)]
    start_sender(sent, items)
    sent.wait(lambda: is_over(sent))
    assert sent.items == items
    assert len(sent.chunks[0][1]) <= 100 // 2**4


def test_a_limit_that_lasts_for_hours_is_raised_and_not_waited_for() -> None:
    sent = Sent(RateLimited("60 s used", retry_after_s=7200.0))
    start_sender(sent, [b"a"])
    sent.wait(lambda: sent.error is not None or is_over(sent))
    assert isinstance(sent.error, RateLimited)
    assert (sent.error.retry_after_s, sent.chunks) == (7200.0, [])
    assert str(sent.error).startswith("60 s used: 0 items")


def test_a_full_queue_is_waited_for_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_MAX_BACKOFF_S", 0.0)
    sent = Sent(QueueFull("full", retry_after_s=7200.0))
    start_sender(sent, [b"a"])
    sent.wait(lambda: is_over(sent))
    assert sent.items == [b"a"]


def test_a_wait_for_a_limit_is_shown_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_MAX_BACKOFF_S", 0.0)
    shown: list[str] = []
    sent = Sent(RateLimited("5 calls per minute", retry_after_s=12.0), RateLimited("5 calls per minute"))
    item_sender = ItemSender(sent, sent.get_accepted, window=10, on_wait=shown.append)
    item_sender.start([b"a"], bytes, accepted=lambda: None, failed=sent.failed)
    sent.wait(lambda: is_over(sent))
    while item_sender.is_sending:
        threading.Event().wait(0.001)
    assert shown == ["waiting 12 s: 5 calls per minute", ""]


def test_a_map_raises_a_limit_that_lasts_longer_than_max_wait(platform: FakeTransport) -> None:
    def send_items(*args: object, **options: object) -> None:
        raise RateLimited("the key has used its 60 s of today", retry_after_s=30.0)

    platform.send_items = send_items  # type: ignore[assignment]
    with pytest.raises(RateLimited, match="60 s of today") as raised:
        list(cubed.map(range(100), max_wait=20))
    assert raised.value.retry_after_s == 30.0
    with pytest.raises(InvalidInput, match="max_wait"):
        cubed.map(range(100), max_wait="soon")  # type: ignore[arg-type]


def test_a_chunk_that_may_have_been_accepted_is_sent_again_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_MIN_BACKOFF_S", 0.0)
    tries: list[list[bytes]] = []
    sent = Sent(GatewayUnavailable("killed"), RateLimited("too many requests", retry_after_s=0.0))

    def send(first: int, items: Sequence[bytes], is_last: bool) -> None:
        tries.append(list(items))
        sent(first, items, is_last)

    item_sender = ItemSender(send, sent.get_accepted, window=100)
    item_sender.start([b"a", b"b", b"c"], bytes, accepted=lambda: None, failed=sent.failed)
    sent.wait(lambda: is_over(sent))
    assert tries[0] == tries[1] == tries[2]


def test_a_chunk_that_may_have_been_accepted_is_not_sent_again_after_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender, "_MIN_BACKOFF_S", 0.0)
    tries: list[list[bytes]] = []
    sent = Sent(GatewayUnavailable("killed"), RateLimited("too many requests"))

    def send(first: int, items: Sequence[bytes], is_last: bool) -> None:
        tries.append(list(items))
        if len(tries) == 2:
            item_sender.stop()
        sent(first, items, is_last)

    item_sender = ItemSender(send, sent.get_accepted, window=100)
    item_sender.put(b"a")
    item_sender._run(lambda: None, sent.failed)  # in this thread, so that it has ended
    assert (tries, sent.chunks, sent.error) == ([[b"a"], [b"a"]], [], None)


def test_items_in_flight_when_an_earlier_client_was_killed_are_not_sent_again() -> None:
    sent = Sent(Conflict("5 items were accepted: go on with number 5"))
    sent.accepted = 5
    start_sender(sent, [b"%d" % number for number in range(10)], first=3)
    sent.wait(lambda: is_over(sent))
    assert sent.chunks[0][0] == 5
    assert sent.items == [b"%d" % number for number in range(5, 10)]


def test_another_clients_items_are_a_conflict() -> None:
    sent = Sent(Conflict("200 items were accepted"))
    sent.accepted = 200
    start_sender(sent, [b"a"], first=3)
    sent.wait(lambda: sent.error is not None)
    assert isinstance(sent.error, Conflict)


def test_a_permanent_failure_is_reported() -> None:
    sent = Sent(UnsupportedMediaType("no"))
    start_sender(sent, [b"a"])
    sent.wait(lambda: sent.error is not None)
    assert isinstance(sent.error, UnsupportedMediaType)


def test_an_item_that_cannot_be_encoded_is_named() -> None:
    def encode(item: int) -> bytes:
        if item == 12:
            raise InvalidInput("args[0]: a generator cannot be sent")
        return b"%d" % item

    sent = Sent()
    item_sender = ItemSender(sent, sent.get_accepted, window=100, first=10)
    item_sender.start(range(20), encode, accepted=lambda: None, failed=sent.failed)
    sent.wait(lambda: sent.error is not None)
    assert isinstance(sent.error, InvalidInput)
    assert str(sent.error) == sent.error.message
    assert sent.error.message.startswith("items[12]: args[0]: a generator")


def test_an_item_that_is_too_large_is_named() -> None:
    sent = Sent(PayloadTooLarge("Too large"))
    item_sender = ItemSender(sent, sent.get_accepted, window=100, first=3)
    item_sender.put(b"a")
    item_sender._run(lambda: None, sent.failed)
    assert isinstance(sent.error, PayloadTooLarge)
    assert str(sent.error) == "items[3]: Too large"


def test_an_endless_source_is_read_a_window_ahead() -> None:
    sent = Sent()
    numbers = itertools.count()
    source = (b"%d" % number for number in numbers)
    item_sender = start_sender(sent, source, window=5)
    sent.wait(lambda: len(sent.items) == 5)
    item_sender.report_taken(2)
    sent.wait(lambda: len(sent.items) == 7)
    assert next(numbers) == 7
    item_sender.stop()


def test_a_failure_of_the_source_is_reported_and_does_not_close_the_map() -> None:
    def source() -> Iterator[bytes]:
        yield b"a"
        raise OSError("gone")

    sent = Sent()
    start_sender(sent, source())
    sent.wait(lambda: sent.error is not None)
    assert isinstance(sent.error, OSError)
    assert not is_over(sent)


def test_items_that_were_accepted_before_are_not_sent_again() -> None:
    sent = Sent()
    start_sender(sent, [b"a", b"b", b"c"], first=2)
    sent.wait(lambda: is_over(sent))
    assert sent.chunks == [(2, [b"c"], True)]


# --- a map ------------------------------------------------------------------------------------------------------------


class FakeTransport:
    """A Transport that keeps maps of `squared`. The first `breaks` streams of outcomes break off."""

    def __init__(self, breaks: int = 0) -> None:
        self.breaks = breaks
        self.arguments: list[int] = []
        self.is_closed = False
        self.cursors: list[str] = []
        self.cancelled: list[str] = []
        self.changed = threading.Condition()

    def send_items(self, target: Target, map_id: str, first: int, items: Sequence[bytes], *, is_last: bool) -> MapView:
        assert target == Target("squared")
        with self.changed:
            assert first == len(self.arguments)
            self.arguments += (values.decode_call(item, allow_pickle=True)[0][0] for item in items)
            self.is_closed = is_last
            self.changed.notify_all()
        return self.map_status(map_id)

    def outcomes(self, map_id: str, after: str) -> Iterator[list[ItemOutcome]]:
        self.cursors.append(after)
        for at in itertools.count(Cursor.parse(after).ended_count):
            with self.changed:
                while not (self.is_closed or at < len(self.arguments)):
                    self.changed.wait()
                if at == len(self.arguments):
                    return
            yield [self._end(at, at + 1)]
            if self.breaks:
                self.breaks -= 1
                raise GatewayUnavailable("killed")

    def _end(self, item: int, place: int) -> ItemOutcome:
        argument = self.arguments[item]
        if argument < 0:
            problem = b'{"code": "function_raised", "detail": "below 0", "error_type": "ValueError",'
            problem += b'"error_classes": ["builtins:ValueError"]}'
            return ItemOutcome(media.MapOutcomeKind.PROBLEM, item, place, place, media.PROBLEM, problem)
        content_type, body = values.encode_result(argument * argument, media.NATIVE)
        return ItemOutcome(RESULT, item, place, place, content_type, body)

    def map_status(self, map_id: str) -> MapView:
        if not self.arguments:
            raise MapNotFound
        state = "running" if self.is_closed else "open"
        return MapView(id=map_id, function="squared", accepted=len(self.arguments), state=state)

    def cancel_map(self, map_id: str) -> bool:
        self.cancelled.append(map_id)
        return True

    def result(self, invocation: str, *, timeout_s: float | None = None) -> tuple[str, bytes]:
        raise InvocationNotFound


@pytest.fixture
def platform() -> Iterator[FakeTransport]:
    platform: Any = FakeTransport()
    transport.install(platform)
    yield platform
    transport.install(None)


def test_a_map_yields_results_in_order(platform: FakeTransport) -> None:
    with squared.map(range(100)) as results:
        assert list(results) == [x * x for x in range(100)]


def test_a_map_without_iterables_is_refused(platform: FakeTransport) -> None:
    for begin in (squared.map, squared.aio.map):
        with pytest.raises(TypeError, match=r"argument of squared"):
            begin()


def test_a_map_raises_the_failure_of_its_source(platform: FakeTransport) -> None:
    def source() -> Iterator[int]:
        yield from range(3)
        raise SystemExit("enough")

    results = squared.map(source())
    taken_values: list[int] = []
    with pytest.raises(SystemExit, match="enough"):
        taken_values += results
    assert taken_values == [x * x for x in range(len(taken_values))]


def test_a_reader_resumes_after_a_broken_connection(platform: FakeTransport) -> None:
    platform.breaks = 3
    assert list(squared.map(range(20))) == [x * x for x in range(20)]
    assert len(platform.cursors) == 4
    assert len(set(platform.cursors)) == 4


def test_a_failure_belongs_to_its_item(platform: FakeTransport) -> None:
    outcomes = list(squared.map([*range(1, 10), -1, 3], return_exceptions=True))
    assert isinstance(outcomes[9], FunctionRaised)
    assert isinstance(outcomes[9], ValueError)
    assert outcomes[10] == 9
    platform.arguments.clear()
    results = squared.map([*range(1, 10), -1, 3])
    with pytest.raises(ValueError, match="below 0"):
        list(results)


def test_a_map_continues_after_its_accepted_items(platform: FakeTransport) -> None:
    platform.arguments += range(4)
    assert list(squared.map(range(10), id="0" * 26)) == [x * x for x in range(10)]
    assert platform.arguments == list(range(10))


@pytest.mark.parametrize(
    ("function", "items", "refused"),
    [
        (squared, range(4), ""),
        (squared, iter(range(4)), ""),
        (squared, range(5), "was closed after 4 items: choose another id for 5"),
        (cubed, range(4), "is of squared: choose another id"),
    ],
)
def test_the_id_of_another_map_is_refused_even_if_that_map_is_closed(
    platform: FakeTransport, function: Function[..., Any, Any], items: Any, refused: str
) -> None:
    platform.arguments += range(4)
    platform.is_closed = True
    if refused:
        with pytest.raises(Conflict, match=refused):
            function.map(items, id="0" * 26)
        with pytest.raises(Conflict, match=refused):
            asyncio.run(anext(function.aio.map(items, id="0" * 26)))
    else:
        assert list(function.map(items, id="0" * 26)) == [0, 1, 4, 9]


def test_a_reader_of_an_open_map_ends_when_the_map_is_closed(platform: FakeTransport) -> None:
    platform.arguments += range(4)
    results = Map.from_id("0" * 26)
    assert next(results) == 0
    platform.is_closed = True
    with platform.changed:
        platform.changed.notify_all()
    assert list(results) == [1, 4, 9]


@pytest.mark.parametrize("arrives", [True, False])
def test_an_outcome_that_arrives_for_a_cancelled_reader_is_not_taken(
    platform: FakeTransport, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    """Regression: the waiting thread took the outcome, so the cursor was after it. Without
    further outcomes, the thread marked the map as over, so leaving the map did not cancel it."""

    async def source() -> AsyncIterator[tuple[int]]:
        yield (2,)
        await asyncio.Event().wait()

    async def main() -> None:
        async with squared.aio.starmap(source()) as results:
            assert await anext(results) == 4
            cursor, outcome_reader = results.cursor, vars(results)["_platform_map"]._reader
            take = outcome_reader.take
            began, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()

            def take_late() -> list[ItemOutcome] | None:
                began.set()
                may_go_on.wait(30)
                return [ItemOutcome(RESULT, 1, 2, 2, "", b"")] if arrives else take()

            async def watched(function: Callable[[], Any]) -> Any:
                def watch() -> Any:
                    try:
                        return function()
                    finally:
                        ended.set()

                return await in_thread(watch)

            outcome_reader.take = take_late
            monkeypatch.setattr("gpufn.maps.platform_map.in_thread", watched)
            reader = asyncio.ensure_future(anext(results))
            assert await asyncio.to_thread(began.wait, 30)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            may_go_on.set()
            assert await asyncio.to_thread(ended.wait, 30)
            assert results.cursor == cursor
            monkeypatch.undo()

    asyncio.run(main())
    assert len(platform.cancelled) == 1


def test_a_map_can_be_closed_after_its_reader_left(platform: FakeTransport) -> None:
    results = squared.map(itertools.count(), window=20)
    assert next(results) == 0
    for value in results:
        if value == 25:
            break
    cursor = results.cursor
    results.close()
    platform.changed.acquire()
    platform.changed.wait_for(lambda: platform.is_closed, timeout=30)
    platform.changed.release()
    rest = Map.from_id(results.id or "", after=cursor)
    assert list(rest) == [x * x for x in range(6, len(platform.arguments))]


def test_a_few_items_are_single_calls() -> None:
    with run_locally() as platform:
        results = squared.map([1, 2], ordered=False)
        assert sorted(results) == [1, 4]
        assert results.id is None
    assert len(platform.calls) == 2


def test_contradicting_options_are_refused(platform: FakeTransport) -> None:
    for options, text in (
        ({"window": 0}, "window"),
        ({"id": "x"}, "id"),
        ({"after": "1.2"}, "cursor"),
        ({"id": "0" * 26, "after": "1.2"}, "ordered=False"),
    ):
        with pytest.raises(InvalidInput, match=text):
            squared.map(range(100), **options)


@pytest.mark.parametrize("has_rich", [True, False])
def test_a_progress_bar_does_not_change_the_results(
    platform: FakeTransport, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, has_rich: bool
) -> None:
    if not has_rich:
        for name in ("rich.console", "rich.progress"):
            monkeypatch.setitem(sys.modules, name, None)
    assert list(squared.map(range(20), progress=True)) == [x * x for x in range(20)]
    output = capsys.readouterr()
    assert output.out == ""
    assert ("20/20" in output.err) is has_rich


def test_asyncio_has_the_same_map(platform: FakeTransport) -> None:
    async def numbers() -> AsyncIterator[tuple[int]]:
        for number in range(30):
            yield (number,)

    async def main() -> list[int]:
        results = squared.aio.starmap(numbers(), window=4)
        assert results.id is not None
        values_read = [value async for value in results]
        assert results.cursor == "30.30.30"
        return values_read

    assert asyncio.run(main()) == [x * x for x in range(30)]


def test_an_id_is_refused_without_a_gateway() -> None:
    with run_locally():
        with pytest.raises(InvalidInput, match="has an id"):
            squared.map(range(100), id="0" * 26)
        with pytest.raises(MapNotFound):
            Map.from_id("0" * 26)


def test_a_gateway_that_stays_unavailable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_RETRY_S", 0.0)

    def read(_: str) -> Iterator[list[ItemOutcome]]:
        raise GatewayUnavailable("gone")

    outcome_reader = reader.OutcomeReader(read, Cursor())
    outcome_reader.start()
    with pytest.raises(GatewayUnavailable, match="gone"):
        outcome_reader.take()


def test_a_separate_request_for_a_result_waits_for_the_gateway_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a large result became a failure of its item when the gateway was restarting."""
    away: list[Exception] = [GatewayUnavailable("restarting"), BusUnavailable("electing")]

    class Large(FakeTransport):
        def result(self, invocation: str, *, timeout_s: float | None = None) -> tuple[str, bytes]:
            if away:
                raise away.pop()
            return media.BYTES, invocation.encode()

    platform_map = PlatformMap(Large(), "1" * 26, MapOptions())
    end = ItemOutcome(media.MapOutcomeKind.BY_REFERENCE, 7, 10, 1, "", b"")
    assert platform_map.result_of(end) == (media.BYTES, f"{'1' * 26}-7".encode())
    away.append(GatewayUnavailable("gone"))
    monkeypatch.setattr(reader, "_RETRY_S", 0.0)
    with pytest.raises(GatewayUnavailable, match="gone"):
        platform_map.result_of(end)


def test_the_memory_of_a_reader_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MAX_OUTCOMES", 10)
    read_items: list[int] = []

    def read(_: str) -> Iterator[list[ItemOutcome]]:
        for end in outcomes(range(1000)):
            read_items.append(end.item)
            yield [end]

    outcome_reader = reader.OutcomeReader(read, Cursor())
    outcome_reader.start()
    taken: list[ItemOutcome] = []
    while (arrived := outcome_reader.take()) is not None:
        taken += arrived
        assert len(read_items) <= len(taken) + 13
    assert [end.item for end in taken] == list(range(1000))
