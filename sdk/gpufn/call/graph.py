"""Calls that wait for each other's results: `gather` for calls that are under way, Graph for those to come."""

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
from gpufn.call.threads import Caught, caught
from gpufn.declare.argument_checks import check_count, check_seconds
from gpufn_core.errors import InvalidInput

if TYPE_CHECKING:
    from concurrent.futures import Future

V = TypeVar("V")

_WINDOW = 32
_MOST_WAITS = 64  # threads of one `gather`


def gather(*calls: Call[Any], return_exceptions: bool = False, timeout: float | None = None) -> list[Any]:
    """The results of calls that were submitted, in the order given; waits for many of them at the same time.

    The first failure is raised at once, and the others go on; with `return_exceptions` a failure takes its result's
    place. Raises TimeoutError when one still runs `timeout` seconds from now.

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
            several = "; give them one by one, as in gather(*calls)" if isinstance(call, Iterable) else ""
            raise InvalidInput(f"gather waits for what .spawn(...) returned, not for {call!r}{several}")
    check_seconds("timeout", timeout)
    give_up = None if timeout is None else time.monotonic() + timeout
    left = iter(list(enumerate(calls)))
    ended: SimpleQueue[tuple[int, Caught[Any]]] = SimpleQueue()

    def wait() -> None:
        for place, call in left:
            ended.put((place, caught(_result_by, call, give_up, timeout)))

    results: list[Any] = [None] * len(calls)
    try:
        for number in range(min(len(calls), _MOST_WAITS)):
            # It keeps no process from ending, for the calls go on without us.
            waiting = contextvars.copy_context().run
            threading.Thread(target=waiting, args=(wait,), name=f"gpufn-gather-{number}", daemon=True).start()
        for _ in calls:
            place, end = ended.get()
            results[place] = end.error if return_exceptions and end.error is not None else end.get()
    finally:
        for _ in left:  # after a failure nobody begins to wait for more
            pass
    return results


def _result_by(call: Call[Any], give_up: float | None, timeout: float | None) -> Any:
    """Past the end of the time it looks once: what has ended has a result."""
    if give_up is None:
        return call.result()
    try:
        return call.result(max(give_up - time.monotonic(), 0.0))
    except TimeoutError as error:
        raise TimeoutError(f"invocation {call.id} has not ended after {timeout:g} s") from error


class Step(Generic[V]):
    """A call in a Graph. As an argument of another step it stands for its result."""

    def __init__(self, number: int, remote: Remote[..., Any, V], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.number = number
        self.cost = 1.0
        self._remote = remote
        self._args = args
        self._kwargs = kwargs
        self._result: tuple[V] | None = None

    def taking(self, cost: float) -> Step[V]:
        """How long it takes, in any unit that all steps share; 1 when nothing is said."""
        if not isinstance(cost, (int, float)) or not 0 <= cost < float("inf"):
            raise InvalidInput(f"a step's cost is a number from 0 on, not {cost!r}")
        self.cost = cost
        return self

    @property
    def result(self) -> V:
        """Raises InvalidInput while it has not ended."""
        if self._result is None:
            raise InvalidInput(f"{self!r} has not ended: run its graph first")
        return self._result[0]

    def __repr__(self) -> str:
        return f"<Step {self.number} {self._remote!r}>"

    def _needs(self) -> set[int]:
        return {step.number for step in _steps((self._args, self._kwargs))}

    def _run(self) -> None:
        args, kwargs = _filled((self._args, self._kwargs))
        self._result = (self._remote.remote(*args, **kwargs),)


class Graph:
    """Calls that need each other's results, each made as soon as it can be, those with the longest way to go first.

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
        """A step: `function.remote(...)`. Steps among the arguments, or in lists, tuples and dicts of them, are waited
        for. Raises InvalidInput for a step of another graph, TypeError for a call that does not fit the function."""
        _check_step(function, args, kwargs)
        for needed in _steps((args, kwargs)):
            if needed.number >= len(self._steps) or self._steps[needed.number] is not needed:
                raise InvalidInput(f"{needed!r} is a step of another graph")
        step = Step(len(self._steps), function, args, kwargs)
        self._steps.append(step)
        return step

    def run(self, window: int = _WINDOW) -> Iterator[Step[Any]]:
        """Each step as it ends; at most `window` calls are under way.

        The first failure is raised: what runs then goes on, and nothing new is started. Inside a function, the calls
        have no more time than it has, and end with it.
        """
        from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait  # noqa: PLC0415

        check_count("window", window)
        order = Order([step._needs() for step in self._steps], [step.cost for step in self._steps])
        under_way: dict[Future[None], Step[Any]] = {}
        pool = ThreadPoolExecutor(window, thread_name_prefix="gpufn-graph")
        try:
            while True:
                while len(under_way) < window and (number := order.take()) is not None:
                    step = self._steps[number]
                    under_way[pool.submit(contextvars.copy_context().run, step._run)] = step
                if not under_way:
                    return
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    step = under_way.pop(future)
                    _raise_failure(future, step)
                    order.ended(step.number)
                    yield step
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _check_step(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not isinstance(function, Remote):
        raise InvalidInput(
            "a step is a @gpu_function, or a @method of one, and its arguments, as in graph.call(f, 1), "
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


def _filled(value: Any) -> Any:
    """With results in the places of steps."""
    if isinstance(value, Step):
        return value.result
    if isinstance(value, dict):
        return {key: _filled(item) for key, item in value.items()}
    if type(value) in (list, tuple):  # a named tuple cannot be made of an iterator
        return type(value)(_filled(item) for item in value)
    return value
