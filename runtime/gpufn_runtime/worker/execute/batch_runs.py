"""Run batches: each call's input is validated separately, and no call fails because of another one.

The time of a run is charged once, in equal parts, to the calls that shared it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

from gpufn_core.errors import RequestError
from gpufn_runtime.worker.arguments.loader import Method
from gpufn_runtime.worker.context import current_attempt
from gpufn_runtime.worker.execute.attempts import Attempt, Attempts
from gpufn_runtime.worker.execute.error_report import message_of
from gpufn_runtime.worker.execute.results import Results


class BatchRuns:
    def __init__(self, attempts: Attempts, results: Results) -> None:
        self._attempts = attempts
        self._results = results

    def run(self, batch: list[Attempt], method: Method, call: Callable[..., Any]) -> None:
        """Run a batch. `call` has the parameters of `method.call` and waits for its result."""
        started = time.perf_counter()
        inputs: list[tuple[Attempt, dict[str, Any]]] = []
        for attempt in batch:
            if self._attempts.start(attempt):
                try:
                    inputs.append((attempt, method.parameters.by_name(attempt.run.content_type, attempt.take_body())))
                except RequestError as error:
                    self._results.rejected(attempt, error, started)
        if inputs:
            self._run(inputs, call, started)

    def _run(
        self,
        inputs: list[tuple[Attempt, dict[str, Any]]],
        call: Callable[..., Any],
        started: float,
        charged_before_s: float = 0.0,
    ) -> None:
        # Output of a batch of several calls belongs to none of them.
        token = current_attempt.set(inputs[0][0] if len(inputs) == 1 else None)
        values: list[Any] | None = None
        try:
            names = list(inputs[0][1])
            values = _as_list(
                call(**{name: [arguments[name] for _, arguments in inputs] for name in names}), len(inputs)
            )
        except BaseException as error:
            if len(inputs) == 1:
                charged_s = charged_before_s + time.perf_counter() - started
                self._results.raised(inputs[0][0], error, started, charged_s=charged_s)
            else:
                _log_failure(len(inputs), error)
        finally:
            current_attempt.reset(token)
        charged_s = charged_before_s + (time.perf_counter() - started) / len(inputs)
        if values is None:
            # One call may be the cause: only that one fails. This is outside the `except` block, because only now the
            # objects in the exception's frames, such as GPU memory, are freed.
            for item in inputs if len(inputs) > 1 else ():
                self._run([item], call, time.perf_counter(), charged_s)
            return
        for (attempt, _), value in zip(inputs, values, strict=True):
            if isinstance(value, Exception):
                self._results.raised(attempt, value, started, charged_s=charged_s)
            else:
                self._results.returned(attempt, value, started, charged_s=charged_s)


def _log_failure(size: int, error: BaseException) -> None:
    detail = f"{type(error).__qualname__}: {message_of(error)}"
    with contextlib.suppress(Exception):  # user code may have replaced the stream and closed it
        print(f"a batch of {size} calls failed, running each call alone: {detail}", file=sys.stderr)  # noqa: T201


def _as_list(result: Any, size: int) -> list[Any]:
    if isinstance(result, (str, bytes, dict, set)) or not hasattr(result, "__len__"):
        raise TypeError(
            f"a function with batch=... must return a list with one result per call, not {type(result).__name__}"
        )
    if len(result) != size:
        raise ValueError(f"the function returned {len(result)} results for a batch of {size} calls")
    return list(result)
