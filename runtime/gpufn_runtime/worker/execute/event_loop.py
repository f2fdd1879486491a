"""The thread that runs async functions and async generators: one event loop, at most `concurrency` tasks.

It starts with the first async function or hook, so that a plain function never pays for asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

from gpufn_core.errors import RequestError
from gpufn_runtime.worker.arguments.loader import Method
from gpufn_runtime.worker.context import current_attempt
from gpufn_runtime.worker.execute.attempts import Attempt, Attempts
from gpufn_runtime.worker.execute.results import Results
from gpufn_runtime.worker.link import Link
from gpufn_runtime.worker.process import vital


class EventLoop:
    """`take` may be called from any thread, the rest runs on the loop's own."""

    def __init__(self, concurrency: int, link: Link, attempts: Attempts, results: Results) -> None:
        self._concurrency = concurrency
        self._link = link
        self._attempts = attempts
        self._results = results
        self._waiting: deque[tuple[Attempt, Method]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=vital(self._run_forever), name="gpufn-asyncio", daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run `coroutine` on the loop and wait for it: hooks, and batches of an async function."""
        outcome = asyncio.run_coroutine_threadsafe(self._caught(coroutine), self._loop).result()
        if isinstance(outcome, _Raised):
            raise outcome.error
        return outcome

    def take(self, attempt: Attempt, method: Method) -> None:
        self._loop.call_soon_threadsafe(self._admit, attempt, method)

    def _run_forever(self) -> None:
        asyncio.set_event_loop(self._loop)
        while True:
            # A task of the user's own that ends in SystemExit stops the loop; the calls beside it go on.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    def _admit(self, attempt: Attempt, method: Method) -> None:
        self._waiting.append((attempt, method))
        self._start_more()

    def _start_more(self) -> None:
        while self._waiting and len(self._tasks) < self._concurrency:
            attempt, method = self._waiting.popleft()
            if not self._attempts.start(attempt):
                continue
            self._start(attempt, method)

    def _start(self, attempt: Attempt, method: Method) -> None:
        changed = asyncio.Event()
        task = self._loop.create_task(self._attend(attempt, method, changed))
        self._tasks.add(task)
        task.add_done_callback(self._done)

        def on_change() -> None:
            self._loop.call_soon_threadsafe(task.cancel if attempt.cancel_requested else changed.set)

        attempt.on_change = on_change
        if attempt.cancel_requested:  # since it was started, and before there was somebody to tell
            on_change()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._start_more()

    async def _attend(self, attempt: Attempt, method: Method, changed: asyncio.Event) -> None:
        current_attempt.set(attempt)
        started = time.perf_counter()
        try:
            args, kwargs = method.parameters.bind(attempt.run.content_type, attempt.take_body())
        except RequestError as error:
            self._results.rejected(attempt, error, started)
            return
        try:
            if method.kind.streams:
                await self._iterate(attempt, method.call(*args, **kwargs), changed, started)
            else:
                result = await method.call(*args, **kwargs)
                self._link.leave_if_parents()
                self._results.returned(attempt, result, started)
        except asyncio.CancelledError as error:
            if attempt.cancel_requested:
                self._results.cancelled(attempt, started)
            else:
                self._results.raised(attempt, error, started)
        except BaseException as error:
            self._link.leave_if_parents(error)
            self._results.raised(attempt, error, started)

    async def _iterate(self, attempt: Attempt, items: Any, changed: asyncio.Event, started: float) -> None:
        collected: list[Any] = []
        sent = 0
        async with contextlib.aclosing(items):
            async for item in items:
                self._link.leave_if_parents()
                if not attempt.run.stream:
                    collected.append(item)
                    continue
                while attempt.credits <= sent:
                    changed.clear()
                    if attempt.credits <= sent:
                        await changed.wait()
                self._results.item(attempt, item)
                sent += 1
        self._link.leave_if_parents()
        if attempt.run.stream:
            self._results.exhausted(attempt, started)
        else:
            self._results.returned(attempt, collected, started)

    async def _caught(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result or the exception as a value: a SystemExit that left the task would stop the loop."""
        try:
            result = await coroutine
        except BaseException as error:
            self._link.leave_if_parents(error)
            return _Raised(error)
        self._link.leave_if_parents()
        return result


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error
