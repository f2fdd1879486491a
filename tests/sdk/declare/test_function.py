"""Calls of functions and classes in this process, and their options."""

from __future__ import annotations

import asyncio
import gc
import io
import pickle
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, assert_type, cast

import cloudpickle
import pytest

from gpufn import Batch, Call, Graph, Retry, current, enter, exit, gpu_function, method  # noqa: A004
from gpufn.call import transport as _transport
from gpufn.call.transport_protocol import EncodedCall, Target
from gpufn.testing import LocalTransport, RemoteCall, run_locally
from gpufn_core.errors import FunctionNotFound, FunctionRaised, InvalidInput, InvocationNotFound


@gpu_function
def plus(a: int, b: int = 1) -> int:
    return a + b


@gpu_function
def fail(message: str) -> None:
    raise LookupError(message)


@gpu_function
def count(n: int) -> Iterator[int]:
    yield from range(n)


@gpu_function
async def double(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x


@gpu_function
async def letters(text: str) -> AsyncIterator[str]:
    for letter in text:
        yield letter


@gpu_function(batch=Batch(8))
def lengths(text: list[str]) -> list[int]:
    return [len(one) for one in text]


@gpu_function
class Tally:
    def __init__(self, start: int = 0) -> None:
        self.total = start

    @enter
    def begin(self) -> None:
        self.total += 100

    @method
    def add(self, n: int) -> int:
        self.total += n
        return self.total

    @method
    def upto(self, n: int) -> Iterator[int]:
        yield from range(n)

    @exit
    def end(self) -> None:
        ended.append(self.total)


ended: list[int] = []


def test_a_local_call_is_plain_python() -> None:
    assert (plus(2), list(count(2)), asyncio.run(double(4)), lengths(["a", "bc"])) == (3, [0, 1], 8, [1, 2])


def test_remote_calls_of_each_kind_return_values() -> None:
    with run_locally():
        assert (plus.remote(2, b=3), count.remote(3), double.remote(4)) == (5, [0, 1, 2], 8)
        assert (letters.remote("ab"), lengths.remote("abc")) == (["a", "b"], 3)  # type: ignore[arg-type, comparison-overlap]


def test_a_wrong_call_fails_before_it_is_sent() -> None:
    with run_locally() as platform, pytest.raises(TypeError, match="required argument: 'a'"):
        plus.remote()  # type: ignore[call-arg]
    assert platform.calls == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: plus.remote(1, c=2),  # type: ignore[call-arg]
            "plus: got an unexpected keyword argument 'c'; it takes a, b=1",
        ),
        (lambda: plus.map([1], [2], [3]), "plus: too many positional arguments; it takes a, b=1"),
        (Tally.add.spawn, "tally.add: missing a required argument: 'n'; it takes n"),
    ],
)
def test_a_wrong_call_names_the_function_and_its_parameters(call: Callable[[], Any], message: str) -> None:
    with run_locally(), pytest.raises(TypeError) as raised:
        list(call())
    assert str(raised.value) == message


def test_an_exception_shows_the_remote_traceback() -> None:
    with run_locally(), pytest.raises(FunctionRaised) as caught:
        fail.remote("nothing there")
    assert caught.value.error_type == "LookupError"
    assert repr(caught.value) == "FunctionRaised('LookupError: nothing there')"
    text = "".join(traceback.format_exception(caught.value))
    assert "In the worker:" in text
    assert "raise LookupError(message)" in text


def test_items_are_streamed_as_they_are_produced() -> None:
    with run_locally():
        items = assert_type(count.stream(1_000_000_000), Iterator[int])
        assert [next(items), next(items)] == [0, 1]
        items.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda: plus.local(1),  # type: ignore[attr-defined]
            "'Function' object has no attribute 'local'; a plain call, without .local, runs in this process",
        ),
        (
            lambda: Tally.add.delay(1),  # type: ignore[attr-defined]
            "'Method' object has no attribute 'delay'; spawn(...) submits a call",
        ),
        (
            lambda: Call("x").get(),  # type: ignore[attr-defined]
            "'Call' object has no attribute 'get'; result(timeout=...) waits for the result",
        ),
        (
            lambda: plus.remot(1),  # type: ignore[attr-defined]
            "'Function' object has no attribute 'remot'",
        ),
    ],
)
def test_method_names_of_other_sdks_get_a_hint(use: Callable[[], Any], message: str) -> None:
    with pytest.raises(AttributeError) as raised:
        use()
    assert str(raised.value) == message
    assert raised.value.obj is not None, "Python suggests what is like it"


