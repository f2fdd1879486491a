"""Share runs of one engine between callers in several threads, without a dedicated thread.

1. a call that finds the engine free becomes a leader: it runs at once, alone
2. calls that arrive meanwhile wait
3. a leader that finishes makes the longest-waiting call the next leader, and wakes the other calls of its run
4. the next leader takes all calls that fit its run (`batching.Batching.take`) at the moment it runs

So runs grow with the load, and an idle engine never waits for more calls.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from gpufn_runtime.worker.engines import batching
from gpufn_runtime.worker.engines.base import Arrays, EngineSession
from gpufn_runtime.worker.engines.batching import Batching, Fitted

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from concurrent.futures import ThreadPoolExecutor


class _Call(msgspec.Struct, eq=False):
    """A waiting call. `leads`, or `outputs` or `error`, is set before `wake` is called, in any thread. `wake` returns
    False if the waiting task no longer exists."""

    fitted: Fitted
    leads: bool = False
    outputs: Arrays = {}
    error: BaseException | None = None
    wake: Callable[[], bool] = lambda: True

    def result(self) -> Arrays:
        if self.error is not None:
            raise self.error
        return self.outputs


class SharedRuns:
    """Shared runs of an engine, at most `engine.parallel` at once."""

    def __init__(self, engine: EngineSession, rules: Batching) -> None:
        self._engine = engine
        self._rules = rules
        self._lock = threading.Lock()
        self._free = engine.parallel  # while this is not 0, no call waits
        self._waiting: deque[_Call] = deque()
        self._leaders: ThreadPoolExecutor | None = None  # for leading tasks

    def run(self, fitted: Fitted) -> Arrays:
        call = _Call(fitted)
        woken = threading.Event()
        call.wake = functools.partial(_set, woken)
        self._enter(call)
        if not call.leads:
            try:
                woken.wait()
            except BaseException:  # raised by a signal handler in the main thread, such as the function's own alarm
                self._leave(call)
                raise
        if call.leads:
            self._lead(call)
        return call.result()

    async def run_async(self, fitted: Fitted) -> Arrays:
        """Like `run`, for tasks of an event loop, which continues meanwhile."""
        import asyncio  # noqa: PLC0415  (takes 70 ms of a cold start; already imported here)

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
            # Shielded: a leader must finish even if it is cancelled, since other calls depend on it.
            await asyncio.shield(loop.run_in_executor(self._threads(), self._lead, call))
        return call.result()

    def _threads(self) -> ThreadPoolExecutor:
        """Return a pool with one thread per parallel run, so that one is always free. The threads of the event loop may
        all be blocked in `run` until the leading task has run."""
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  (imported by asyncio anyway)

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
        """Remove a call that is no longer waited for."""
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
                next_leader = self._waiting.popleft()
                next_leader.leads = True
            if next_leader.wake():
                return

    def _run_together(self, group: list[_Call]) -> None:
        try:
            calls = [call.fitted for call in group]
            joined = batching.join(calls)
            outputs = batching.whole([self._engine.run(part) for part in batching.parts(joined)])
            for call, call_outputs in zip(group, batching.split(outputs, calls), strict=True):
                call.outputs = call_outputs
        except BaseException as error:
            if len(group) == 1:
                group[0].error = error
                return
            for call in group:  # one of them may be the cause: only that call fails
                self._run_together([call])


def _set(event: threading.Event) -> bool:
    event.set()
    return True


def _call_soon(loop: AbstractEventLoop, callback: Callable[[], object]) -> bool:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:  # the loop is closed, and its tasks have ended
        return False
    return True
