"""Maps of a function in this process: order, window, errors and options."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpufn import gpu_function
from gpufn.testing import run_locally
from gpufn_core.errors import FunctionRaised, InvalidInput


@gpu_function
def sum_of(a: int, b: int = 1) -> int:
    return a + b


def test_map_keeps_the_order_and_its_window() -> None:
    under_way, most = 0, 0
    lock = threading.Lock()
    three = threading.Barrier(3)

    def slow(a: int, b: int = 1) -> int:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        three.wait(30)  # so three calls run at the same time
        with lock:
            under_way -= 1
        return a

    with run_locally(sum_of=slow):
        assert list(sum_of.map(range(9), window=3)) == list(range(9))
    assert most == 3


def test_map_consumes_no_more_arguments_than_it_needs() -> None:
    taken = []

    def numbers() -> Iterator[int]:
        for n in range(1000):
            taken.append(n)
            yield n

    with run_locally():
        results = sum_of.map(numbers(), window=2)
        assert next(results) == 1
        results.close()
    assert len(taken) <= 3


def test_an_asyncio_map_can_be_closed() -> None:
    async def main() -> list[Any]:
        left: list[Any] = []
        for end in ("close", "cancel"):
            results = sum_of.aio.map(range(100), window=2)
            first = await anext(results)
            left.append((first, await getattr(results, end)(), [result async for result in results]))
        return left

    with run_locally():
        assert asyncio.run(main()) == [(1, None, []), (1, False, [])]


def test_an_asyncio_map_can_be_cancelled_while_a_task_waits_in_it() -> None:
    may_go_on = threading.Event()

    def held(a: int, b: int = 1) -> int:
        assert may_go_on.wait(30)
        return a + b

    async def main() -> tuple[bool, int]:
        results = sum_of.aio.map([1, 2], window=1)
        waiting = asyncio.ensure_future(anext(results))
        await asyncio.sleep(0)  # now it waits
        cancelled = await results.cancel()
        may_go_on.set()
        return cancelled, await waiting

    with run_locally(sum_of=held):
        assert asyncio.run(main()) == (False, 2)


def test_map_raises_the_first_failure_or_returns_it_in_its_place() -> None:
    def picky(a: int, b: int = 1) -> int:
        return 1 // a

    with run_locally(sum_of=picky):
        with pytest.raises(FunctionRaised):
            list(sum_of.map([1, 0]))
        good, bad = sum_of.map([1, 0], return_exceptions=True)
    assert (good, isinstance(bad, FunctionRaised)) == (1, True)


def test_starmap_unpacks_each_tuple() -> None:
    with run_locally():
        assert list(sum_of.starmap([(1, 2), (3, 4)])) == [3, 7]


@pytest.mark.parametrize(
    "begin",
    [
        lambda f: f.map([1]),
        lambda f: f.starmap([(1, 2)]),
        lambda f: f.aio.map([1]),
        lambda f: f.aio.starmap([(1, 2)]),
    ],
)
def test_a_map_has_no_timeout(begin: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        begin(sum_of.options(timeout=2))
    assert caught.value.field == "timeout"


@pytest.mark.parametrize("map_of", [sum_of.map, sum_of.starmap, sum_of.aio.map, sum_of.aio.starmap])
def test_an_unknown_option_of_a_map_raises_a_type_error_about_arguments(map_of: Callable[..., Any]) -> None:
    message = r"a map has no option 'b'; it has ordered, .*, and arguments of the function are iterables"
    with run_locally(), pytest.raises(TypeError, match=message):
        map_of([1, 2], b=5)
