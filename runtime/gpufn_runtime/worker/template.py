"""Template process: heavy imports are done, so that workers can be forked from it in milliseconds.

    1. enter a sandbox. Set the variables of its functions. Import the worker's own modules and the requested ones,
       once. After each one check that this process can still be forked (`fork_safety`). If not, report the module and
       exit: the agent starts a template without it
    2. exit if a thread appears later
    3. send TemplateReady, then for each ForkRequest: fork twice, so that the worker is not our child, and send its pid
    4. the worker gets its own session, output and environment, and runs like one that started cold (`lifecycle`)
    5. while idle, if the agent allows it: fork one worker ahead, because a fork takes 20 ms with torch in memory

Requests arrive on standard input and replies leave on the original standard output; output of imports goes to standard
error.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

import msgspec

import gpufn
from gpufn_core.encoding import media, values
from gpufn_core.protocol.frames import FrameReader, RunnerFrame
from gpufn_core.protocol.launch import (
    ENV_VARIABLE,
    EXIT_START_FAILED,
    SANDBOX_VARIABLE,
    ForkReply,
    ForkRequest,
    Sandbox,
    TemplateReady,
    WorkerConfig,
)
from gpufn_platform.sandbox.enter import enter, prepare
from gpufn_platform.sandbox.pid_namespace import PidNamespace
from gpufn_runtime.worker import lifecycle, process
from gpufn_runtime.worker.arguments import loader
from gpufn_runtime.worker.arguments.parameters import Parameters
from gpufn_runtime.worker.fork_safety import reason_not_to_fork, thread_count
from gpufn_runtime.worker.gpu.parking import resident_bytes
from gpufn_runtime.worker.rehearsal.rehearse import rehearse

_COMMON_MODULES = ("gpufn_runtime.worker.execute.event_loop", "cloudpickle", "json", "logging")
_ONNXRUNTIME_MODULES = ("engines.load", "engines.model_function", "engines.onnxruntime")  # 10 ms of a start
_IDLE_MS = 250  # lets a worker that was just forked start first
_LONGEST_REQUEST = 1 << 16  # capacity of the request pipe


def serve(modules: list[str]) -> int:
    sandbox: Sandbox | None = None
    pid_namespace: PidNamespace | None = None
    if text := os.environ.pop(SANDBOX_VARIABLE, ""):
        sandbox = msgspec.json.decode(text, type=Sandbox)
        pid_namespace = enter(sandbox)
    if text := os.environ.pop(ENV_VARIABLE, ""):
        os.environ.update(msgspec.json.decode(text, type=dict[str, str]))
    replies = os.dup(1)
    os.dup2(2, 1)
    try:
        missing = import_all(modules, after_each=_check_fork_safety)
    except _NotForkable as error:
        _send(replies, TemplateReady(error=str(error), refused_module=error.module))
        return 1
    prepare_decoders()
    loaded = {*modules, *loader.third_party.newly_loaded()}.difference(missing)
    gc.collect()
    gc.freeze()  # a garbage collection in a child must not touch, and thereby copy, shared pages
    _send(replies, TemplateReady(tuple(sorted(loaded)), missing, resident_bytes()))
    forks = _Forks(replies, sandbox, pid_namespace)
    for line in _lines(0, when_idle=forks.fork_ahead):
        if not line:
            forks.may_fork_ahead = True
            continue
        try:
            pid = forks.start(msgspec.json.decode(line, type=ForkRequest), line)
        except _HasThreads as error:
            _send(replies, ForkReply(error=str(error)))
            return 1
        except (OSError, msgspec.MsgspecError) as error:
            _send(replies, ForkReply(error=str(error)))
            if pid_namespace is not None and pid_namespace.has_ended():
                return 1  # the agent makes another template
        else:
            _send(replies, ForkReply(pid))
    return 0


def import_all(modules: list[str], after_each: Callable[[str], None] = lambda _: None) -> tuple[str, ...]:
    """Import all modules. Return the modules that failed: the worker will report their errors to its user."""
    for name in _COMMON_MODULES:
        importlib.import_module(name)
    for name in gpufn.__all__:
        getattr(gpufn, name)  # these are loaded on first use, which would be after the fork
    missing = []
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(f"cannot import {name}: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
            missing.append(name)
        after_each(name)
    if "onnxruntime" in sys.modules:
        for name in _ONNXRUNTIME_MODULES:
            importlib.import_module(f"gpufn_runtime.worker.{name}")
    return tuple(missing)


def prepare_decoders() -> None:
    """Let msgspec analyze the types that every worker decodes, once instead of in each worker."""
    msgspec.json.Decoder(WorkerConfig)
    FrameReader[RunnerFrame](RunnerFrame)
    Parameters(prepare_decoders).bind(media.JSON, b"")
    for kind in (media.JSON, media.NATIVE):
        values.encode_result(None, kind)


class _NotForkable(Exception):
    """The import of `module` did something that forbids forks."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(f"importing {module} {reason}")
        self.module = module


