"""Callers in several threads share the runs of one engine, without a thread that waits for them.

1. a call that finds the engine free leads: it runs at once, alone
2. calls that come meanwhile wait
3. a leader that is done makes the one that has waited longest the next leader, and hands the others their outputs
4. the next leader takes with it all that fit its run (`batching.Batching.take`), at the moment it runs

So a run grows with the load, and an idle engine never waits for company.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpufn_runtime.worker.engines import batching
from gpufn_runtime.worker.engines.base import Arrays, EngineSession
from gpufn_runtime.worker.engines.batching import Batching, Fitted

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from concurrent.futures import ThreadPoolExecutor


class _Call:
    """`leads` is set, or else `outputs` or `error`, before `wake` is called, in any thread. That gives False when there
    is nobody any more to wake."""

    __slots__ = ("error", "fitted", "leads", "outputs", "wake")

    def __init__(self, fitted: Fitted) -> None:
        self.fitted = fitted
        self.leads = False
        self.outputs: Arrays = {}
        self.error: BaseException | None = None
        self.wake: Callable[[], bool] = lambda: True

    def result(self) -> Arrays:
        if self.error is not None:
            raise self.error
        return self.outputs


class SharedRuns:
    """At most `engine.parallel` runs at once."""

    def __init__(self, engine: EngineSession, rules: Batching) -> None:
        self._engine = engine
        self._rules = rules
        self._lock = threading.Lock()
        self._free = engine.parallel  # nobody waits while one is
        self._waiting: deque[_Call] = deque()
        self._leaders: ThreadPoolExecutor | None = None  # for tasks that lead

    def run(self, fitted: Fitted) -> Arrays:
        call = _Call(fitted)
        woken = threading.Event()
        call.wake = functools.partial(_set, woken)
        self._enter(call)
        if not call.leads:
            try:
                woken.wait()
            except BaseException:  # the handler of a signal, in the main thread: a function's own alarm, say
                self._leave(call)
                raise
        if call.leads:
            self._lead(call)
        return call.result()

    async def run_async(self, fitted: Fitted) -> Arrays:
        """For tasks of an event loop, which goes on meanwhile."""
        import asyncio  # noqa: PLC0415  (70 ms of a cold start; here it is loaded already)

        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        call = _Call(fitted)
        call.wake = functools.partial(_call_soon, loop, woken.set)
        self._enter(call)
        if not call.leads:
            try:
                await woken.wait()
            except asyncio.CancelledError:
                self._leave(call)
                raise
        if call.leads:
            # Shielded: a leader that is cancelled leads all the same, for others count on it.
            await asyncio.shield(loop.run_in_executor(self._threads(), self._lead, call))
        return call.result()

    def _threads(self) -> ThreadPoolExecutor:
        """As many as lead at once, so that one is free. Those of the event loop may all be in `run`, behind the task
        that is to lead."""
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  (loaded with asyncio)

        with self._lock:
            if self._leaders is None:
                self._leaders = ThreadPoolExecutor(self._engine.parallel, "gpufn-leader")
            return self._leaders

    def _enter(self, call: _Call) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                call.leads = True
            else:
                self._waiting.append(call)

    def _leave(self, call: _Call) -> None:
        """Nobody waits for `call` any more."""
        with self._lock:
            if call in self._waiting:
                self._waiting.remove(call)
                return
        if call.leads:
            self._pass_on()

    def _lead(self, call: _Call) -> None:
        with self._lock:
            group = self._rules.take(call, self._waiting, lambda other: other.fitted)
        try:
            self._run_together(group)
        finally:
            self._pass_on()
            for other in group[1:]:
                other.wake()

    def _pass_on(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._free += 1
                    return
                following = self._waiting.popleft()
                following.leads = True
            if following.wake():
                return

    def _run_together(self, group: list[_Call]) -> None:
        try:
            calls = [call.fitted for call in group]
            joined = batching.join(calls)
            outputs = batching.whole([self._engine.run(part) for part in batching.parts(joined)])
            for call, own in zip(group, batching.split(outputs, calls), strict=True):
                call.outputs = own
        except BaseException as error:
            if len(group) == 1:
                group[0].error = error
                return
            for call in group:  # one of them may be to blame: only that one fails
                self._run_together([call])


def _set(event: threading.Event) -> bool:
    event.set()
    return True


def _call_soon(loop: AbstractEventLoop, callback: Callable[[], object]) -> bool:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:  # it is closed, and its tasks went with it
        return False
    return True