def test_only_generators_stream() -> None:
    with run_locally(), pytest.raises(InvalidInput, match="not a generator"):
        plus.stream(1)


def test_a_spawned_call_can_be_found_again() -> None:
    with run_locally():
        call = plus.spawn(2)
        again = Call.from_id(call.id)
        assert (again.result(), again.status(), again.cancel()) == (3, "succeeded", False)
        with pytest.raises(FunctionRaised):
            fail.spawn("x").result()
        with pytest.raises(InvocationNotFound):
            Call.from_id("0" * 26).status()


def test_a_wrong_id_is_refused_without_a_request() -> None:
    with pytest.raises(InvalidInput, match="'abc'"):
        Call.from_id("abc")


def test_asyncio_has_the_same_methods() -> None:
    async def main() -> list[Any]:
        call = await plus.aio.spawn(5)
        return [
            await plus.aio.remote(1),
            [item async for item in count.aio.stream(3)],
            [item async for item in plus.aio.map(range(3), window=2)],
            await call.aio.result(),
            await call.aio.status(),
            await asyncio.gather(*(double.aio.remote(n) for n in range(50))),
        ]

    with run_locally():
        assert asyncio.run(main()) == [2, [0, 1, 2], [1, 2, 3], 6, "succeeded", list(range(0, 100, 2))]


def test_a_stream_whose_reader_is_cancelled_is_closed_when_its_thread_returns() -> None:
    """Regression: closing it while a thread waited for the next item raised ValueError in the reader."""
    asked, may_go_on, closed = threading.Event(), threading.Event(), threading.Event()

    @gpu_function
    def held_up_between_items() -> Iterator[int]:
        try:
            yield 1
            asked.set()
            may_go_on.wait(30)
            yield 2
        finally:
            closed.set()

    async def read() -> None:
        async for _ in held_up_between_items.aio.stream():
            pass

    async def main() -> None:
        reader = asyncio.create_task(read())
        assert await asyncio.to_thread(asked.wait, 30)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert not closed.is_set()
        may_go_on.set()
        assert await asyncio.to_thread(closed.wait, 30)

    with run_locally():
        asyncio.run(main())


def test_an_async_function_can_be_called_remotely_from_a_coroutine() -> None:
    async def main() -> int:
        return double.remote(3)

    with run_locally():
        assert asyncio.run(main()) == 6


def test_a_class_is_created_and_entered_once_per_worker_and_exited_at_its_end() -> None:
    ended.clear()
    with run_locally():
        assert (Tally.add.remote(1), Tally().add.remote(2), Tally.upto.remote(2)) == (101, 103, [0, 1])
        assert list(Tally().upto.stream(2)) == [0, 1]
        assert ended == []
    assert ended == [103]


@gpu_function
class Reluctant:
    @method
    def work(self) -> int:
        return 1

    @exit
    def end(self) -> None:
        raise OSError("is busy")

    @exit()
    def end_all_the_same(self) -> None:
        ended.append(-1)


def test_all_exit_hooks_run_even_if_one_raises() -> None:
    ended.clear()
    with pytest.raises(OSError, match="is busy"), run_locally():
        assert (Reluctant.work.remote(), Tally.add.remote(1)) == (1, 101)
    assert ended == [-1, 101]


def test_a_local_instance_is_created_and_entered_on_first_use() -> None:
    ended.clear()
    with Tally(5) as tally:  # type: ignore[attr-defined]
        assert (tally.add(1), tally.total) == (106, 106)
    assert ended == [106]


def test_the_arguments_of_the_constructor_choose_an_instance() -> None:
    with run_locally() as platform:
        assert (Tally(5).add.remote(1), Tally.add.remote(1), Tally(start=5).add.remote(1)) == (106, 101, 107)
    assert platform.calls[0].function == "tally(start=5).add"


def test_arguments_that_do_not_fit_the_constructor_are_refused() -> None:
    with run_locally():
        with pytest.raises(TypeError):
            Tally(5, 6).add.remote(1)  # type: ignore[call-arg]
        with pytest.raises(InvalidInput) as refused:
            Tally(object()).add.remote(1)  # type: ignore[arg-type]
    assert refused.value.field == "start"


@gpu_function
class Twofold:
    @method
    def double(self, x: int) -> int:
        return 2 * x


def _sum_of_map() -> int:
    return sum(Twofold.double.map(range(4)))


