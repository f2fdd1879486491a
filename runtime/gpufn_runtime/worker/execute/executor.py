"""Run calls in the user threads, of which the main thread is the first.

The reader thread passes attempts to `take`; user threads get them from one queue and send the results themselves. The
main thread loads the code, runs the hooks, and is the only user thread with `concurrency=1`. So thread-local state of
libraries (torch's grad mode, sqlite's connections) is present in every call. Further threads, up to `concurrency`, are
started for calls that wait or block: threads that only compute would just compete for the GIL. While calls are short, a
user thread reads the socket itself (`socket_reader`). Async functions run on one event loop (`event_loop`). Batches are
gathered (`batch_rules`) and run in the user threads.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from gpufn_core.errors import InvalidInput, ProtocolMismatch, RequestError
from gpufn_core.protocol.frames import Run, RunnerFrame
from gpufn_core.spec.function_spec import Batch, CallKind, FunctionSpec
from gpufn_runtime.worker.arguments.loader import Method
from gpufn_runtime.worker.context import current_attempt
from gpufn_runtime.worker.execute import call_ranges
from gpufn_runtime.worker.execute.attempts import Attempt, Attempts
from gpufn_runtime.worker.execute.batch_rules import Gathering
from gpufn_runtime.worker.execute.batch_runs import BatchRuns
from gpufn_runtime.worker.execute.results import Results
from gpufn_runtime.worker.execute.socket_reader import SocketHandoff
from gpufn_runtime.worker.execute.user_spans import attach
from gpufn_runtime.worker.link import LONGEST_SLEEP_S, Link
from gpufn_runtime.worker.process import exit_on_failure

if TYPE_CHECKING:
    from gpufn_runtime.worker.execute.event_loop import EventLoop

# Calls longer than _LONG_CALL_S get a thread each at once. After _STALLED_S without progress one thread is started.
_LONG_CALL_S = 0.001
_SHORT_CALL_S = 0.0005
_STALLED_S = 0.002

_ASYNC = (CallKind.ASYNC, CallKind.ASYNC_GENERATOR)
_ALONE = Batch(1)  # for a method without batches in a class with batches
_GENERATOR = CallKind.GENERATOR  # each call needs it, and Python looks up a member of an enum slowly


class Executor:
    def __init__(
        self,
        spec: FunctionSpec,
        attempts: Attempts,
        results: Results,
        link: Link,
        handle_frame: Callable[[RunnerFrame, bytes], None],
    ) -> None:
        self._link = link
        self._handle_frame = handle_frame
        self._handoff = SocketHandoff()
        self._is_stopping = False
        self._concurrency = spec.concurrency
        self._attempts = attempts
        self._results = results
        self._methods: dict[str, Method] = {}
        self._inbox: SimpleQueue[_Job] = SimpleQueue()
        self._threads = 1
        self._taken = 0  # jobs taken from the inbox, by all threads
        self._last_taken = 0
        self._progress_at = 0.0
        self._mean_call_s = 0.0  # exponentially weighted
        self._loop: EventLoop | None = None
        self._batch_runs = BatchRuns(attempts, results)
        self._spec = spec
        self._gathering: Gathering[Attempt] | None = None  # if a method has batches; then it has the runs of all
        self._gathering_lock = threading.Lock()

    def serve(self, methods: dict[str, Method]) -> None:
        """Set the methods that `take` may run from now on."""
        self._methods = methods
        if any(method.batched for method in methods.values()):
            batches = {each.name: self._spec.batch_of(each) for each in self._spec.methods}
            sizes = {name: batches[name] or _ALONE if method.batched else _ALONE for name, method in methods.items()}
            self._gathering = Gathering(sizes, self._concurrency)
        if any(method.kind in _ASYNC for method in methods.values()):
            self._event_loop()

    # --- in the reader thread -----------------------------------------------------------------------------------------

    def take(self, attempt: Attempt) -> None:
        method = self._methods.get(attempt.run.method)
        if method is None:
            methods = ", ".join(self._methods) or "none"
            error = InvalidInput(f"there is no method {attempt.run.method!r}; there is {methods}", field="method")
            self._results.rejected(attempt, error, time.perf_counter())
        elif self._gathering is not None:
            with self._gathering_lock:
                self._gathering.add(attempt.run.method, attempt, time.monotonic())
            self._hand_over(self._next_batch)
        elif method.kind in _ASYNC:
            self._event_loop().take(attempt, method)
        else:
            self._hand_over(functools.partial(self._run, attempt, method))

    def stop(self) -> None:
        """Stop `work` after the jobs in the queue. Safe in a signal handler."""
        self._is_stopping = True
        self._inbox.put(_stop)
        if self._handoff.is_handed_off:
            self._link.stop_receiving()

    def lend_socket(self) -> None:
        """Let a user thread read the socket while calls are short; return when the reader thread owns it again."""
        is_short = 0 < self._mean_call_s < _SHORT_CALL_S
        if is_short and self._gathering is None and self._loop is None and not self._is_stopping:
            self._inbox.put(functools.partial(self._read_and_run, self._handoff.hand_off()))
            self._handoff.wait()

    def run_alone(self, job: _Job) -> None:
        """Run a job in a user thread while there are no calls."""
        self._inbox.put(job)

    def _hand_over(self, job: _Job) -> None:
        self._inbox.put(job)
        if self._mean_call_s > _LONG_CALL_S and self._attempts.count > self._threads:
            self._start_thread()

    def check_inbox(self) -> float | None:
        """Make sure that the inbox is processed. Returns the seconds until the next check, None if it is empty."""
        if self._threads >= self._concurrency or self._inbox.empty():
            return None
        now = time.monotonic()
        if self._taken != self._last_taken:
            self._last_taken, self._progress_at = self._taken, now
        elif now - self._progress_at >= _STALLED_S:
            self._start_thread()
            self._progress_at = now
        return _STALLED_S

    def _start_thread(self) -> None:
        if self._threads < self._concurrency:
            with contextlib.suppress(RuntimeError):  # no thread available now: the existing ones do the work
                threading.Thread(
                    target=exit_on_failure(self.work), name=f"gpufn-user-{self._threads}", daemon=True
                ).start()
                self._threads += 1

    # --- in the user threads ------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Run jobs until `stop`."""
        while True:
            try:
                job = self._inbox.get(timeout=self._batch_wait_s())
            except Empty:
                job = self._next_batch
            if job is _stop:
                self._inbox.put(_stop)  # for the other threads
                return
            self._taken += 1
            job()

    def _read_and_run(self, number: int) -> None:
        """Read the socket and run its calls, until calls get long, the runner disconnects, or `stop`."""
        link, handoff = self._link, self._handoff
        try:
            while handoff.is_mine(number):
                if self._is_stopping or self._mean_call_s > _LONG_CALL_S or not (link.frames or link.receive()):
                    handoff.give_back()
                    return
                while link.frames and handoff.is_mine(number):
                    frame, body = link.frames.popleft()
                    method = self._methods.get(frame.method) if type(frame) is Run else None
                    if method is None:
                        self._handle_frame(frame, body)
                        if not self._inbox.empty():  # the frame queued a job for this thread
                            handoff.give_back()
                            return
                    else:
                        handoff.begin_call()
                        self._run(self._attempts.add(frame, body, link.number), method)  # type: ignore[arg-type]
        except ProtocolMismatch as error:
            handoff.give_back(error)

    def call_hook(self, hook: Callable[[], Any]) -> None:
        result = self._call(hook)
        if hasattr(result, "__await__"):
            self._event_loop().run(_await(result))

    def _run(self, attempt: Attempt, method: Method) -> None:
        if not self._attempts.start(attempt):
            return
        token = current_attempt.set(attempt)
        detach = attach(attempt.run) if attempt.run.trace else None
        started = time.perf_counter()
        try:
            try:
                args, kwargs = method.parameters.bind(attempt.run.content_type, attempt.take_body())
            except RequestError as error:
                self._results.rejected(attempt, error, started)
                return
            try:
                result = self._call(method.call, *args, **kwargs)
                if method.kind is _GENERATOR:
                    self._iterate(attempt, result, started)
                    return
            except BaseException as error:
                self._link.exit_if_forked(error)  # forked in a generator's body
                # Also SystemExit and KeyboardInterrupt: a call must not end the worker.
                self._results.raised(attempt, error, started)
            else:
                self._results.returned(attempt, result, started)
        finally:
            current_attempt.reset(token)
            if detach is not None:
                detach()
            self._mean_call_s += 0.1 * (time.perf_counter() - started - self._mean_call_s)

    def _call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        open_range = call_ranges.opener
        try:
            result = call(*args, **kwargs) if open_range is None else call_ranges.within(open_range, call, args, kwargs)
        except BaseException as error:
            self._link.exit_if_forked(error)
            raise
        self._link.exit_if_forked()
        return result

    def _iterate(self, attempt: Attempt, items: Any, started: float) -> None:
        changed = threading.Event()
        attempt.on_change = changed.set
        collected: list[Any] = []
        with contextlib.closing(items):
            for item in items:
                self._link.exit_if_forked()
                if not attempt.run.stream:
                    collected.append(item)
                    if attempt.run.is_live:
                        self._results.live_item(attempt, len(collected) - 1, item)
                while attempt.run.stream and not attempt.may_send_item and not attempt.cancel_requested:
                    changed.wait()
                    changed.clear()
                if attempt.cancel_requested:
                    break
                if attempt.run.stream:
                    self._results.item(attempt, item)
        self._link.exit_if_forked()
        if attempt.cancel_requested:
            self._results.cancelled(attempt, started)
        elif attempt.run.stream:
            self._results.exhausted(attempt, started)
        else:
            self._results.returned(attempt, collected, started)

    def _next_batch(self) -> None:
        """Run the batch that is due, and the batches that become due before it has ended."""
        gathering = self._gathering
        if gathering is None:
            return
        with self._gathering_lock:
            batch = gathering.take(time.monotonic())
        while batch is not None:
            try:
                self._run_batch(batch, self._methods[batch[0].run.method])
            finally:
                with self._gathering_lock:
                    gathering.ended()
                    batch = gathering.take(time.monotonic())

    def _run_batch(self, batch: list[Attempt], method: Method) -> None:
        is_async = method.kind in _ASYNC
        if method.batched:
            call = functools.partial(self._run_async if is_async else self._call, method.call)
            self._batch_runs.run(batch, method, call)
        elif is_async:
            self._event_loop().run_call(batch[0], method)
        else:
            self._run(batch[0], method)

    def _batch_wait_s(self) -> float:
        """Return the seconds until a batch is due, at most LONGEST_SLEEP_S."""
        if self._gathering is None:
            return LONGEST_SLEEP_S
        with self._gathering_lock:
            due_at = self._gathering.due_at()
        return LONGEST_SLEEP_S if due_at is None else min(max(0.0, due_at - time.monotonic()), LONGEST_SLEEP_S)

    def _run_async(self, call: Callable[..., Any], **kwargs: Any) -> Any:
        return self._event_loop().run(call(**kwargs))

    def _event_loop(self) -> EventLoop:
        if self._loop is None:
            from gpufn_runtime.worker.execute.event_loop import EventLoop  # noqa: PLC0415  (asyncio takes 70 ms)

            self._loop = EventLoop(self._concurrency, self._link, self._attempts, self._results)
        return self._loop


_Job = Callable[[], None]


def _stop() -> None:
    """Queued job that makes `work` return."""


async def _await(result: Any) -> Any:
    return await result
