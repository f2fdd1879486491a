"""When a batch forms (as tables), and the end of its calls (with a real worker)."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import pytest

from gpufn_core.spec.function_spec import Batch
from gpufn_runtime.worker.execute.batch_rules import Gathering

Start = Any


@pytest.mark.parametrize(
    ("script", "batches"),
    [
        # "a..z" arrives, "." a millisecond passes, "|" the oldest running batch ends; max_size 3, max_wait 5 ms
        ("a", ["a"]),
        ("ab", ["a"]),
        ("ab|", ["a", "b"]),
        ("abcd", ["a"]),
        ("abcde|", ["a", "bcd"]),
        ("abcde||", ["a", "bcd", "e"]),
        ("a|b", ["a", "b"]),
        ("ab......", ["a"]),
    ],
)
def test_with_one_batch_at_a_time(script: str, batches: list[str]) -> None:
    assert _play(script, concurrency=1) == batches


@pytest.mark.parametrize(
    ("script", "batches"),
    [
        ("ab", ["a"]),
        ("ab....", ["a"]),
        ("ab.....", ["a", "b"]),
        ("abc.....", ["a", "bc"]),
        ("abcd", ["a", "bcd"]),
        ("abcdefgh.......", ["a", "bcd"]),
        ("ab|", ["a", "b"]),
        ("abcdef|", ["a", "bcd", "ef"]),
    ],
)
def test_with_two_batches_at_a_time(script: str, batches: list[str]) -> None:
    assert _play(script, concurrency=2) == batches


def test_methods_do_not_mix() -> None:
    gathering = Gathering[str]({"m": Batch(max_size=9), "n": Batch(max_size=9)}, 1)
    gathering.add("m", "a", 0.0)
    assert gathering.take(0.0) == ["a"]
    for at, method, call in ((1.0, "n", "b"), (1.1, "m", "c"), (1.2, "n", "d")):
        gathering.add(method, call, at)
    gathering.ended()
    assert gathering.take(2.0) == ["b", "d"]
    gathering.ended()
    assert gathering.take(2.0) == ["c"]


def test_each_method_has_its_own_size_and_wait() -> None:
    gathering = Gathering[str]({"big": Batch(max_size=4, max_wait_ms=5), "single": Batch(1)}, 2)
    for method, call in (("big", "a"), ("big", "b"), ("single", "c"), ("single", "d")):
        gathering.add(method, call, 0.0)
    assert gathering.take(0.0) == ["a", "b"]
    assert gathering.take(0.0) == ["c"]
    gathering.ended()
    assert gathering.take(0.001) == ["d"]


def test_it_returns_the_time_of_the_next_check() -> None:
    gathering = Gathering[str]({"": Batch(max_size=9, max_wait_ms=5)}, 2)
    assert gathering.due_at() is None
    gathering.add("", "a", 0.0)
    gathering.take(0.0)
    gathering.add("", "b", 1.0)
    assert gathering.due_at() == 1.005
    assert gathering.take(1.004) is None
    assert gathering.take(1.005) == ["b"]


def _play(script: str, concurrency: int) -> list[str]:
    gathering = Gathering[str]({"": Batch(max_size=3, max_wait_ms=5)}, concurrency)
    now, batches = 0.0, []
    for step in script:
        if step == ".":
            now = round(now + 0.001, 6)
        elif step == "|":
            gathering.ended()
        else:
            gathering.add("", step, now)
        while (batch := gathering.take(now)) is not None:
            batches.append("".join(batch))
    return batches


_HELD = """
    import gpufn.call.transport
    from gpufn.call.transport_protocol import EncodedCall, Target
    def f(x: list[int], hold: list[bool] = [False]):
        if any(hold):
            gpufn.call.transport.current().call(EncodedCall(Target("other"), "", b""))
        print(len(x))
        if 13 in x: raise ValueError("thirteen")
        return [Exception("odd") if one == 7 else [one, len(x)] for one in x]
    """


def _gather(worker: Any, *bodies: bytes) -> dict[int, Any]:
    """Run `bodies` together while a first call occupies the worker; returns results by position."""
    first = worker.run(b'{"x": 0, "hold": true}')
    call, _ = worker.next()
    numbers = [worker.run(body) for body in bodies]
    worker.answer(call.call, "", b"")
    assert worker.result()[0].attempt == first
    found = {}
    for _ in bodies:
        result, body = worker.result()
        place = numbers.index(result.attempt)
        found[place] = body if result.error is None else (result.kind.value, result.error.message)
    return found


def test_a_call_that_finds_the_worker_idle_runs_at_once(start: Start) -> None:
    worker = start(_HELD, batch=Batch(max_size=8, max_wait_ms=60_000))
    assert worker.call(b'{"x": 1}') == b"[1,1]"
    assert worker.call(b'{"x": 2}') == b"[2,1]"


def test_calls_that_arrive_while_a_batch_runs_run_together(start: Start) -> None:
    worker = start(_HELD, batch=Batch(max_size=3))
    found = _gather(worker, *(b'{"x": %d}' % x for x in range(1, 6)))
    assert found == {0: b"[1,3]", 1: b"[2,3]", 2: b"[3,3]", 3: b"[4,2]", 4: b"[5,2]"}


_MIXED = """
    import gpufn.call.transport
    from gpufn.call.transport_protocol import EncodedCall, Target
    class C:
        def many(self, x: list[int], hold: list[bool] = [False]):
            if any(hold):
                gpufn.call.transport.current().call(EncodedCall(Target("other"), "", b""))
            return [[one, len(x)] for one in x]
        def one(self, x: int): return x
        async def soon(self, x: int): return x
        def items(self, x: int): yield x
        async def later(self, x: int): yield x
    """
_KINDS = {"many": "sync", "one": "sync", "soon": "async", "items": "generator", "later": "async_generator"}


def test_methods_without_batches_alternate_with_those_that_have_them(start: Start) -> None:
    worker = start(_MIXED, "C", methods=_KINDS, batches={"many": Batch(3)})
    worker.run(b'{"x": 0, "hold": true}', method="many")
    call, _ = worker.next()
    numbers = {worker.run(b'{"x": 1}', method=method): method for method in ("many", *_KINDS)}
    worker.answer(call.call, "", b"")
    worker.result()
    found = [(numbers[result.attempt], body) for result, body in (worker.result() for _ in numbers)]
    assert found[:2] == [("many", b"[1,2]"), ("many", b"[1,2]")]  # the oldest first, with the other call of its method
    assert dict(found[2:]) == {"one": b"1", "soon": b"1", "items": b"[1]", "later": b"[1]"}


def _charges(worker: Any, *bodies: bytes) -> list[tuple[float, float | None]]:
    """How long each of `bodies`, which run together, ran, and how much it is charged."""
    worker.run(b'{"x": 0, "hold": true}')
    call, _ = worker.next()
    for body in bodies:
        worker.run(body)
    worker.answer(call.call, "", b"")
    worker.result()
    results = [worker.result()[0] for _ in bodies]
    return [(result.run_s, result.charged_s) for result in results]


def test_the_time_of_a_batch_is_charged_once_in_equal_parts(start: Start) -> None:
    worker = start(_HELD, batch=Batch(max_size=8))
    found = _charges(worker, *(b'{"x": %d}' % x for x in range(1, 6)))
    charged = [charged_s for _, charged_s in found if charged_s is not None]
    assert len(set(charged)) == 1
    assert 0 < sum(charged) <= min(run_s for run_s, _ in found)


def test_the_time_of_a_batch_that_failed_is_charged_too(start: Start) -> None:
    source = """
    import time
    import gpufn.call.transport
    from gpufn.call.transport_protocol import EncodedCall, Target
    def f(x: list[int], hold: list[bool] = [False]):
        if any(hold):
            gpufn.call.transport.current().call(EncodedCall(Target("other"), "", b""))
        elif len(x) > 1:
            time.sleep(0.2)
            raise ValueError("not together")
        return x
    """
    found = _charges(start(source, batch=Batch(max_size=8)), b'{"x": 1}', b'{"x": 2}')
    assert all(charged_s is not None and charged_s >= 0.1 > run_s for run_s, charged_s in found)


def test_a_bad_call_fails_alone(start: Start) -> None:
    worker = start(_HELD, batch=Batch(max_size=8))
    found = _gather(worker, b'{"x": 1}', b'{"x": "no"}', b'{"x": 7}', b'{"x": 2}')
    kind, message = found.pop(1)
    assert (kind, message.partition(":")[0]) == ("rejected", "x")
    assert found == {0: b"[1,3]", 2: ("raised", "odd"), 3: b"[2,3]"}


def test_when_a_batch_raises_its_calls_run_one_by_one(start: Start) -> None:
    worker = start(_HELD, batch=Batch(max_size=8))
    found = _gather(worker, b'{"x": 1}', b'{"x": 13}', b'{"x": 2}')
    assert found == {0: b"[1,1]", 1: ("raised", "thirteen"), 2: b"[2,1]"}
    told = "a batch of 3 calls failed, running each call alone: ValueError: thirteen"
    assert worker.logs[1:] == [
        (0, "stdout", "3"), (0, "stderr", told), (2, "stdout", "1"), (3, "stdout", "1"), (4, "stdout", "1"),
    ]  # fmt: skip


def test_calls_of_a_failed_batch_run_without_its_objects(start: Start) -> None:
    """Regression: a call that had filled the GPU's memory held it while each call ran alone, so that these failed."""
    worker = start(
        """
        import gpufn.call.transport
        from gpufn.call.transport_protocol import EncodedCall, Target
        held = 0
        class Large:
            def __init__(self):
                global held
                held += 1
            def __del__(self):
                global held
                held -= 1
        def f(x: list[int], hold: list[bool] = [False]):
            if any(hold):
                gpufn.call.transport.current().call(EncodedCall(Target("other"), "", b""))
            large = Large()
            if len(x) > 1: raise RuntimeError("out of memory")
            return [held]
        """,
        batch=Batch(max_size=8),
    )
    assert _gather(worker, b'{"x": 1}', b'{"x": 2}') == {0: b"1", 1: b"1"}


