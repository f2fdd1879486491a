"""Graphs and `gather`, with functions that run in this process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import NamedTuple

import pytest

from gpufn import Call, Graph, gather, gpu_function
from gpufn.call import transport as _transport
from gpufn.testing import LocalTransport, run_locally
from gpufn_core.errors import FunctionRaised, InvalidInput
from gpufn_core.ids import new_invocation_id


@gpu_function
def increased(a: int, b: int = 0) -> int:
    return a + b


@gpu_function
def joined(parts: list[int], more: dict[str, int]) -> int:
    return sum(parts) + sum(more.values())


@gpu_function
def breaks(message: str) -> int:
    raise ValueError(message)


class Pair(NamedTuple):
    a: int
    b: int


@gpu_function
def head_of(pair: Pair) -> int:
    return pair[0]


def test_results_replace_steps_anywhere_in_the_arguments() -> None:
    graph = Graph()
    one, two = graph.call(increased, 1), graph.call(increased, 2)
    three = graph.call(increased, one, b=two)
    whole = graph.call(joined, [one, two, three, 10], {"x": three})
    kept = graph.call(head_of, Pair(7, 8))
    with run_locally():
        ended = list(graph.run())
    assert (three.result, whole.result, kept.result) == (3, 19, 7)
    assert (len(ended), len(graph)) == (5, 5)
    assert ended.index(three) > max(ended.index(one), ended.index(two))
    assert ended.index(whole) > ended.index(three)


def test_at_most_window_calls_run_at_a_time() -> None:
    lock, here, most = threading.Lock(), 0, 0

    def counted(number: int) -> int:
        nonlocal here, most
        with lock:
            here += 1
            most = max(most, here)
        threading.Event().wait(0.002)
        with lock:
            here -= 1
        return number

    graph = Graph()
    for number in range(20):
        graph.call(increased, number)
    with run_locally(increased=counted):
        assert len(list(graph.run(window=3))) == 20
    assert most <= 3


def test_the_first_failure_is_raised_with_its_step_and_its_dependents_never_run() -> None:
    graph = Graph()
    bad = graph.call(breaks, "no")
    after = graph.call(increased, bad)
    with run_locally() as platform:
        with pytest.raises(FunctionRaised, match="no") as raised:
            list(graph.run())
        assert [call.function for call in platform.calls] == ["breaks"]
    assert "in <Step 0 <Function breaks>>" in raised.value.__notes__
    with pytest.raises(InvalidInput, match="<Step 1 <Function increased>> has not ended"):
        _ = after.result


def test_wrong_uses_of_a_graph_are_refused() -> None:
    graph, other = Graph(), Graph()
    step = other.call(increased, 1)
    with pytest.raises(InvalidInput, match=r"<Step 0 .*another graph"):
        graph.call(increased, step)
    with pytest.raises(InvalidInput, match=r"window.* 1, not 0"):
        list(other.run(window=0))
    with pytest.raises(InvalidInput, match="a step's cost"):
        step.taking(-1)
    assert list(graph.run()) == []


def test_gather_returns_results_in_order_and_failures_if_requested() -> None:
    with run_locally():
        calls = [increased.spawn(1), breaks.spawn("no"), increased.spawn(3)]
        assert gather(calls[0], calls[2]) == [1, 3]
        assert gather() == []
        with pytest.raises(InvalidInput, match=r"\.spawn.*, not 1"):
            gather(1)  # type: ignore[arg-type]
        with pytest.raises(FunctionRaised, match="no"):
            gather(*calls)
        one, error, three = gather(*calls, return_exceptions=True)
        assert (one, three, isinstance(error, FunctionRaised)) == (1, 3, True)


def test_gather_returns_results_that_are_none() -> None:
    with run_locally(increased=lambda a: None):
        assert gather(increased.spawn(1), increased.spawn(2)) == [None, None]


class _NeverEnds(LocalTransport):
    """A transport whose calls never end. `timeouts` has the timeout of each wait."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[float | None] = []

    def result(self, invocation: str, *, timeout_s: float | None = None) -> tuple[str, bytes]:
        self.timeouts.append(timeout_s)
        until = time.monotonic() + (timeout_s or 0.0) + 0.001
        while time.monotonic() < until:
            threading.Event().wait(timeout_s)
        raise TimeoutError(invocation)


def test_the_timeout_of_gather_starts_at_the_same_time_for_all_calls() -> None:
    before, transport = _transport.installed(), _NeverEnds()
    _transport.install(transport)
    try:
        calls = [Call.from_id(new_invocation_id()) for _ in range(150)]
        errors = gather(*calls, timeout=0.05, return_exceptions=True)
    finally:
        _transport.install(before)
    assert {type(error) for error in errors} == {TimeoutError}
    assert all(call.id in str(error) and "0.05 s" in str(error) for call, error in zip(calls, errors, strict=True))
    assert sum(timeout_s != 0 for timeout_s in transport.timeouts) <= 64


LEAVES = """
import threading
from gpufn import Call, gather
from gpufn.call import transport as _transport
from gpufn.errors import FunctionRaised
from gpufn_core.ids import new_invocation_id
from gpufn.testing import LocalTransport

calls = [Call.from_id(new_invocation_id()) for _ in range(2)]
is_waited_for = threading.Event()

class OneFails(LocalTransport):
    def result(self, invocation, *, timeout_s=None):
        if invocation == calls[0].id:
            is_waited_for.wait()
            raise FunctionRaised("no", error_type="ValueError", traceback="")
        is_waited_for.set()
        threading.Event().wait()

_transport.install(OneFails())
try:
    gather(*calls)
except FunctionRaised as error:
    print(error.message)
"""


def test_calls_that_gather_no_longer_waits_for_do_not_keep_the_program_alive() -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "no\n", "")
