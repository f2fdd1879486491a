"""A process for work that may crash, hang, or eat all memory: started with a request, heard on a pipe, ended for sure.

    work = Work.start("gpufn_builder.processes.build_process", request, folder, environ, name="the build")
    result = work.wait(on_told, BuildResult, timeout_s=3600)  # or BuildFailed: how it ended, and the last it said

A build's process leads a group, which its candidates' processes join: what is left of the group ends with the build.
All of them end with their parent. `serve` is the other side.

A process that reads a stranger's model may become that model's. Nothing that it says, leaves or prints is believed to
be well formed, or to end: whatever it does comes out of `wait` as a BuildFailed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import select
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gpufn_builder.processes.output_tail import Printed
from gpufn_builder.processes.process_messages import Failed, Line, Request, Told, shortened
from gpufn_core.domain.engine import BuildStage
from gpufn_core.errors import BuildFailed, ErrorInfo, GpufnError

_PIPE_BYTES: Final = 1 << 20  # what a pipe holds at most
_LONGEST_LINE: Final = 1 << 16
_LARGEST_RESULT: Final = 64 << 20
_LOOK_EVERY_S: Final = 1.0
_PR_SET_PDEATHSIG: Final = 1
_FAILED: Final = 1
_REQUEST: Final = "request.json"
_RESULT: Final = "result"
# All that a process which compiles needs of our environment; the bus's address and password are not among it.
_PASSED_ON: Final = ("PATH", "PYTHONPATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_OUT_OF_MEMORY: Final = ("MemoryError", "bad_alloc", "bad allocation", "Failed to allocate memory", "out of memory")

Tell = Callable[[BuildStage, float, str], None]
_Request = TypeVar("_Request", bound=Request)
_Result = TypeVar("_Result", bound=msgspec.Struct)


def environment(environ: Mapping[str, str], *, gpu: str = "") -> dict[str, str]:
    """Of a process that compiles. `gpu` is the uuid of the one that it may see; without it there is none."""
    passed = {name: environ[name] for name in _PASSED_ON if name in environ}
    # ONNX Runtime (1.29 and later) reports to its maker about the models that it loads, unless it is told not to.
    return passed | {"CUDA_VISIBLE_DEVICES": gpu, "PYTHONDONTWRITEBYTECODE": "1", "ORT_DISABLE_TELEMETRY": "1"}


class Work:
    """One such process. `end` may be called from any thread."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        lines: int,
        printed: Printed,
        *,
        result: Path,
        name: str,
        leads: bool,
        memory_limit_bytes: int | None,
    ) -> None:
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._lines = lines
        self._printed = printed
        self._result = result
        self._name = name
        self._leads = leads
        self._memory_limit_bytes = memory_limit_bytes
        self._is_over = threading.Lock()
        self._lives = True

    @classmethod
    def start(
        cls,
        module: str,
        request: Request,
        folder: Path,
        environ: Mapping[str, str],
        *,
        name: str,
        leads: bool = True,
    ) -> Work:
        """`folder` takes the request and what the process prints. `name` is what errors call it."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _REQUEST
        path.write_bytes(msgspec.json.encode(request))
        printed = Printed(folder / "output.txt")
        reader, writer = os.pipe()
        try:
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", "-u", "-m", module, str(path), str(writer), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=printed.file,
                stderr=printed.file,
                env=dict(environ),
                cwd=folder,
                pass_fds=[writer],
                process_group=0 if leads else None,
            )
        except BaseException:
            os.close(reader)
            printed.close()
            raise
        finally:
            os.close(writer)
        limit = request.memory_limit_bytes
        result = folder / _RESULT
        return cls(process, reader, printed, result=result, name=name, leads=leads, memory_limit_bytes=limit)

    def wait(
        self, on_told: Callable[[Told], None], result_type: type[_Result], timeout_s: float, *, grace_s: float = 0.0
    ) -> _Result:
        """What it made, once it has ended. Raises BuildFailed unless it ended well, and in time: `timeout_s`, and
        `grace_s` more for one that knows of it and may say itself what took so long."""
        stage: BuildStage | str = ""
        error: ErrorInfo | None = None
        why = ""
        try:
            for line in self._hear(time.monotonic() + timeout_s + grace_s):
                if isinstance(line, Told):
                    stage = line.stage
                    on_told(line)
                else:
                    error = line.error
        except TimeoutError:
            why = f"did not end within {timeout_s:g} s"
        except msgspec.DecodeError:
            why = "says what nobody understands"
        finally:
            code, said = self._close()
        if not why and error is not None:
            raise BuildFailed(
                error.message, stage=error.stage or stage, node=error.node or "", log=error.traceback or said
            )
        if not why and code:
            why = _how(code, said, self._memory_limit_bytes)
        if not why:
            try:
                return msgspec.msgpack.decode(_read_result(self._result), type=result_type)
            except FileNotFoundError:
                why = "ended without a result"
            except (OSError, msgspec.DecodeError, GpufnError):
                why = "left a result that cannot be read"
        raise BuildFailed(f"{self._name} {why}", stage=stage, log=said)

    def end(self) -> None:
        """Now, and whatever it does; `wait` then returns."""
        with self._is_over:
            if not self._lives:
                return
            with contextlib.suppress(ProcessLookupError):
                if self._leads:
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _hear(self, until: float) -> Iterator[Line]:
        """The lines as they come, until the process has ended. Raises TimeoutError, DecodeError."""
        decode = msgspec.json.Decoder(Line).decode
        poll = select.poll()
        poll.register(self._lines, select.POLLIN)
        poll.register(self._pidfd, select.POLLIN)
        rest = b""
        while (left_s := until - time.monotonic()) > 0:
            ready = dict(poll.poll(min(left_s, _LOOK_EVERY_S) * 1000))
            self._printed.shorten()
            if self._lines in ready:
                if not (data := os.read(self._lines, _PIPE_BYTES)):
                    poll.unregister(self._lines)
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _LONGEST_LINE:
                    raise msgspec.DecodeError("it has no end")
                yield from map(decode, lines)
            if self._pidfd in ready:
                return  # it has said all that it had to say: who still writes is somebody that it left behind
        raise TimeoutError

    def _close(self) -> tuple[int, str]:
        """The exit code, and the end of what it printed. Its group's number is its own as long as nobody has waited for
        it."""
        self.end()
        with self._is_over:
            self._lives = False
            code = self._process.wait()
            os.close(self._lines)
            os.close(self._pidfd)
        said = self._printed.last_lines()
        self._printed.close()
        return code, said


def serve(request_type: type[_Request], work: Callable[[_Request, Tell], msgspec.Struct]) -> int:
    """The other side of `Work`: what `work(request, tell)` returns is the result. Returns the exit code."""
    path, lines, parent = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked to be told
        return _FAILED
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.set_inheritable(lines, False)
    request = msgspec.json.decode(path.read_bytes(), type=request_type)
    if (limit := request.memory_limit_bytes) is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    encode = msgspec.json.Encoder().encode

    def say(line: Line) -> None:
        os.write(
            lines, encode(line) + b"\n"
        )  # a line fits a pipe's atomic write, so a compiler's threads may tell as well

    def fail(error: GpufnError) -> int:
        say(Failed(shortened(error.info())))
        return _FAILED

    try:
        result = work(request, lambda stage, progress, detail: say(Told(stage, progress, detail[:500])))
        (path.parent / _RESULT).write_bytes(msgspec.msgpack.encode(result))
    except GpufnError as error:
        return fail(error)
    except OSError as error:  # on a disk that is full, what it prints is lost as well
        return fail(disk_failed(error))
    return 0


def disk_failed(error: OSError, stage: BuildStage | str = "") -> BuildFailed:
    """What a file that cannot be written, or read, means to the build."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BuildFailed("the builder's disk is full: make room there and build again", stage=stage)
    why = error.strerror or str(error)
    return BuildFailed(f"a file of the build cannot be read or written: {why}", stage=stage, log=traceback.format_exc())


def _read_result(path: Path) -> bytes:
    """Raises OSError for what is no file, or larger than any result."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_RESULT:
            raise OSError(errno.EINVAL, "no result")
        return file.read()


def _how(code: int, said: str, memory_limit_bytes: int | None) -> str:
    if memory_limit_bytes is not None and any(words in said for words in _OUT_OF_MEMORY):
        return f"needs more memory than the {memory_limit_bytes / 2**20:,.0f} MiB that it may use"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    last = said.rpartition("\n")[2].strip()
    return f"ended with code {code}" + (f": {last[:300]}" if last else "")