def _sum_of_graph() -> int:
    graph = Graph()
    steps = [graph.call(Twofold.double, x) for x in range(4)]
    for _ in graph.run():
        pass
    return sum(step.result for step in steps)


async def _sum_awaited() -> int:
    return sum(await asyncio.gather(*(Twofold.double.aio.remote(x) for x in range(4))))


@gpu_function
class Summing:
    @method
    def mapped(self) -> int:
        return _sum_of_map()

    @method
    def stepped(self) -> int:
        return _sum_of_graph()

    @method
    async def awaited(self) -> int:
        return await _sum_awaited()


@pytest.mark.parametrize("adds", [Summing.mapped, Summing.stepped, Summing.awaited])
def test_a_local_class_may_wait_for_calls_of_classes_in_other_threads(adds: Any) -> None:
    async def in_a_loop() -> int:
        return cast("int", adds.remote())

    def run() -> None:
        results.append(adds.remote())
        results.append(asyncio.run(in_a_loop()))

    results: list[int] = []
    with run_locally():
        thread = threading.Thread(target=run, daemon=True)  # a deadlock would last forever
        thread.start()
        thread.join(30)
        assert results == [12, 12]


def test_a_class_can_be_extended() -> None:
    class More(Tally):
        @method
        def twice(self, n: int) -> int:
            return 2 * n

    assert More().twice(4) == 8


@pytest.mark.parametrize(
    ("error", "attempts"), [(OSError("busy"), 3), (ConnectionError("busy"), 3), (ValueError("no"), 1)]
)
def test_a_local_call_is_retried_according_to_its_function(error: Exception, attempts: int) -> None:
    began: list[None] = []

    @gpu_function(name=f"flaky-{type(error).__name__.lower()}", retries=Retry(2, delay_s=3600, on=(OSError,)))
    def flaky() -> None:
        began.append(None)
        raise error

    with run_locally() as platform, pytest.raises(FunctionRaised):
        flaky.remote()
    assert (len(began), len(platform.calls)) == (attempts, 1)


def test_a_local_attempt_knows_its_number() -> None:
    @gpu_function
    def inner() -> int:
        return current().attempt

    @gpu_function(retries=2)
    def third_time() -> tuple[int, int]:
        if current().attempt < 3:
            raise OSError("busy")
        return current().attempt, inner.remote()

    with run_locally():
        assert third_time.remote() == (3, 1)
        assert third_time.spawn().result() == (3, 1)
    assert current().attempt == 1


def test_a_local_call_returns_the_result_of_the_attempt_that_succeeds() -> None:
    began: list[None] = []

    @gpu_function(retries=2)
    def recovers() -> int:
        began.append(None)
        if len(began) < 3:
            raise OSError("busy")
        return len(began)

    with run_locally():
        assert recovers.remote() == 3


def test_replacements_are_called_and_calls_are_recorded() -> None:
    with run_locally(plus=lambda a, b=1: 42) as platform:
        assert plus.remote(1, b=2) == 42
    assert platform.calls == [RemoteCall("plus", (1,), {"b": 2})]


def test_a_function_that_was_not_imported_is_not_found() -> None:
    with run_locally() as platform, pytest.raises(FunctionNotFound, match="no @gpu_function named nowhere"):
        platform.call(EncodedCall(Target("nowhere"), "", b"\x82\xa4args\x90\xa6kwargs\x80"))


def test_the_earlier_transport_is_restored() -> None:
    before = _transport.installed()
    with run_locally() as outer:
        with run_locally():
            pass
        assert _transport.installed() is outer
    assert _transport.installed() is before


def test_an_importable_function_is_pickled_by_reference() -> None:
    assert pickle.loads(pickle.dumps(plus)) is plus
    assert pickle.loads(pickle.dumps(Tally)) is Tally


def test_a_closure_is_pickled_by_value_with_its_references() -> None:
    def make(k: int) -> Any:
        @gpu_function(timeout=9)
        def recursive(n: int) -> int:
            return k if n == 0 else recursive(n - 1) + 1

        return recursive

    data = cloudpickle.dumps(make(10))
    gc.collect()  # the original is gone, as in the process that loads the copy
    copy = pickle.load(io.BytesIO(data))
    assert (copy(3), copy.name, copy.settings.timeout_s) == (13, "recursive", 9)
    assert copy.raw.__globals__ is not None
    with run_locally():
        assert copy.remote(2) == 12


