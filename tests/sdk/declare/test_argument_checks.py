"""Wrong calls of what users import, which no type checker has seen: what they are told to write instead."""

from __future__ import annotations

import asyncio
import datetime
import functools
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import pytest

from gpufn import Call, Client, Graph, Map, Schedule, gather, gpu_function, method
from gpufn.testing import run_locally
from gpufn_core.errors import GatewayUnavailable, GpufnError, InvalidInput, InvalidSpec, Unauthorized


@gpu_function(name="given-pair")  # one of its own: other tests declare theirs in the same process
def _pair(a: int, b: int = 1) -> int:
    return a + b


@gpu_function(name="given-tally")
class _Tally:
    @method
    def add(self, by: int = 1) -> int:
        return by


pair: Any = _pair
Tally: Any = _Tally


async def _numbers() -> AsyncIterator[int]:
    yield 1


@pytest.fixture
def platform() -> Iterator[None]:
    with run_locally():
        yield


def _told(call: Callable[[], Any], kind: type[Exception] = InvalidInput) -> str:
    with pytest.raises(kind) as raised:
        call()
    assert isinstance(raised.value, GpufnError) or kind is TypeError
    return str(raised.value)


_TUPLES = "starmap takes a tuple of arguments per call, not {}; map takes one value per call"
_OF_TUPLES = "starmap takes an iterable of tuples, as in .starmap([(1, 2), (3, 4)]), not {}"
_NO_NAME = "{} is neither a name nor an id, which are text{}"
_NO_BYTES = "the body is bytes, such as json.dumps(...).encode(), not {}; client.invoke takes Python values"
_NO_SECONDS = "timeout_s is a number of seconds, not '3'"
_PER_ARGUMENT = "map takes an iterable for each argument, as in .map(range(10)), not {}"


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: list(pair.map(3)), _PER_ARGUMENT.format(3)),
        (lambda: list(pair.map([1], 3)), _PER_ARGUMENT.format(3)),
        (lambda: pair.aio.map([1], 3), _PER_ARGUMENT.format(3)),
        (lambda: list(pair.starmap(3)), _OF_TUPLES.format(3)),
        (lambda: pair.aio.starmap(3), _OF_TUPLES.format(3)),
        (lambda: list(pair.starmap([1])), _TUPLES.format(1)),
        (lambda: list(pair.starmap(["ab"])), _TUPLES.format("'ab'")),
        (lambda: list(pair.starmap([{"a": 1}])), _TUPLES.format("{'a': 1}")),
        (Tally.add, "_Tally.add(...) runs here and needs an instance: write _Tally().add(...), or "
                              "_Tally.add.remote(...) to run it on the platform"),
    ],
)  # fmt: skip
def test_a_call_of_another_shape_is_a_type_error_that_shows_the_right_one(call: Callable[[], Any], said: str) -> None:
    assert _told(call, TypeError) == said


