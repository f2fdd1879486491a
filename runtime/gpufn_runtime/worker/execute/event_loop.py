"""Thread that runs async functions and async generators: one event loop with at most `concurrency` tasks.

It starts with the first async function or hook, so that plain functions do not pay for importing asyncio.
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
from gpufn_runtime.worker.execute.user_spans import attach
from gpufn_runtime.worker.link import Link
from gpufn_runtime.worker.process import exit_on_failure
from gpufn_runtime.worker.web.session import Session


class EventLoop:
    """`take` is thread-safe; everything else runs on the loop's own thread."""

    def __init__(self, concurrency: int, link: Link, attempts: Attempts, results: Results) -> None:
        self._concurrency = concurrency
        self._link = link
        self._attempts = attempts
        self._results = results
        self._waiting: deque[tuple[Attempt, Method]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=exit_on_failure(self._run_forever), name="gpufn-asyncio", daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run `coroutine` on the loop and wait for it. For hooks, and for batches of an async function."""
        outcome = asyncio.run_coroutine_threadsafe(self._catch(coroutine), self._loop).result()
        if isinstance(outcome, _Raised):
            raise outcome.error
        return outcome

    def take(self, attempt: Attempt, method: Method) -> None:
        self._loop.call_soon_threadsafe(self._admit, attempt, method)

    def run_call(self, attempt: Attempt, method: Method) -> None:
        """Run a call and wait until it has ended. For a method without batches in a class that also has methods with
        batches."""
        ended = threading.Event()

        def start() -> None:
            if self._attempts.start(attempt):
                self._start(attempt, method).add_done_callback(lambda _: ended.set())
            else:
                ended.set()

        self._loop.call_soon_threadsafe(start)
        ended.wait()

    def _run_forever(self) -> None:
        asyncio.set_event_loop(self._loop)
        while True:
            # A SystemExit in a task of user code stops the loop; restart it, because other calls must go on.
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

    def _start(self, attempt: Attempt, method: Method) -> asyncio.Task[None]:
        changed = asyncio.Event()
        task = self._loop.create_task(self._run_attempt(attempt, method, changed))
        self._tasks.add(task)
        task.add_done_callback(self._done)

        def on_change() -> None:
            self._loop.call_soon_threadsafe(task.cancel if attempt.cancel_requested else changed.set)

        attempt.on_change = on_change
        if attempt.cancel_requested:  # cancelled after the start, before `on_change` was set
            on_change()
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._start_more()

    async def _run_attempt(self, attempt: Attempt, method: Method, changed: asyncio.Event) -> None:
        current_attempt.set(attempt)
        if attempt.run.trace:
            attach(attempt.run)  # for this task only
        started = time.perf_counter()
        try:
            args, kwargs = method.parameters.bind(attempt.run.content_type, attempt.take_body())
        except RequestError as error:
            self._results.rejected(attempt, error, started)
            return
        try:
            if method.is_web:
                await method.call(Session(attempt, *args, link=self._link, changed=changed))
                self._link.exit_if_forked()
                self._results.exhausted(attempt, started)
            elif method.kind.streams:
                await self._iterate(attempt, method.call(*args, **kwargs), changed, started)
            else:
                result = await method.call(*args, **kwargs)
                self._link.exit_if_forked()
                self._results.returned(attempt, result, started)
        except asyncio.CancelledError as error:
            if attempt.cancel_requested:
                self._results.cancelled(attempt, started)
            else:
                self._results.raised(attempt, error, started)
        except BaseException as error:
            self._link.exit_if_forked(error)
            self._results.raised(attempt, error, started)

    async def _iterate(self, attempt: Attempt, items: Any, changed: asyncio.Event, started: float) -> None:
        collected: list[Any] = []
        async with contextlib.aclosing(items):
            async for item in items:
                self._link.exit_if_forked()
                if not attempt.run.stream:
                    collected.append(item)
                    if attempt.run.is_live:
                        self._results.live_item(attempt, len(collected) - 1, item)
                    continue
                while not attempt.may_send_item:
                    changed.clear()
                    if not attempt.may_send_item:
                        await changed.wait()
                self._results.item(attempt, item)
        self._link.exit_if_forked()
        if attempt.run.stream:
            self._results.exhausted(attempt, started)
        else:
            self._results.returned(attempt, collected, started)

    async def _catch(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return the result or the exception as a value: a SystemExit that leaves a task would stop the loop."""
        try:
            result = await coroutine
        except BaseException as error:
            self._link.exit_if_forked(error)
            return _Raised(error)
        self._link.exit_if_forked()
        return result


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error
