"""A function's use of its model, and runs shared by calls of several threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpufn_core.errors import InvalidInput
from gpufn_runtime.worker.engines import run_sharing
from gpufn_runtime.worker.engines.base import Arrays
from gpufn_runtime.worker.engines.session import Session
from tests.runtime.worker.engines.engines import FakeEngine, manifest, rows, tensor

PATIENCE_S = 20


def test_one_output_is_its_array_and_several_are_named() -> None:
    assert Session(FakeEngine())(rows(1))[0].tolist() == [-1, -1]
    both = Session(FakeEngine(manifest([tensor("a"), tensor("b")], [tensor("p"), tensor("q")])))(rows(1), b=rows(2))
    assert both["p"].tolist() == [[-1, -1]]
    assert both.q.tolist() == [[-2, -2]]
    with pytest.raises(AttributeError, match=r"'r'.*p, q"):
        _ = both.r


def test_lists_and_numbers_become_arrays_of_the_models_dtype() -> None:
    engine = FakeEngine()
    assert Session(engine)([[1, 2]]).tolist() == [[-1, -2]]
    assert engine.runs[0]["x"].dtype == np.float32


def test_a_session_describes_itself() -> None:
    session = Session(FakeEngine())
    assert repr(session) == "<session of model.onnx on onnxruntime-cpu: x FP32[-1,2] to y FP32[-1,2]>"
    assert (session.inputs[0].name, session.outputs[0].name, session.manifest.max_batch) == ("x", "y", 8)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ([rows(1), rows(1)], {}, "2 arrays for 1 inputs: x"),
        ([rows(1)], {"x": rows(1)}, "x: given twice"),
        ([], {"y": rows(1)}, "y: the model has no such input"),
        ([np.zeros((1, 2))], {}, r"x: the model takes float32, but this array is float64: use .astype"),
        ([[["a", "b"]]], {}, "x: cannot be converted to FP32"),
    ],
)
def test_a_wrong_call_is_the_callers_mistake(args: list[Any], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Session(FakeEngine())(*args, **kwargs)


class Held:
    """An engine whose first run waits for `release`, so that calls queue behind it."""

    def __init__(self, parallel: int = 1, fail: Callable[[Arrays], bool] = lambda _: False, **fields: Any) -> None:
        self.running = threading.Semaphore(0)
        self._go_on = threading.Event()
        self._fail = fail
        self.engine = FakeEngine(manifest(**fields), parallel, self._before)
        self.session = Session(self.engine)

    def _before(self, inputs: Arrays) -> None:
        self.running.release()
        assert self._go_on.wait(PATIENCE_S)
        if self._fail(inputs):
            raise RuntimeError("the engine failed")

    def release(self) -> None:
        self._go_on.set()

    def wait_for_callers(self, count: int) -> None:
        """Wait until this many calls wait behind the running one."""
        runs = self.session._runs
        patience = threading.Event()
        while len(runs._waiting) < count:
            patience.wait(0.001)

    def run_sizes(self) -> list[int]:
        return [len(inputs["x"]) for inputs in self.engine.runs]


def _call_while_busy(held: Held, *calls: Any) -> list[Future[Any]]:
    pool = ThreadPoolExecutor(len(calls) + 1)
    first = pool.submit(held.session, rows(0))
    assert held.running.acquire(timeout=PATIENCE_S)
    futures = []
    for count, call in enumerate(calls, 1):
        futures.append(pool.submit(held.session, call))
        held.wait_for_callers(count)
    held.release()
    pool.shutdown()
    assert first.result().tolist() == [[0, 0]]
    return futures


def test_calls_that_wait_share_the_next_run() -> None:
    held = Held(max_batch=4)
    futures = _call_while_busy(held, *(rows(value) for value in range(1, 7)))
    assert [future.result()[:, 0].tolist() for future in futures] == [[-value] for value in range(1, 7)]
    assert held.run_sizes() == [1, 4, 2]


def test_a_call_with_an_engine_error_fails_alone() -> None:
    held = Held(fail=lambda inputs: 13 in inputs["x"])
    good, bad, other = _call_while_busy(held, rows(1), rows(13), rows(2))
    assert (good.result()[0, 0], other.result()[0, 0]) == (-1, -2)
    with pytest.raises(RuntimeError, match="the engine failed"):
        bad.result()
    assert held.session(rows(5))[0, 0] == -5, "and the next call finds the engine free"


def test_where_rows_mean_nothing_calls_run_one_by_one() -> None:
    held = Held(batched=False)
    futures = _call_while_busy(held, rows(1), rows(2))
    assert [future.result()[0, 0] for future in futures] == [-1, -2]
    assert held.run_sizes() == [1, 1, 1]


def test_a_waiting_call_that_a_signal_handler_interrupts_blocks_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise TimeoutError("alarm")

    held = Held()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(held.session, rows(0))
        assert held.running.acquire(timeout=PATIENCE_S)
        monkeypatch.setattr(run_sharing, "threading", SimpleNamespace(Event=Interrupted))
        with pytest.raises(TimeoutError, match="alarm"):
            held.session(rows(1))
        still_waiting = len(held.session._runs._waiting)
        held.release()
    assert (first.result().tolist(), still_waiting) == ([[0, 0]], 0)
    assert held.session(rows(5))[0, 0] == -5


def test_as_many_runs_at_once_as_the_engine_allows() -> None:
    held = Held(parallel=2)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(held.session, rows(value)) for value in (1, 2)]
        assert held.running.acquire(timeout=PATIENCE_S)
        assert held.running.acquire(timeout=PATIENCE_S)
        futures.append(pool.submit(held.session, rows(3)))
        held.wait_for_callers(1)
        held.release()
    assert [future.result()[0, 0] for future in futures] == [-1, -2, -3]


def test_tasks_of_an_event_loop_share_runs_too() -> None:
    held = Held(max_batch=4)

    async def main() -> list[Any]:
        first = asyncio.create_task(held.session.aio(rows(0)))
        await asyncio.to_thread(held.running.acquire)
        others = [asyncio.create_task(held.session.aio(rows(value))) for value in (1, 2, 3)]
        await asyncio.to_thread(held.wait_for_callers, 3)
        held.release()
        return await asyncio.gather(first, *others)

    assert [answer[0, 0] for answer in asyncio.run(main())] == [0, -1, -2, -3]
    assert held.run_sizes() == [1, 3]


def test_a_task_cancelled_while_it_waits_blocks_no_other() -> None:
    held = Held()

    async def main() -> Any:
        first = asyncio.create_task(held.session.aio(rows(0)))
        await asyncio.to_thread(held.running.acquire)
        given_up, last = (asyncio.create_task(held.session.aio(rows(value))) for value in (1, 2))
        await asyncio.to_thread(held.wait_for_callers, 2)
        given_up.cancel()
        await asyncio.wait([given_up])
        assert given_up.cancelled()
        held.release()
        await first
        return await last

    assert asyncio.run(main())[0, 0] == -2
    assert held.run_sizes() == [1, 1]


def test_a_task_that_is_cancelled_as_it_becomes_the_leader_passes_it_on() -> None:
    held = Held()
    runs = held.session._runs

    async def main() -> Any:
        first = asyncio.create_task(held.session.aio(rows(0)))
        await asyncio.to_thread(held.running.acquire)
        given_up = asyncio.create_task(held.session.aio(rows(1)))
        await asyncio.to_thread(held.wait_for_callers, 1)
        last = asyncio.create_task(held.session.aio(rows(2)))
        await asyncio.to_thread(held.wait_for_callers, 2)
        held.release()
        while runs._waiting and runs._waiting[0].fitted.inputs["x"][0, 0] == 1:  # without yielding to `given_up`
            pass
        given_up.cancel()
        await asyncio.wait([given_up])
        await first
        return await asyncio.wait_for(last, PATIENCE_S)

    assert asyncio.run(main())[0, 0] == -2


def test_a_task_leads_though_all_of_its_loops_threads_wait_for_it() -> None:
    held = Held(batched=False)

    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        threads = ThreadPoolExecutor(1)
        loop.set_default_executor(threads)
        first = threading.Thread(target=held.session, args=[rows(0)], daemon=True)
        first.start()
        assert held.running.acquire(timeout=PATIENCE_S)
        leader = asyncio.create_task(held.session.aio(rows(1)))
        await asyncio.sleep(0)
        behind = loop.run_in_executor(None, held.session, rows(2))
        held.wait_for_callers(2)
        held.release()
        return [await asyncio.wait_for(each, PATIENCE_S) for each in (leader, behind)]

    assert [answer[0, 0] for answer in asyncio.run(main())] == [-1, -2]


def test_a_task_with_a_closed_loop_blocks_no_other() -> None:
    held = Held(max_batch=1)
    pool = ThreadPoolExecutor(2)
    first = pool.submit(held.session, rows(0))
    assert held.running.acquire(timeout=PATIENCE_S)
    loop = asyncio.new_event_loop()
    gone = loop.create_task(held.session.aio(rows(1)))
    loop.run_until_complete(asyncio.sleep(0))
    held.wait_for_callers(1)
    last = pool.submit(held.session, rows(2))
    held.wait_for_callers(2)
    loop.close()  # and the task is in the middle of it
    held.release()
    assert first.result(PATIENCE_S)[0, 0] == 0
    assert last.result(PATIENCE_S)[0, 0] == -2
    pool.shutdown()
    gone._log_destroy_pending = False  # type: ignore[attr-defined]  # it is meant to be


def test_a_leader_cancelled_before_it_has_a_thread_blocks_no_other() -> None:
    session = Session(FakeEngine())

    async def main() -> Any:
        go_on = threading.Event()
        session._runs._threads().submit(go_on.wait, PATIENCE_S)
        given_up = asyncio.create_task(session.aio(rows(1)))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        go_on.set()
        return await asyncio.wait_for(session.aio(rows(2)), PATIENCE_S)

    assert asyncio.run(main())[0, 0] == -2


def test_a_call_of_too_many_rows_runs_in_parts() -> None:
    engine = FakeEngine(manifest(max_batch=4))
    assert Session(engine)(rows(*range(10)))[:, 0].tolist() == [-value for value in range(10)]
    assert [len(inputs["x"]) for inputs in engine.runs] == [4, 3, 3]