@pytest.mark.usefixtures("platform")
def test_only_a_map_of_asyncio_takes_asynchronous_tuples() -> None:
    for begin in (pair.map, pair.starmap, pair.aio.map):
        told = _told(functools.partial(begin, _numbers()), TypeError)
        assert told.endswith("; aio.starmap takes an asynchronous one of tuples")

    async def all_of() -> list[int]:
        return [result async for result in pair.aio.starmap(_numbers())]

    assert _told(lambda: asyncio.run(all_of()), TypeError) == _TUPLES.format(1)


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: pair.map([1], window="3"), "window is a whole number, not '3'"),
        (lambda: pair.map([1], window=2.5), "window is a whole number, not 2.5"),
        (lambda: pair.map([1], window=0), "window is at least 1, not 0"),
        (lambda: pair.map([1], id=3), "3 is not a map's id, which has 26 letters and digits"),
        (lambda: pair.map([1], id="0" * 26, after=3), "3 is not a map's cursor"),
        (lambda: Map.from_id(cast("Any", 3)), "3 is not a map's id, which has 26 letters and digits"),
        (lambda: Call.from_id(cast("Any", 3)), "3 is not an invocation's id, which has 26 letters and digits"),
        (lambda: pair.spawn(1).result("3"), "timeout is a number of seconds, not '3'"),
        (lambda: gather(pair.spawn(1), timeout=cast("Any", "3")), "timeout is a number of seconds, not '3'"),
        (lambda: pair.options(priority=3), "a call's priority is hi, normal or low, not 3"),
        (lambda: pair.options(priority="low")(1),
         "<Function given-pair>.options(priority='low') is no call: use .remote(...)"),
        (lambda: Graph().run(cast("Any", "3")), "window is a whole number, not '3'"),
        (lambda: Graph().call(pair, 1).taking(cast("Any", "3")), "a step's cost is a number from 0 on, not '3'"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_refused_where_it_is_given(call: Callable[[], Any], said: str) -> None:
    assert _told(lambda: list(found) if hasattr(found := call(), "__next__") else found) == said


@pytest.mark.usefixtures("platform")
def test_gather_says_that_calls_are_given_one_by_one() -> None:
    calls = [pair.spawn(1)]
    for wrong in (calls, (call for call in calls)):
        told = _told(functools.partial(gather, cast("Any", wrong)))
        assert told.endswith("; give them one by one, as in gather(*calls)")


@pytest.mark.parametrize("wrong", ["pair", len, pair.remote, Tally, 3])
def test_a_step_is_of_a_function_that_has_not_been_called(wrong: Any) -> None:
    assert _told(lambda: Graph().call(wrong, 1)).startswith(
        "a step is a @gpu_function, or a @method of one, and its arguments, as in graph.call(f, 1), not "
    )


def test_a_step_that_does_not_fit_its_function_is_refused_where_it_is_written() -> None:
    said = "given-pair: got an unexpected keyword argument 'c'; it takes a, b=1"
    assert _told(lambda: Graph().call(pair, 1, c=2), TypeError) == said


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda client: client.function(3), _NO_NAME.format(3, "")),
        (lambda client: client.function(pair), _NO_NAME.format(pair, ": write 'given-pair'")),
        (lambda client: client.invoke(pair, a=1), _NO_NAME.format(pair, ": write 'given-pair'")),
        (lambda client: client.add_schedule(pair, in_s=5), _NO_NAME.format(pair, ": write 'given-pair'")),
        (lambda client: client.invoke_raw("f", {"a": 1}),
         _NO_BYTES.format({"a": 1})),
        (lambda client: client.submit("f", {"a": 1}),
         _NO_BYTES.format({"a": 1})),
        (lambda client: client.submit("f", b"{}", timeout_s="3"), _NO_SECONDS),
        (lambda client: client.invoke_raw("f", b"{}", priority="high"),
         "a call's priority is hi, normal or low, not 'high'"),
        (lambda client: client.submit("f", b"{}", webhook=3),
         "webhook is an address, such as 'https://example.org/done', not 3"),
        (lambda client: client.result_raw("0" * 26, timeout_s="3"), _NO_SECONDS),
        (lambda client: client.deploy(pair, timeout_s="3"), _NO_SECONDS),
        (lambda client: client.deploy(pair, include="data.txt"),
         "include is a list, such as ['data/*'], not 'data.txt'"),
        (lambda client: client.create_key("me", "read"), "scopes is a list, such as ['invoke:f', 'read'], not 'read'"),
        (lambda client: client.limit_key("id", rat=3),
         "there is no limit 'rat': there are rate, burst, concurrency, queued, run_s, gpu_s"),
        (lambda client: client.add_schedule("f", in_s=5, arguments=[3]),
         "arguments are named, such as {'full': True}, not [3]"),
        (lambda client: client.add_schedule("f", in_s=5, arguments={"x": object}),
         "arguments of a schedule are what JSON has words for: Encoding objects of type type is unsupported"),
    ],
)  # fmt: skip
def test_a_client_says_what_it_takes_before_it_sends_anything(call: Callable[[Any], Any], said: str) -> None:
    with Client("http://127.0.0.1:1") as client:
        assert _told(lambda: call(client)) == said


def test_arguments_of_invoke_have_names() -> None:
    with Client("http://127.0.0.1:1") as client:
        said = "invoke takes arguments by their names: invoke('f', x=1), or invoke('f', **{'x': 1})"
        assert _told(lambda: client.invoke("f", cast("Any", {"x": 1})), TypeError) == said


def test_a_list_of_functions_is_deployed_one_by_one() -> None:
    with Client("http://127.0.0.1:1") as client:
        said = "deploy takes functions one by one: deploy(*functions)"
        assert re.search(re.escape(said), _told(lambda: client.deploy(cast("Any", [pair])), InvalidSpec))


@pytest.mark.parametrize("wrong", [8090, "8090", True])
def test_an_address_that_is_a_number_is_none(wrong: Any) -> None:
    told = _told(lambda: Client(wrong), GatewayUnavailable)
    assert told == f"{wrong!r} is not an address: write for example http://127.0.0.1:8090"


def test_a_key_is_text() -> None:
    said = "api_key is not a key: it is no text; write it as `gpufn keys create` printed it"
    assert _told(lambda: Client(api_key=cast("Any", 3)), Unauthorized) == said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cron": 300}, "schedule: a cron line is text such as '*/5 * * * *', not 300"),
        ({"cron": "* * * * *", "timezone": 2}, "schedule: a time zone is text such as 'Europe/Berlin', not 2"),
        ({"cron": "* * * * *", "method": 2}, "schedule: method is the name of a method, not 2"),
        ({"at": "tomorrow"}, "schedule: at is a time in unix seconds, not 'tomorrow'"),
        ({"at": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)},
         "schedule: at is a time in unix seconds, not datetime.datetime(2026, 1, 1, 0, 0, "
         "tzinfo=datetime.timezone.utc): write .timestamp()"),
    ],
)  # fmt: skip
def test_a_schedule_says_what_it_takes(options: dict[str, Any], said: str) -> None:
    assert _told(lambda: Schedule(**options), InvalidSpec) == said
