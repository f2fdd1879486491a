"""Child processes for work that may crash, hang or run out of memory, with a request, a progress pipe and a result.

    work = ChildProcess("gpufn_builder.processes.build_process", request, folder, environ, name="the build")
    result = work.wait(on_progress, BuildResult, timeout_s=600)  # or BuildFailed with its last output

Each line on the pipe is progress. Output is progress for an hour after the last line, because a process can print
forever. A process without progress for `timeout_s` is killed. The parent repeats the last ProgressUpdate for output,
so that its own parent sees progress too.

A build's process leads a process group, which the processes of its candidates join, so that the whole group can be
killed, and paused while another build measures. All of them die with their parent, paused ones too. A process that a
hostile model has taken over can leave the group (setsid) and clear its death signal. In its sandbox it is in a PID
namespace, which ends with the build. `serve` is the child's side.

A process that reads an untrusted model may be taken over by it, so it runs in a sandbox (`sandboxes`). Its messages,
files and output are not trusted to be well formed or finite. Whatever the process does, `wait` returns a result or
raises BuildFailed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gpufn_builder.checks.inaccurate_output import InaccurateOutput
from gpufn_builder.processes.memory import held
from gpufn_builder.processes.output_tail import OutputFile
from gpufn_builder.processes.process_end import describe_exit, read_result
from gpufn_builder.processes.process_messages import Failed, Line, ProgressUpdate, Request, one_line, truncate_error
from gpufn_core.domain.devices.device import NO_MPS
from gpufn_core.domain.devices.engine import BuildStage
from gpufn_core.encoding.msgspec_errors import DECODE_ERRORS
from gpufn_core.errors import BuildFailed, ErrorInfo, GpufnError
from gpufn_core.protocol.launch import SANDBOX_VARIABLE, Sandbox
from gpufn_core.spec.units import format_bytes
from gpufn_platform.process.disk_use import total_bytes

_PIPE_BYTES: Final = 1 << 20  # the largest size of a pipe
_LONGEST_LINE: Final = 1 << 16
_POLL_S: Final = 1.0
_PROCESSES: Final = 2  # those with work at the same time: the build's, and a candidate's
_REPEAT_S: Final = 0.25  # less than the shortest timeout, also if the parent passes the repetition on as late
_PR_SET_PDEATHSIG: Final = 1
_FAILED: Final = 1
_UNKNOWN: Final = 0  # the parent is a process that waits for its sandbox
_REQUEST: Final = "request.json"
_RESULT: Final = "result"
_IN_SANDBOX: Final = "gpufn_platform.sandbox"
# Environment variables that a compiler process needs. The URL and password of NATS are not passed on.
_PASSED_ON: Final = ("PATH", "PYTHONPATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")

_OUTPUT_COUNTS_S: Final = 3600.0  # after the last line
_LONGEST_S: Final = 86_400.0  # for a process that makes progress; a hostile model could make progress forever
_MORE_TIME: Final = "if one step of the model takes longer, set build_timeout of the Model (--build-timeout)"

ReportProgress = Callable[[BuildStage, float, str], None]
_Request = TypeVar("_Request", bound=Request)
_Result = TypeVar("_Result", bound=msgspec.Struct)


class _Stalled(Exception):
    """The process makes no progress."""


class _ExceedsLimit(Exception):
    """The process and its descendants exceed a limit: of memory, disk space or time."""


def environment(environ: Mapping[str, str], *, gpu: str = "") -> dict[str, str]:
    """Return the environment of a compiler process. `gpu` is the uuid of the visible GPU; empty for none."""
    passed = {name: environ[name] for name in _PASSED_ON if name in environ}
    # ONNX Runtime (1.29 and later) sends telemetry about loaded models unless it is disabled.
    return {
        **passed,
        **NO_MPS,
        "CUDA_VISIBLE_DEVICES": gpu,
        "PYTHONDONTWRITEBYTECODE": "1",
        "ORT_DISABLE_TELEMETRY": "1",
    }


class ChildProcess:
    """A child process. `end` may be called from any thread."""

    def __init__(
        self,
        module: str,
        request: Request,
        folder: Path,
        environ: Mapping[str, str],
        *,
        name: str,
        leads_group: bool = True,
        sandbox: Sandbox | None = None,
        writes_to: Sequence[Path] = (),
    ) -> None:
        """Start the process. `folder` is for the request and the output. `name` identifies it in errors. The processes
        that it starts are in its `sandbox` too. The request's disk limit applies to the bytes that it adds to the
        folders `writes_to`."""
        self._name = name
        self._leads_group = leads_group
        self._memory_limit_bytes = request.memory_limit_bytes
        self._disk_limit_bytes = request.disk_limit_bytes
        self._writes_to = tuple(writes_to)
        self._stored_before = total_bytes(*writes_to)
        self._result = folder / _RESULT
        self._lock = threading.Lock()
        self._is_alive = True
        self._paused_until = -math.inf  # time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _REQUEST
        path.write_bytes(msgspec.json.encode(request))
        self._output_file = OutputFile(folder / "output.txt")
        variables = dict(environ)
        modules = [module]
        if sandbox is not None:
            modules.insert(0, _IN_SANDBOX)
            variables |= {SANDBOX_VARIABLE: msgspec.json.encode(sandbox).decode()}
            variables |= dict.fromkeys(("HOME", "TMPDIR"), os.fspath(folder))  # there is no other folder on a disk
        parent = os.getpid() if sandbox is None else _UNKNOWN
        self._lines, writer = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", "-u", "-m", *modules, str(path), str(writer), str(parent)],
                stdin=subprocess.DEVNULL,
                stdout=self._output_file.file,
                stderr=self._output_file.file,
                env=variables,
                cwd=folder,
                pass_fds=[writer],
                process_group=0 if leads_group else None,
            )
        except BaseException:
            os.close(self._lines)
            self._output_file.close()
            raise
        finally:
            os.close(writer)
        self._pidfd = os.pidfd_open(self._process.pid)

    def wait(
        self,
        on_progress: Callable[[ProgressUpdate], None],
        result_type: type[_Result],
        timeout_s: float,
        *,
        grace_s: float = 0.0,
        on_held: Callable[[int], None] | None = None,
    ) -> _Result:
        """Wait for the process and return its result. Raises BuildFailed if it fails, or makes no progress for
        `timeout_s`. It gets `grace_s` more, because a child that knows the timeout reports the step that made no
        progress. `on_held` receives the memory that it and its descendants hold, with each line and each second."""
        last: ProgressUpdate | None = None
        error: ErrorInfo | None = None
        problem = case = ""
        try:
            for line in self._lines_while_active(timeout_s + grace_s, on_held):
                if isinstance(line, Failed):
                    error, case = line.error, line.case
                else:
                    last = line
                    on_progress(line)
        except _Stalled:
            problem = f"made no progress for {timeout_s:g} s and was stopped: {_MORE_TIME}"
        except _ExceedsLimit as exceeded:
            problem = str(exceeded)
        except DECODE_ERRORS:
            problem = "sent an invalid message"
        finally:
            code, output = self._close()
        stage: BuildStage | str = last.stage if last else ""
        if not problem and error is not None:
            log = error.traceback or output
            where = {"stage": error.stage or stage, "node": error.node or "", "log": log}
            raise InaccurateOutput(error.message, case=case, **where) if case else BuildFailed(error.message, **where)
        if not problem and code:
            problem = describe_exit(code, output, self._memory_limit_bytes)
        if not problem:
            try:
                return msgspec.msgpack.decode(read_result(self._result), type=result_type)
            except FileNotFoundError:
                problem = "ended without a result"
            except (OSError, GpufnError, *DECODE_ERRORS):
                problem = "left a result that cannot be read"
        raise BuildFailed(f"{self._name} {problem}", stage=stage, log=output)

    def end(self) -> None:
        """Kill the process, or its group; `wait` then returns."""
        with self._lock:
            if not self._is_alive:
                return
            with contextlib.suppress(ProcessLookupError):
                if self._leads_group:
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def pause(self) -> None:
        """Stop the process group. The time until `resume` does not count as time without progress."""
        self._paused_until = math.inf
        self._signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_group(signal.SIGCONT)
        self._paused_until = time.monotonic()

    def _signal_group(self, number: signal.Signals) -> None:
        assert self._leads_group, "only a build's process is paused, with those of its candidates"
        with self._lock:
            if self._is_alive:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)

    def _lines_while_active(self, timeout_s: float, on_held: Callable[[int], None] | None) -> Iterator[Line]:
        """Yield the lines of the pipe until the process has ended, and the last ProgressUpdate again for output. Raises
        _Stalled without progress for `timeout_s`, _ExceedsLimit, DecodeError."""
        decode = msgspec.json.Decoder(Line).decode
        poll = select.poll()
        poll.register(self._lines, select.POLLIN)
        poll.register(self._pidfd, select.POLLIN)
        rest = b""
        last: ProgressUpdate | None = None
        line_at = active_at = polled_at = checked_at = began = time.monotonic()
        while (now := time.monotonic()) < began + _LONGEST_S:
            active_at = max(active_at, min(now, self._paused_until))
            if (stopped_s := now - polled_at - _POLL_S) > _POLL_S:  # this process was paused, and so was the child
                active_at += stopped_s
            polled_at = now
            if now >= active_at + timeout_s:
                raise _Stalled
            ready = dict(poll.poll(min(active_at + timeout_s - now, _POLL_S) * 1000))
            if now >= checked_at + _POLL_S:
                checked_at = now
                self._check_limits()
            if on_held is not None:
                on_held(held(self._process.pid).resident_bytes)
            if self._lines in ready:
                line_at = active_at = time.monotonic()
                if not (data := os.read(self._lines, _PIPE_BYTES)):
                    poll.unregister(self._lines)
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _LONGEST_LINE:
                    raise msgspec.DecodeError("the line is too long")
                for line in map(decode, lines):
                    last = line if isinstance(line, ProgressUpdate) else last
                    yield line
            if self._output_file.check() and now < line_at + _OUTPUT_COUNTS_S:
                active_at = time.monotonic()
                if last is not None:
                    yield last
            if self._pidfd in ready:
                return  # later lines come from other processes that still have the pipe open
        raise _ExceedsLimit(f"did not end within {_LONGEST_S / 3600:g} hours and was stopped")

    def _check_limits(self) -> None:
        """Raises _ExceedsLimit."""
        memory, disk = self._memory_limit_bytes, self._disk_limit_bytes
        if memory is not None and held(self._process.pid).allocated_bytes > _PROCESSES * memory:
            raise _ExceedsLimit(f"needs more memory than its limit of {format_bytes(memory)}")
        if disk is not None and total_bytes(*self._writes_to) - self._stored_before > disk:
            raise _ExceedsLimit(f"needs more disk space than its limit of {format_bytes(disk)} (GPUFN_BUILD_DISK)")

    def _close(self) -> tuple[int, str]:
        """Return the exit code and the end of the output. The process group is killed before the process is reaped,
        because its number may be reused after that."""
        self.end()
        with self._lock:
            self._is_alive = False
            code = self._process.wait()
            os.close(self._lines)
            os.close(self._pidfd)
        output = self._output_file.last_lines()
        self._output_file.close()
        return code, output


def serve(request_type: type[_Request], work: Callable[[_Request, ReportProgress], msgspec.Struct]) -> int:
    """Run the child's side: `work(request, report_progress)` returns the result. Returns the exit code."""
    gc.freeze()  # neither later collections nor the exit visit the imported modules, which takes 0.05 s
    path, lines, parent = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent not in (_UNKNOWN, os.getppid()):  # the parent died before prctl
        return _FAILED
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.set_inheritable(lines, False)
    request = msgspec.json.decode(path.read_bytes(), type=request_type)
    if (limit := request.memory_limit_bytes) is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if (limit := request.disk_limit_bytes) is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    encode = msgspec.json.Encoder().encode

    def send(line: Line) -> None:
        os.write(lines, encode(line) + b"\n")  # a line fits an atomic write to a pipe, so any thread may call this

    def fail(error: GpufnError) -> int:
        case = error.case if isinstance(error, InaccurateOutput) else ""
        send(Failed(truncate_error(error.info()), one_line(case)))
        return _FAILED

    try:
        result = work(request, without_repetitions(send, time.monotonic))
        (path.parent / _RESULT).write_bytes(msgspec.msgpack.encode(result))
    except GpufnError as error:
        return fail(error)
    except OSError as error:  # on a full disk the output would be lost as well
        return fail(disk_error(error))
    return 0


def without_repetitions(send: Callable[[ProgressUpdate], object], clock: Callable[[], float]) -> ReportProgress:
    """Return a function that sends a ProgressUpdate, but the same one only every _REPEAT_S. So a loop can report every
    run of an engine, which may take microseconds."""
    last: tuple[BuildStage, float, str] | None = None
    sent_at = 0.0

    def report_progress(stage: BuildStage, progress: float, detail: str) -> None:
        nonlocal last, sent_at
        update, now = (stage, progress, detail), clock()
        if update != last or now >= sent_at + _REPEAT_S:
            last, sent_at = update, now
            send(ProgressUpdate(stage, progress, detail[:500]))

    return report_progress


def disk_error(error: OSError, stage: BuildStage | str = "") -> BuildFailed:
    """Return the error of a build that cannot read or write a file."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BuildFailed("the builder's disk is full: free some space and build again", stage=stage)
    if error.errno == errno.EFBIG:
        return BuildFailed("a file of the build exceeds the limit of disk space (GPUFN_BUILD_DISK)", stage=stage)
    message = f"a file of the build cannot be read or written: {error.strerror or error}"
    return BuildFailed(message, stage=stage, log=traceback.format_exc())