def _check_fork_safety(module: str) -> None:
    """Raise _NotForkable if the import of `module` was the first that forbids forks."""
    if reason := reason_not_to_fork():
        raise _NotForkable(module, reason)


class _HasThreads(Exception):
    """A module has started threads since its import: this process must not fork."""


class _Forks:
    """Forks workers, or uses the one forked ahead. `replies` is the descriptor for replies, which workers close.
    This process is in `sandbox`, and its workers are in `pid_namespace`."""

    def __init__(self, replies: int, sandbox: Sandbox | None, pid_namespace: PidNamespace | None) -> None:
        self.may_fork_ahead = False
        self._replies = replies
        self._sandbox = sandbox
        self._pid_namespace = pid_namespace
        self._ahead: tuple[int, socket.socket] | None = None  # pid, and socket on which it waits for its request

    def fork_ahead(self) -> None:
        if self._ahead is not None or not self.may_fork_ahead or thread_count():
            return
        parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:

            def wait() -> None:
                parent_end.close()  # otherwise it would not detect our exit
                os.close(self._replies)
                _detach()
                if self._sandbox is not None:
                    prepare(self._sandbox)
                prepare_decoders()
                rehearse()
                line = child_end.recv(_LONGEST_REQUEST)
                if not line:
                    os._exit(0)
                request = msgspec.json.decode(line, type=ForkRequest)
                _become_worker(request)
                child_end.send(b"1")
                child_end.close()
                lifecycle.run_worker(request.config)

            try:
                self._ahead = (self._fork(wait), parent_end)
            except OSError as error:
                print(f"could not fork one ahead: {error}", file=sys.stderr)  # noqa: T201
                parent_end.close()

    def start(self, request: ForkRequest, line: bytes) -> int:
        """Start a worker; returns its pid. Its parent has already exited: the agent, which adopts orphans, reaps it."""
        for path in (request.config, request.output):
            if not os.access(path, os.R_OK):
                raise FileNotFoundError(f"there is no {path}")
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            pid, worker_end = ahead
            with worker_end, contextlib.suppress(OSError):  # the process may have been killed for lack of memory
                worker_end.send(line)
                if worker_end.recv(1):
                    return pid

        def run_child() -> None:
            os.close(self._replies)
            _detach()
            _become_worker(request)
            lifecycle.run_worker(request.config)

        return self._fork(run_child)

    def _fork(self, run_child: Callable[[], None]) -> int:
        """Fork twice; the second child runs `run_child`. Returns its pid. Raises OSError, _HasThreads."""
        if threads := thread_count():
            raise _HasThreads(f"its modules started {threads} threads, which would be lost in a fork")
        from_child, to_parent = os.pipe()
        try:
            child = os.fork()
            if child == 0:
                _fork_again(run_child, self._pid_namespace, from_child, to_parent)
            os.close(to_parent)
            to_parent = -1
            os.waitpid(child, 0)
            pid_text = os.read(from_child, 16)
            if not pid_text:
                raise OSError("the second fork failed: too many processes, or no memory")
            return int(pid_text)
        finally:
            for fd in (from_child, to_parent):
                if fd >= 0:
                    os.close(fd)


def _fork_again(
    run_child: Callable[[], None], pid_namespace: PidNamespace | None, from_child: int, to_parent: int
) -> NoReturn:
    """Fork in the first child, whose parent is the template. `os.fork` returns the pid outside of the namespace."""
    try:
        os.setsid()
        if pid_namespace is not None:
            pid_namespace.enter()
        pid = os.fork()
    except OSError:
        os._exit(1)
    if pid:
        os.write(to_parent, str(pid).encode())
        os._exit(0)
    try:
        os.setsid()
        os.close(from_child)
        os.close(to_parent)
        run_child()
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    process.exit_now(EXIT_START_FAILED)


def _detach() -> None:
    """Redirect standard input to /dev/null and reset the signal handlers."""
    devnull = os.open("/dev/null", os.O_RDONLY)
    os.dup2(devnull, 0)
    os.close(devnull)
    for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(name, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _become_worker(request: ForkRequest) -> None:
    output = os.open(request.output, os.O_RDWR)  # O_RDWR, so that writing never fails without a reader
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(request.env)
    if (tempfile := sys.modules.get("tempfile")) is not None:
        vars(tempfile)["tempdir"] = None  # a module may have cached the template's TMPDIR
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:  # `random` reseeds itself; torch starts with the same seed in every process anyway
        numpy_random.seed()


def _send(fd: int, message: msgspec.Struct) -> None:
    os.write(fd, msgspec.json.encode(message) + b"\n")


def _lines(fd: int, when_idle: Callable[[], None]) -> Iterator[bytes]:
    """Yield lines until the other end is closed, without a read-ahead buffer that a child would inherit."""
    pending = b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while True:
        if not poll.poll(_IDLE_MS):
            when_idle()
        if not (data := os.read(fd, 1 << 16)):
            return
        *lines, pending = (pending + data).split(b"\n")
        yield from lines
