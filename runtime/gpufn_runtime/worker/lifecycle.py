"""Life cycle of a worker.

1. started cold: move into a PID namespace. Arrange to end with the node's supervisor; confine the process (cgroup,
   limits, sandbox)
2. connect to the runner's socket and send Hello; with a part of a GPU: verify that the limits are enforced
3. load the bundle's code; instantiate the class and run its @enter hooks: Ready, or StartFailed and, once the runner
   has hung up, exit code 3
4. the reader thread receives frames; the user threads, the main thread first, run calls (`executor`)
5. the runner disconnects: drop queued calls, reconnect for RECONNECT_S, send Hello and Ready again, with the running
   attempts and the attempts that ended meanwhile; otherwise exit code 4
6. Park: while no call runs, move GPU memory to host memory: Ready, parked, or NotParked. Resume: move it back; Ready,
   or StartFailed and exit code 3 (`parking`)
7. Drain: finish the calls that are here. SIGTERM: notify the runner, which may have sent a call that has not arrived
   yet, and wait for its Drain; without a runner, finish the received calls
8. run the @exit hooks, exit
9. a GPU fault: like SIGTERM, because the worker has to be replaced
In a gang: rank 0 listens for the other ranks before step 3, and is Ready when they are. It passes its calls to them and
ends with the first of them that ends (`gang.rank_zero`). To the other ranks, rank 0 is the runner; without it, they
exit.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import msgspec

from gpufn.call import context, transport
from gpufn.data import channel
from gpufn_core.domain.worker import Cause
from gpufn_core.errors import DeviceFailed, ErrorInfo, FunctionStartFailed, ProtocolMismatch
from gpufn_core.protocol import frames
from gpufn_core.protocol.frames import (
    Answer,
    AnswerItem,
    Cancel,
    Credit,
    Drain,
    Draining,
    Freed,
    Input,
    NotParked,
    Park,
    Ready,
    Resume,
    Run,
    RunnerFrame,
    StartFailed,
    Trace,
    Verb,
)
from gpufn_core.protocol.launch import (
    CONNECT_S,
    EXIT_GANG_LOST,
    EXIT_GPU_FAULT,
    EXIT_HOOKS_S,
    EXIT_LINK_LOST,
    EXIT_START_FAILED,
    LAST_CALL_S,
    RECONNECT_S,
    WorkerConfig,
)
from gpufn_platform.process.supervisor_fifo import end_with_supervisor
from gpufn_platform.sandbox.enter import enter
from gpufn_platform.shared_bodies.bodies import SharedBodies
from gpufn_runtime.worker import process
from gpufn_runtime.worker.arguments import loader
from gpufn_runtime.worker.arguments.loader import Loaded, LoadError
from gpufn_runtime.worker.execute.attempts import Attempt, Attempts
from gpufn_runtime.worker.execute.error_report import bounded, describe, unchanged
from gpufn_runtime.worker.execute.executor import Executor
from gpufn_runtime.worker.execute.results import End, Results
from gpufn_runtime.worker.gpu.parking import CannotPark, Parking
from gpufn_runtime.worker.link import Link, unix_dialer
from gpufn_runtime.worker.platform_calls.data_channel import DataChannel
from gpufn_runtime.worker.platform_calls.nested_calls import NestedCalls
from gpufn_runtime.worker.platform_calls.output import Output
from gpufn_runtime.worker.platform_calls.pending_requests import PendingRequests

if TYPE_CHECKING:
    from gpufn_runtime.worker.gang.rank_zero import RankZero
    from gpufn_runtime.worker.gpu.device_errors import DeviceFault

_HUNG_UP_WITHIN_S = 5.0
_DRAINED_WITHIN_S = 10.0


def run_worker(config_path: str, *, is_confined: bool = False) -> NoReturn:
    """Run a worker. `is_confined`: the process ends with the supervisor, and has its limits and its sandbox."""
    with open(config_path, "rb") as file:  # pathlib would add 6 ms to a cold start
        config = msgspec.json.decode(file.read(), type=WorkerConfig)
    entry_error = None
    try:
        process.move_into_pid_namespace(config.sandbox)  # first: a worker belongs to the process that made it
    except OSError as error:
        entry_error = LoadError(f"cannot enter the sandbox: {error}")
    try:
        code = Worker(config, is_confined=is_confined, entry_error=entry_error).run()
    except BaseException:  # from a user's signal handler; user threads would keep the process alive without calls
        traceback.print_exc(file=sys.__stderr__)
        code = 1
    process.exit_now(code)


class Worker:
    def __init__(
        self, config: WorkerConfig, *, is_confined: bool = False, entry_error: LoadError | None = None
    ) -> None:
        self._config = config
        self._is_confined = is_confined
        self._entry_error = entry_error  # why it cannot start
        gang, results, requests = config.gang, Results, PendingRequests
        self._is_other_rank = gang is not None and gang.rank_0 != config.worker
        dial = unix_dialer(config.socket)
        if gang is not None and self._is_other_rank:
            from gpufn_runtime.worker.gang import connection, other_rank  # noqa: PLC0415  (most workers are alone)

            dial = functools.partial(connection.dial, gang)
            results, requests = other_rank.OtherRankResults, other_rank.OtherRankRequests
        self._link = Link(dial, config.worker)
        shared_bodies = SharedBodies(config.shared_bodies)
        self._attempts = Attempts(shared_bodies)
        self._output = Output(self._link)
        self._results = results(
            self._link, self._attempts, self._output, config.bundle_dir, shared_bodies, may_pickle=config.spec.pickle
        )
        self._executor = Executor(config.spec, self._attempts, self._results, self._link, self._handle_frame)
        self._requests = requests(self._link, shared_bodies)
        self._redact: Callable[[str], str] = unchanged
        self._draining = False  # the worker has to end
        self._may_end = False  # and no call is on its way to it
        self._exit_code = 0
        self._cause = Cause.STOP  # why it ends, unless its runner or a fault gives another reason
        self._is_ready = False
        self._has_failed = False  # it cannot start, and has notified the runner
        self._runner_left = threading.Event()
        self._drained = threading.Event()  # the runner has sent Drain
        self._rank_zero: RankZero | None = None  # if this process is rank 0 of a gang
        if gang is not None and not self._is_other_rank:
            from gpufn_runtime.worker.gang.rank_zero import RankZero  # noqa: PLC0415

            self._rank_zero = RankZero(gang, self._link, self, config.start_by)
            self._attempts.on_begin, self._results.join = self._rank_zero.begin, self._rank_zero.join
        self._forking = threading.local()
        if config.spec.resources.gpu:
            from gpufn_runtime.worker.gpu.device_errors import fault_of  # noqa: PLC0415  (saves 1 ms without a GPU)

            self._results.fault_of = functools.partial(fault_of, shares_by_mps=config.mps is not None)
            self._results.on_fault = self._on_fault
        self._attempts.on_idle = self._stop_if_drained
        self._attempts.on_stale_end = lambda: self._link.send(Freed())

    def run(self) -> int:
        """Run until the worker ends; returns the exit code."""
        process.enable_crash_tracebacks()
        fifo = "" if self._is_confined else self._config.supervisor_fifo
        if fifo and not end_with_supervisor(fifo):
            print("the platform that started this worker has ended", file=sys.stderr)  # noqa: T201
            return EXIT_LINK_LOST
        confine_error = self._entry_error or self._confine()
        if not self._connect():
            print(self._no_peer(), file=sys.stderr)  # noqa: T201
            return EXIT_GANG_LOST if self._is_other_rank else EXIT_LINK_LOST
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork_in_child
        )
        self._output.capture()
        calls = NestedCalls(self._link, self._requests, may_pickle=self._config.spec.pickle)
        transport.install(calls)
        context.install(calls.context)
        channel.install(DataChannel(self._requests))
        self._link.has_peer.set()
        threading.Thread(target=self._read, name="gpufn-reader", daemon=True).start()
        if confine_error is not None:
            self._start_failed("load", confine_error)
            return self._end_failed_start()
        loaded = self._start()
        if loaded is None:
            return self._end_failed_start()
        self._executor.work()
        if self._rank_zero is not None:
            self._rank_zero.drain()  # the exit hooks of all ranks run at the same time
        self._exit(loaded)
        return self._exit_code

    def _connect(self) -> bool:
        """Connect to the runner; in a rank above 0, to rank 0, whose node may still fetch weights."""
        gang = self._config.gang
        if gang is None or not self._is_other_rank:
            return self._link.connect(CONNECT_S)
        from gpufn_runtime.worker.gang import connection  # noqa: PLC0415

        return connection.reaches(gang) and self._link.connect(self._config.start_by - time.time())

    def _no_peer(self) -> str:
        gang = self._config.gang
        if gang is None or not self._is_other_rank:
            return f"no runner listens on {self._config.socket}"
        return f"{gang.describe(0)} does not accept this process at {gang.address}:{gang.port} (GPUFN_NODE_ADDRESS)"

    # --- starting -----------------------------------------------------------------------------------------------------

    def _confine(self) -> LoadError | None:
        if self._config.gang is not None:
            from gpufn_runtime.worker.gang.environment import environment  # noqa: PLC0415

            os.environ.update(environment(self._config.gang, self._config.worker))
        if not self._is_confined and (error := self._enter_sandbox()) is not None:
            return error
        os.environ.update(self._config.spec.env)  # only now: libraries load code that a variable names
        time.tzset()  # the function may set TZ; the C library may have read the template's value
        if self._config.secrets_socket:
            try:
                self._receive_secrets()
            except OSError as failure:
                return LoadError(f"cannot receive the secrets: {failure}")
        process.use_cores(self._config.spec.resources.cpu)  # after the cgroup, since this may start threads
        return None

    def _enter_sandbox(self) -> LoadError | None:
        try:
            process.confine(self._config)
        except (OSError, ValueError) as error:
            return LoadError(f"cannot set the worker's limits: {error}")
        if self._config.sandbox is not None:
            try:
                enter(self._config.sandbox)
            except OSError as error:
                return LoadError(f"cannot enter the sandbox: {error}")
        return None

    def _receive_secrets(self) -> None:
        from gpufn_platform.secrets.redaction import redact  # noqa: PLC0415  (most functions have no secrets)
        from gpufn_runtime.worker import secrets  # noqa: PLC0415

        patterns = secrets.receive(self._config.secrets_socket)
        self._output.redact(patterns)
        self._redact = self._results.redact = functools.partial(redact, patterns)

    def _start(self) -> Loaded | None:
        started = time.perf_counter()
        phase = "join"
        try:
            self._prove_share()
            if self._rank_zero is not None:
                self._rank_zero.listen()
            phase = "load"
            loaded = loader.load(self._config)
            loaded_at = time.perf_counter()
            phase = "enter"
            loaded.instantiate()
            for hook in loaded.enter:
                self._executor.call_hook(hook)
            phase = "join"
            if self._rank_zero is not None:
                self._rank_zero.wait_until_ready()
        except BaseException as error:
            self._start_failed(phase, error)
            return None
        self._link.exit_if_forked()  # in a child, if a module or a constructor forked
        warm_at = time.perf_counter()
        self._output.capture_logging()
        self._executor.serve(loaded.methods)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, _ignore)  # Ctrl-C in the terminal of `gpufn up` is handled by its supervisor
        self._parking = Parking(loaded, self._executor.call_hook, self._config.memory_bytes)
        self._ready = Ready(loaded_at - started, warm_at - loaded_at, loader.third_party.newly_loaded())
        self._is_ready = True
        self._link.announce(self._ready)
        return loaded

    def _prove_share(self) -> None:
        """Verify the MPS limits before any user code runs."""
        if self._config.mps is None:
            return
        from gpufn_runtime.worker.gpu import memory_limit, mps_limits  # noqa: PLC0415  (saves 5 ms without MPS)
        from gpufn_runtime.worker.gpu.cuda_driver import Driver  # noqa: PLC0415

        try:
            driver = Driver()
        except OSError as error:
            raise DeviceFailed(f"there is no CUDA driver: {error}") from error
        mps_limits.verify(self._config.mps, driver)
        memory_limit.apply(self._config.mps.vram_bytes, driver.total_bytes())

    def _start_failed(self, phase: str, error: BaseException) -> None:
        self._output.end(None)
        fault = self._results.fault_of(error)
        if isinstance(error, DeviceFailed):
            info = error.info()
        elif fault is not None and fault.is_lost:
            info = DeviceFailed(fault.describe()).info()
        elif isinstance(error, LoadError):
            info = bounded(FunctionStartFailed(str(error)).info(), self._redact)
        else:
            info = describe(error, self._config.bundle_dir, FunctionStartFailed.code, self._redact)
        self._report_failed_start(
            phase, info, EXIT_GPU_FAULT if fault is not None and fault.is_of_device else EXIT_START_FAILED
        )

    def _report_failed_start(self, phase: str, info: ErrorInfo, exit_code: int) -> None:
        self._exit_code = exit_code
        self._has_failed = True
        if not self._link.send_packed(frames.encode(StartFailed(phase, info))):
            self._runner_left.set()

    def _end_failed_start(self) -> int:
        """Wait until the runner has disconnected, and so has reported the error: the agent reports the exit with fewer
        details, and the controller acts on the first report. Return the exit code."""
        self._runner_left.wait(_HUNG_UP_WITHIN_S)
        return self._exit_code

    # --- the reader thread --------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while True:
                while self._link.frames or self._link.receive(self._executor.check_inbox()):
                    while self._link.frames:
                        self._handle_frame(*self._link.frames.popleft())
                    self._executor.lend_socket()
                self._link.has_peer.clear()
                if self._has_failed:
                    self._runner_left.set()
                    return
                self._may_end = True
                self._abandon()
                self._attempts.check_idle()
                if self._is_other_rank and not self._draining:
                    process.exit_now(EXIT_GANG_LOST)  # its code may wait for rank 0 without an end
                if self._draining or not self._link.connect(RECONNECT_S, self._attempts.leftovers):
                    break
                for result in self._attempts.resume(self._link.number):
                    self._link.send_packed(result)
                self._link.has_peer.set()
                self._may_end = False
                if self._draining:
                    self._link.send(Draining())
        except BaseException as error:
            if isinstance(error, ProtocolMismatch):  # a runner of another release: a new worker has to connect to it
                print(f"cannot decode the runner's frames: {error}", file=sys.__stderr__)
            else:  # for example out of memory: without its reader the worker is useless
                traceback.print_exc(file=sys.__stderr__)
            self._link.close()
            self._abandon()
        if not self._draining:
            self._cause = Cause.ERROR
            self._exit_code = EXIT_LINK_LOST
        self._executor.stop()
        time.sleep(LAST_CALL_S)
        process.exit_now(self._exit_code)

    def _abandon(self) -> None:
        unanswered = self._requests.unanswered()
        abandoned = self._attempts.abandon({request.attempt for request in unanswered})  # first: `lose` may end some
        if self._rank_zero is not None:
            for attempt in abandoned:
                self._rank_zero.cancel(attempt.run.attempt)
        for request in unanswered:
            request.lose()

    def _handle_frame(self, frame: RunnerFrame, body: bytes) -> None:
        kind = type(frame)
        if kind is Run:
            self._executor.take(self._attempts.add(frame, body, self._link.number))  # type: ignore[arg-type]
        elif isinstance(frame, Credit):
            self._attempts.credit(frame.attempt, frame.items)
        elif isinstance(frame, Input):
            self._attempts.take_input(frame.attempt, frame.number, body)
        elif isinstance(frame, Cancel):
            cancelled = self._attempts.cancel(frame.attempt)
            if cancelled is not None:
                self._results.cancelled_in_queue(cancelled)
            elif self._rank_zero is not None:
                self._rank_zero.cancel(frame.attempt)
        elif isinstance(frame, (Answer, AnswerItem)):
            self._requests.deliver(frame, body)
        elif isinstance(frame, Drain):
            self._cause = frame.cause or self._cause
            self._draining = self._may_end = True
            self._drained.set()
            self._stop_if_drained()
        elif isinstance(frame, Trace):
            from gpufn_runtime.worker.gpu import torch_trace  # noqa: PLC0415  (few workers are profiled)
            from gpufn_runtime.worker.platform_calls import memory_trace  # noqa: PLC0415

            (torch_trace if frame.is_gpu else memory_trace).start(self._link, frame)
        elif isinstance(frame, Park):
            self._link.withdraw_ready()
            self._executor.run_alone(functools.partial(self._park, frame.host_bytes, frame.cause or Cause.IDLE))
        elif isinstance(frame, Resume):
            self._link.withdraw_ready()
            self._executor.run_alone(functools.partial(self._resume, frame.cause or Cause.CALLS))

    # --- events of a gang, in its threads -----------------------------------------------------------------------------

    def on_gang_failed(self, attempt: Attempt | None, end: End) -> None:
        """End this process, whose code may wait for the lost rank without an end. The runner first receives the reason,
        and sends no other call."""
        error = end[1]
        print("the gang ends" if error is None else error.message, file=sys.__stderr__, flush=True)
        if self._is_ready or error is None:
            self._exit_code, self._cause = EXIT_GANG_LOST, Cause.ERROR
            self._start_drain()
            if attempt is not None:
                self._results.interrupt(attempt, end)
            self._drained.wait(_DRAINED_WITHIN_S)
        else:
            self._report_failed_start("join", error, EXIT_START_FAILED)
            self._runner_left.wait(_HUNG_UP_WITHIN_S)
        process.exit_now(self._exit_code)

    def on_rank_draining(self) -> None:
        """End the gang as if this process had received the signal."""
        if not self._draining:
            self._start_drain()

    def restore(self, attempt: Attempt) -> tuple[str, bytes]:
        return self._requests.request(Verb.RESTORE, "", attempt=attempt)

    # --- parking, in a user thread ------------------------------------------------------------------------------------

    def _park(self, host_bytes: int, cause: Cause) -> None:
        try:
            parked = self._parking.park(host_bytes, cause.value)
        except CannotPark as error:
            self._link.send(NotParked(FunctionStartFailed(str(error)).info(), error.needs_bytes))
        except BaseException as error:
            info = describe(error, self._config.bundle_dir, FunctionStartFailed.code, self._redact)
            self._link.send(NotParked(info))
        else:
            self._link.announce(msgspec.structs.replace(self._ready, parked=parked))

    def _resume(self, cause: Cause) -> None:
        try:
            self._parking.resume(cause.value)
        except BaseException as error:
            self._start_failed("resume", error)
            process.exit_now(self._exit_code)
        self._link.announce(self._ready)

    # --- ending -------------------------------------------------------------------------------------------------------

    def _on_sigterm(self, *_: object) -> None:
        # Runs in the main thread between any two bytecodes of user code. Only the link's lock allows that.
        self._start_drain()

    def _on_fault(self, fault: DeviceFault) -> None:
        if not self._draining:
            print(f"{fault.describe()}: replacing this worker", file=sys.__stderr__, flush=True)
            self._cause = Cause.ERROR
            if fault.is_of_device:
                self._exit_code = EXIT_GPU_FAULT
            self._start_drain()

    def _start_drain(self) -> None:
        self._draining = True
        self._link.send(Draining())
        self._stop_if_drained()

    def _stop_if_drained(self) -> None:
        if self._draining and self._may_end and self._attempts.idle:
            self._executor.stop()

    def _exit(self, loaded: Loaded) -> None:
        """Run the exit hooks. An exception is logged, and the other hooks run. If they take too long, exit without
        them: the process would keep its GPU."""
        if loaded.exit:
            limit = threading.Timer(EXIT_HOOKS_S, self._exit_without_hooks)
            limit.daemon = True
            limit.start()
        for hook in loaded.exit:
            try:
                self._executor.call_hook(functools.partial(hook, self._cause.value))
            except BaseException:
                traceback.print_exc()
        self._output.end(None)

    def _exit_without_hooks(self) -> None:
        print(f"the @exit methods did not end within {EXIT_HOOKS_S:g} s", file=sys.stderr, flush=True)  # noqa: T201
        self._output.end(None)
        process.exit_now(self._exit_code)

    # --- child processes forked by user code (for example by a DataLoader) --------------------------------------------

    def _before_fork(self) -> None:
        # Block SIGTERM: the child must get the default action, and not run our handler in its first moments.
        self._forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _after_fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._forking.mask)

    def _after_fork_in_child(self) -> None:
        """In the child: print as usual, end on SIGTERM, and end with the call that forked it."""
        self._output.release()
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._after_fork()


def _ignore(*_: object) -> None:
    """Signal handler that does nothing. SIG_IGN would be inherited by programs that user code starts."""