@pytest.mark.parametrize(
    "odd",
    [
        "class Odd(Exception):\n    def __str__(self): raise RuntimeError",
        "class Odd(Exception): ...\nimport sys\nsys.stderr = open('/dev/null', 'w')\nsys.stderr.close()",
    ],
    ids=["it has no text", "stderr is closed"],
)
def test_a_batch_whose_error_cannot_be_logged_runs_its_calls_alone(start: Start, odd: str) -> None:
    source = textwrap.dedent(_HELD).replace("Exception(", "ValueError(").replace('ValueError("thirteen")', "Odd")
    worker = start(f"{odd}\n{source}", batch=Batch(max_size=8))
    found = _gather(worker, b'{"x": 1}', b'{"x": 13}')
    assert found[0] == b"[1,1]"
    assert found[1][0] == "raised"


def test_a_result_of_another_length_fails_every_call(start: Start) -> None:
    worker = start("def f(x): return [1, 2]", batch=Batch(max_size=8))
    error = worker.failure(b'{"x": 1}')[1]
    assert (error.error_type, *re.findall(r"\d+", error.message)) == ("ValueError", "2", "1")


def test_a_result_that_is_not_a_list_is_reported(start: Start) -> None:
    worker = start("def f(x): return 'text'", batch=Batch(max_size=8))
    error = worker.failure(b'{"x": 1}')[1]
    assert error.error_type == "TypeError"
    assert error.message.endswith(" str")


def test_an_async_function_gathers_too(start: Start) -> None:
    worker = start("async def f(x: list[int]): return [one * 2 for one in x]", kind="async", batch=Batch(max_size=8))
    numbers = [worker.run(b'{"x": %d}' % x) for x in range(20)]
    answers = {result.attempt: body for result, body in (worker.result() for _ in numbers)}
    assert [answers[number] for number in numbers] == [b"%d" % (2 * x) for x in range(20)]


def test_two_batches_run_at_once_when_the_oldest_has_waited(start: Start) -> None:
    worker = start(_HELD, batch=Batch(max_size=8, max_wait_ms=1), concurrency=2)
    held = worker.run(b'{"x": 1, "hold": true}')
    call, _ = worker.next()
    other = worker.run(b'{"x": 2}')
    assert worker.result()[0].attempt == other
    worker.answer(call.call, "", b"")
    assert worker.result()[0].attempt == held
