"""Wrong calls of the SDK that no type checker saw: the error says what to write instead."""

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


@gpu_function(name="given-pair")  # a unique name: other tests declare functions in the same process
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


def _error_of(call: Callable[[], Any], kind: type[Exception] = InvalidInput) -> str:
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
    ("call", "message"),
    [
        (lambda: list(pair.map(3)), _PER_ARGUMENT.format(3)),
        (lambda: list(pair.map([1], 3)), _PER_ARGUMENT.format(3)),
        (lambda: pair.aio.map([1], 3), _PER_ARGUMENT.format(3)),
        (lambda: list(pair.starmap(3)), _OF_TUPLES.format(3)),
        (lambda: pair.aio.starmap(3), _OF_TUPLES.format(3)),
        (lambda: list(pair.starmap([1])), _TUPLES.format(1)),
        (lambda: list(pair.starmap(["ab"])), _TUPLES.format("'ab'")),
        (lambda: list(pair.starmap([{"a": 1}])), _TUPLES.format("{'a': 1}")),
        (Tally.add, "_Tally.add(...) is a local call and needs an instance: write _Tally().add(...), or "
                              "_Tally.add.remote(...) to run it on the platform"),
    ],
)  # fmt: skip
def test_a_call_of_the_wrong_shape_raises_a_type_error_with_the_right_shape(
    call: Callable[[], Any], message: str
) -> None:
    assert _error_of(call, TypeError) == message


@pytest.mark.usefixtures("platform")
def test_only_an_asyncio_map_accepts_an_asynchronous_iterable() -> None:
    for begin in (pair.map, pair.starmap, pair.aio.map):
        message = _error_of(functools.partial(begin, _numbers()), TypeError)
        assert "aio.starmap" in message

    async def all_of() -> list[int]:
        return [result async for result in pair.aio.starmap(_numbers())]

    assert _error_of(lambda: asyncio.run(all_of()), TypeError) == _TUPLES.format(1)


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pair.map([1], window="3"), "window is an integer, not '3'"),
        (lambda: pair.map([1], window=2.5), "window is an integer, not 2.5"),
        (lambda: pair.map([1], window=0), "window is at least 1, not 0"),
        (lambda: pair.map([1], id=3), "3 is not a map's id, which has 26 letters and digits"),
        (lambda: pair.map([1], id="0" * 26, after=3), "3 is not a map's cursor"),
        (lambda: Map.from_id(cast("Any", 3)), "3 is not a map's id, which has 26 letters and digits"),
        (lambda: Call.from_id(cast("Any", 3)), "3 is not an invocation's id, which has 26 letters and digits"),
        (lambda: pair.spawn(1).result("3"), "timeout is a number of seconds, not '3'"),
        (lambda: gather(pair.spawn(1), timeout=cast("Any", "3")), "timeout is a number of seconds, not '3'"),
        (lambda: pair.options(priority=3), "a call's priority is hi, normal or low, not 3"),
        (lambda: pair.options(priority="low")(1),
         "<Function given-pair>.options(priority='low') is not callable: use .remote(...)"),
        (lambda: Graph().run(cast("Any", "3")), "window is an integer, not '3'"),
        (lambda: Graph().call(pair, 1).taking(cast("Any", "3")), "a step's cost is a number of at least 0, not '3'"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_at_the_call(call: Callable[[], Any], message: str) -> None:
    assert _error_of(lambda: list(result) if hasattr(result := call(), "__next__") else result) == message


@pytest.mark.usefixtures("platform")
def test_gather_refuses_a_list_of_calls() -> None:
    calls = [pair.spawn(1)]
    for wrong in (calls, (call for call in calls)):
        message = _error_of(functools.partial(gather, cast("Any", wrong)))
        assert message.endswith("gather(*calls)")


@pytest.mark.parametrize("wrong", ["pair", len, pair.remote, Tally, 3])
def test_a_step_accepts_a_function_and_not_the_result_of_a_call(wrong: Any) -> None:
    message = _error_of(lambda: Graph().call(wrong, 1))
    assert "graph.call(f, 1)" in message
    assert message.endswith(repr(wrong))


def test_a_step_that_does_not_fit_its_function_is_refused_when_it_is_added() -> None:
    message = "given-pair: got an unexpected keyword argument 'c'; it takes a, b=1"
    assert _error_of(lambda: Graph().call(pair, 1, c=2), TypeError) == message


@pytest.mark.parametrize(
    ("call", "message"),
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
         "unknown limit 'rat'; the limits are rate, burst, concurrency, queued, run_s, gpu_s"),
        (lambda client: client.add_schedule("f", in_s=5, arguments=[3]),
         "arguments must map names to values, such as {'full': True}, not [3]"),
        (lambda client: client.add_schedule("f", in_s=5, arguments={"x": object}),
         "cannot encode the schedule's arguments as JSON: Encoding objects of type type is unsupported"),
    ],
)  # fmt: skip
def test_a_client_checks_its_arguments_before_it_sends_a_request(call: Callable[[Any], Any], message: str) -> None:
    with Client("http://127.0.0.1:1") as client:
        assert _error_of(lambda: call(client)) == message


def test_arguments_of_invoke_have_names() -> None:
    with Client("http://127.0.0.1:1") as client:
        message = "invoke takes keyword arguments only: invoke('f', x=1), or invoke('f', **{'x': 1})"
        assert _error_of(lambda: client.invoke("f", cast("Any", {"x": 1})), TypeError) == message


def test_a_list_of_functions_is_deployed_one_by_one() -> None:
    with Client("http://127.0.0.1:1") as client:
        message = "deploy takes functions one by one: deploy(*functions)"
        assert re.search(re.escape(message), _error_of(lambda: client.deploy(cast("Any", [pair])), InvalidSpec))


@pytest.mark.parametrize("wrong", [8090, "8090", True])
def test_a_number_is_not_an_address(wrong: Any) -> None:
    message = _error_of(lambda: Client(wrong), GatewayUnavailable)
    assert message.startswith(repr(wrong))
    assert message.endswith("http://127.0.0.1:8090")


def test_a_key_is_a_string() -> None:
    message = "api_key is not a key: it is not a string; copy it exactly as `gpufn keys create` printed it"
    assert _error_of(lambda: Client(api_key=cast("Any", 3)), Unauthorized) == message


@pytest.mark.parametrize(
    ("options", "message"),
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
def test_a_schedule_checks_its_arguments(options: dict[str, Any], message: str) -> None:
    assert _error_of(lambda: Schedule(**options), InvalidSpec) == message
