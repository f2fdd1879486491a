"""Waiting for several calls: `gather` for submitted calls, Graph for calls that need each other's results."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gpufn.call.graph_priority import Order
from gpufn.call.remote import Remote
from gpufn.call.submitted_call import Call
from gpufn.call.threads import Outcome, capture
from gpufn.declare.hints.argument_checks import check_count, check_seconds
from gpufn_core.errors import InvalidInput

if TYPE_CHECKING:
    from concurrent.futures import Future

V = TypeVar("V")

_WINDOW = 32
_MAX_THREADS = 64  # per `gather`


def gather(*calls: Call[Any], return_exceptions: bool = False, timeout: float | None = None) -> list[Any]:
    """Wait for submitted calls, and return their results in the order of the arguments.

    Raises the first failure at once; the other calls continue. With `return_exceptions`, a failure takes the place of
    its result. Raises TimeoutError if a call still runs after `timeout` seconds.

    >>> from gpufn import gpu_function
    >>> from gpufn.testing import run_locally
    >>> @gpu_function
    ... def double(x: int) -> int:
    ...     return 2 * x
    >>> with run_locally():
    ...     gather(*(double.spawn(x) for x in range(3)))
    [0, 2, 4]
    """
    for call in calls:
        if not isinstance(call, Call):
            hint = "; pass each call as an argument, as in gather(*calls)" if isinstance(call, Iterable) else ""
            raise InvalidInput(f"gather takes the calls that .spawn(...) returns, not {call!r}{hint}")
    check_seconds("timeout", timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    remaining = iter(list(enumerate(calls)))
    ended: SimpleQueue[tuple[int, Outcome[Any]]] = SimpleQueue()

    def wait() -> None:
        for index, call in remaining:
            ended.put((index, capture(_result_by, call, deadline, timeout)))

    results: list[Any] = [None] * len(calls)
    try:
        for number in range(min(len(calls), _MAX_THREADS)):
            # A daemon: the calls continue without this process, so a wait must not keep it alive.
            run = contextvars.copy_context().run
            threading.Thread(target=run, args=(wait,), name=f"gpufn-gather-{number}", daemon=True).start()
        for _ in calls:
            index, outcome = ended.get()
            results[index] = outcome.error if return_exceptions and outcome.error is not None else outcome.get()
    finally:
        for _ in remaining:  # after a failure, the threads begin no further waits
            pass
    return results


def _result_by(call: Call[Any], deadline: float | None, timeout: float | None) -> Any:
    """Wait for a result until `deadline`. After the deadline, return the result of a call that has already ended."""
    if deadline is None:
        return call.result()
    try:
        return call.result(max(deadline - time.monotonic(), 0.0))
    except TimeoutError as error:
        raise TimeoutError(f"invocation {call.id} has not ended after {timeout:g} s") from error


class Step(Generic[V]):
    """A call in a Graph. As an argument of another step, it represents its result."""

    def __init__(self, number: int, remote: Remote[..., Any, V], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.number = number
        self.cost = 1.0
        self._remote = remote
        self._args = args
        self._kwargs = kwargs
        self._result: tuple[V] | None = None

    def taking(self, cost: float) -> Step[V]:
        """Set how long the step takes, in any unit that all steps share. The default is 1."""
        if not isinstance(cost, (int, float)) or not 0 <= cost < float("inf"):
            raise InvalidInput(f"a step's cost is a number of at least 0, not {cost!r}")
        self.cost = cost
        return self

    @property
    def result(self) -> V:
        """The result of the call. Raises InvalidInput if the step has not ended."""
        if self._result is None:
            raise InvalidInput(f"{self!r} has not ended: run its graph first")
        return self._result[0]

    def __repr__(self) -> str:
        return f"<Step {self.number} {self._remote!r}>"

    def _run(self) -> None:
        args, kwargs = _with_results((self._args, self._kwargs))
        self._result = (self._remote.remote(*args, **kwargs),)


class Graph:
    """Calls that need each other's results. A call starts when its inputs are ready; the longest chains go first.

    >>> from gpufn import gpu_function
    >>> from gpufn.testing import run_locally
    >>> @gpu_function
    ... def frame(number: int) -> int:
    ...     return number * number
    >>> @gpu_function
    ... def film(frames: list[int]) -> int:
    ...     return sum(frames)
    >>> graph = Graph()
    >>> frames = [graph.call(frame, number) for number in range(4)]
    >>> whole = graph.call(film, frames).taking(3.0)
    >>> with run_locally():
    ...     ended = [step.number for step in graph.run()]
    >>> whole.result, len(ended), ended[-1]
    (14, 5, 4)
    """

    def __init__(self) -> None:
        self._steps: list[Step[Any]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def call(self, function: Remote[..., Any, V], /, *args: Any, **kwargs: Any) -> Step[V]:
        """Add the step `function.remote(...)` and return it.

        It waits for the steps among its arguments, also in lists, tuples and dicts. Raises InvalidInput for a step of
        another graph, and TypeError for arguments that do not fit the function.
        """
        _check_step(function, args, kwargs)
        for dependency in _steps((args, kwargs)):
            if dependency.number >= len(self._steps) or self._steps[dependency.number] is not dependency:
                raise InvalidInput(f"{dependency!r} is a step of another graph")
        step = Step(len(self._steps), function, args, kwargs)
        self._steps.append(step)
        return step

    def run(self, window: int = _WINDOW) -> Iterator[Step[Any]]:
        """Make the calls, at most `window` at a time, and yield each step as it ends.

        Raises the first failure: running calls continue, and no further call starts. Inside a function, the calls have
        at most the time that the function has left, and end with it.
        """
        from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait  # noqa: PLC0415

        check_count("window", window)
        dependencies = [{each.number for each in _steps((step._args, step._kwargs))} for step in self._steps]
        order = Order(dependencies, [step.cost for step in self._steps])
        running: dict[Future[None], Step[Any]] = {}
        pool = ThreadPoolExecutor(window, thread_name_prefix="gpufn-graph")
        try:
            while True:
                while len(running) < window and (number := order.take()) is not None:
                    step = self._steps[number]
                    running[pool.submit(contextvars.copy_context().run, step._run)] = step
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    step = running.pop(future)
                    _raise_failure(future, step)
                    order.mark_ended(step.number)
                    yield step
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _check_step(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not isinstance(function, Remote):
        raise InvalidInput(
            "graph.call takes a @gpu_function or a @method, and its arguments, as in graph.call(f, 1), "
            f"not {function!r}"
        )
    function.check_call(args, kwargs)


def _raise_failure(future: Future[None], step: Step[Any]) -> None:
    error = future.exception()
    if error is not None:
        error.add_note(f"in {step!r}")
        raise error


def _steps(value: Any) -> Iterator[Step[Any]]:
    if isinstance(value, Step):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _steps(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _steps(item)


def _with_results(value: Any) -> Any:
    """Return `value` with each step replaced by its result."""
    if isinstance(value, Step):
        return value.result
    if isinstance(value, dict):
        return {key: _with_results(item) for key, item in value.items()}
    if type(value) in (list, tuple):  # not a named tuple, whose constructor takes no iterator
        return type(value)(_with_results(item) for item in value)
    return value