def test_a_function_is_found_after_its_copy_was_deleted() -> None:
    @gpu_function
    def original(n: int) -> int:
        return n

    copy = pickle.loads(cloudpickle.dumps(original))
    assert copy is not original
    del copy
    gc.collect()
    with run_locally():
        assert original.remote(2) == 2


def test_an_error_awaited_or_mapped_shows_no_frame_of_a_thread_pool() -> None:
    async def awaited() -> None:
        await fail.aio.remote("no")

    with run_locally():
        for run in (lambda: asyncio.run(awaited()), lambda: list(fail.map(["no"]))):
            with pytest.raises(FunctionRaised) as caught:
                run()
            files = {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)}
            assert [file for file in files if "concurrent" in file] == []


def test_aio_is_not_callable() -> None:
    with pytest.raises(InvalidInput, match=r"plus\.aio\.remote\(\.\.\.\)"):
        plus.aio(1)


class Recorder(LocalTransport):
    """Runs calls in this process and records the priority and the timeout of each."""

    def __init__(self) -> None:
        super().__init__()
        self.classes: list[tuple[str, str | None]] = []
        self.timeouts: list[float | None] = []

    def call(self, call: EncodedCall) -> tuple[str, bytes]:
        self._record("call", call)
        return super().call(call)

    def stream(self, call: EncodedCall) -> Iterator[tuple[str, bytes]]:
        self._record("stream", call)
        return super().stream(call)

    def submit(self, call: EncodedCall) -> str:
        self._record("submit", call)
        return super().submit(call)

    def _record(self, kind: str, call: EncodedCall) -> None:
        self.classes.append((kind, call.target.priority))
        self.timeouts.append(call.timeout_s)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    transport = Recorder()
    monkeypatch.setattr(_transport, "_installed", transport)
    return transport


def test_a_call_sends_its_priority_if_it_has_one(recorder: Recorder) -> None:
    assert plus.options(priority="hi").remote(1) == 2
    assert plus.remote(1) == 2
    assert list(count.options(priority="low").stream(2)) == [0, 1]
    assert Tally.add.options(priority="hi").spawn(1).result() == 101
    assert recorder.classes[:3] == [("call", "hi"), ("call", None), ("stream", "low")]
    assert ("submit", "hi") in recorder.classes


def test_a_call_sends_its_timeout_if_it_has_one(recorder: Recorder) -> None:
    quick = plus.options(timeout=2)
    assert quick.remote(1) == 2
    assert plus.remote(1) == 2
    assert list(count.options(timeout=0.5).stream(2)) == [0, 1]
    assert recorder.timeouts == [2.0, None, 0.5]
    recorder.timeouts.clear()
    assert Tally.add.options(timeout=3).options(priority="hi").spawn(1).result() == 101
    assert (recorder.timeouts[0], recorder.classes[-2][1]) == (3.0, "hi")


@pytest.mark.parametrize(
    ("timeout", "message"),
    [(0, "above 0, not 0"), (-1.5, "above 0, not -1.5"), ("2s", "a number of seconds, not '2s'"), (True, "not True")],
)
def test_a_timeout_is_a_number_of_seconds(timeout: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        plus.options(timeout=timeout)


def test_options_keep_everything_else_of_a_function() -> None:
    urgent = plus.options(priority="hi")
    assert repr(urgent) == "<Function plus>.options(priority='hi')"
    assert repr(plus.options(timeout=2)) == "<Function plus>.options(timeout=2.0)"
    with pytest.raises(TypeError):
        urgent.remote()  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match="not a generator"):
        urgent.stream(1)
    with pytest.raises(InvalidInput, match="not 'high'"):
        plus.options(priority="high")  # type: ignore[arg-type]


def test_a_remote_call_of_a_class_names_its_methods() -> None:
    @gpu_function
    class Model:
        map = "the user's own"

        def __init__(self) -> None:
            self.stream = "the instance's own"

        @method
        def predict(self) -> None: ...

    for owner in (Model, Model()):
        for name in ("remote", "spawn", "aio"):
            message = rf"Model is a class: call one of its methods, as Model\.predict\.{name}"
            with pytest.raises(AttributeError, match=message):
                getattr(owner, name)
    assert (Model.map, Model().map, Model().stream) == ("the user's own", "the user's own", "the instance's own")
    with pytest.raises(AttributeError, match=r"'Model'.* 'nothing'"):
        getattr(Model, "nothing")  # noqa: B009  mypy knows that there is none
