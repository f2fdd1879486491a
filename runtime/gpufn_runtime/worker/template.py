"""The standby: a process with the heavy imports done, from which workers are forked in milliseconds.

    1. import what a worker needs and the modules asked for, once, without touching a device
    2. refuse to be forked from if that started a thread or opened a GPU: neither survives a fork; end when a thread
       turns up later
    3. TemplateReady, then for each ForkRequest: fork twice, so that the worker is no child of ours, and say its pid
    4. the worker gets its own session, output and environment, and lives as one that started cold (`lifecycle`)
    5. while idle, when told that it may: fork one ahead, so that the next request need not wait for a fork, which with
       torch in memory takes 20 ms

Requests come on standard input, replies go to what was standard output; what an import prints goes to standard error.
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
from gpufn_core.protocol.launch import EXIT_START_FAILED, ForkReply, ForkRequest, TemplateReady, WorkerConfig
from gpufn_runtime.worker import lifecycle, process
from gpufn_runtime.worker.arguments import loader
from gpufn_runtime.worker.arguments.parameters import Parameters

_EVERY_WORKER_MAY_NEED = ("gpufn_runtime.worker.execute.event_loop", "cloudpickle", "json", "logging")
_WITH_ONNXRUNTIME = ("engines.load", "engines.model_function", "engines.onnxruntime")  # 10 ms of a start
_IDLE_MS = 250  # the worker that has just been forked has a start to get through
_LONGEST_REQUEST = 1 << 16  # what the pipe that they come through holds
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def serve(modules: list[str]) -> int:
    replies = os.dup(1)
    os.dup2(2, 1)
    missing = import_all(modules)
    rehearse()
    loaded = {*modules, *loader.third_party.look()}.difference(missing)
    gc.collect()
    gc.freeze()  # a collection in a child must not touch, and so copy, what all of them share
    reason = _reason_not_to_fork()
    _say(replies, TemplateReady(tuple(sorted(loaded)), missing, _resident_bytes(), reason))
    if reason:
        return 1
    forks = _Forks(replies)
    for line in _lines(0, when_idle=forks.fork_ahead):
        if not line:
            forks.may_fork_ahead = True
            continue
        try:
            pid = forks.start(msgspec.json.decode(line, type=ForkRequest), line)
        except _HasThreads as error:
            _say(replies, ForkReply(error=str(error)))
            return 1
        except (OSError, msgspec.MsgspecError) as error:
            _say(replies, ForkReply(error=str(error)))
        else:
            _say(replies, ForkReply(pid))
    return 0


def import_all(modules: list[str]) -> tuple[str, ...]:
    """Import them all; those that cannot be are the worker's own problem, and its user's."""
    for name in _EVERY_WORKER_MAY_NEED:
        importlib.import_module(name)
    for name in gpufn.__all__:
        getattr(gpufn, name)  # loaded on first use, which would be after the fork
    missing = []
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(f"{name} cannot be imported: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
            missing.append(name)
    if "onnxruntime" in sys.modules:
        for name in _WITH_ONNXRUNTIME:
            importlib.import_module(f"gpufn_runtime.worker.{name}")
    return tuple(missing)


def rehearse() -> None:
    """Let msgspec look at the types that every worker decodes, once instead of in each."""
    msgspec.json.Decoder(WorkerConfig)
    FrameReader[RunnerFrame](RunnerFrame)
    Parameters(rehearse).bind(media.JSON, b"")
    for kind in (media.JSON, media.NATIVE):
        values.encode_result(None, kind)


def _reason_not_to_fork() -> str:
    if threads := _threads():
        return f"importing its modules started {threads} threads, which a fork would lose"
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            device = os.readlink(f"/proc/self/fd/{fd}")
            if device.startswith("/dev/nvidia"):
                return f"importing its modules opened {device}, which a fork cannot share"
    return ""


def _threads() -> int:
    """Besides this one."""
    return len(os.listdir("/proc/self/task")) - 1


class _HasThreads(Exception):
    """A module has started threads since it was imported: never fork a process that has."""


class _Forks:
    """Makes workers, from the one forked ahead if there is one. `replies` is no business of theirs."""

    def __init__(self, replies: int) -> None:
        self.may_fork_ahead = False
        self._replies = replies
        self._ahead: tuple[int, socket.socket] | None = None  # its pid, and where it waits for its request

    def fork_ahead(self) -> None:
        if self._ahead is not None or not self.may_fork_ahead or _threads():
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:

            def wait() -> None:
                ours.close()  # or it would not see us go
                os.close(self._replies)
                _become_silent()
                rehearse()  # copies what a worker writes to, and its first call need not
                line = theirs.recv(_LONGEST_REQUEST)
                if not line:
                    os._exit(0)
                request = msgspec.json.decode(line, type=ForkRequest)
                _become_worker(request)
                theirs.send(b"1")
                theirs.close()
                lifecycle.run_worker(request.config)

            try:
                self._ahead = (_fork(wait), ours)
            except OSError as error:
                print(f"could not fork one ahead: {error}", file=sys.stderr)  # noqa: T201
                ours.close()

    def start(self, request: ForkRequest, line: bytes) -> int:
        """The pid of a new worker, whose parent is gone already: whoever adopts orphans (the agent) reaps it."""
        for path in (request.config, request.output):
            if not os.access(path, os.R_OK):
                raise FileNotFoundError(f"there is no {path}")
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            pid, theirs = ahead
            with theirs, contextlib.suppress(OSError):  # it may have been killed, for want of memory
                theirs.send(line)
                if theirs.recv(1):
                    return pid

        def live() -> None:
            os.close(self._replies)
            _become_silent()
            _become_worker(request)
            lifecycle.run_worker(request.config)

        return _fork(live)


def _fork(live: Callable[[], None]) -> int:
    """Fork twice; `live` is the life of the second child, whose pid is returned. Raises OSError, _HasThreads."""
    if threads := _threads():
        raise _HasThreads(f"its modules started {threads} threads, which a fork would lose")
    from_child, to_parent = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            _fork_again(live, from_child, to_parent)
        os.close(to_parent)
        to_parent = -1
        os.waitpid(between, 0)
        said = os.read(from_child, 16)
        if not said:
            raise OSError("the second fork failed: too many processes, or no memory")
        return int(said)
    finally:
        for fd in (from_child, to_parent):
            if fd >= 0:
                os.close(fd)


def _fork_again(live: Callable[[], None], from_child: int, to_parent: int) -> NoReturn:
    try:
        os.setsid()
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
        live()
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    process.leave(EXIT_START_FAILED)


def _become_silent() -> None:
    """Nothing to read, and the signals' default actions."""
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(name, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _become_worker(request: ForkRequest) -> None:
    output = os.open(request.output, os.O_RDWR)  # for reading too, so that it never breaks when its reader is gone
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(request.env)
    if (tempfile := sys.modules.get("tempfile")) is not None:
        vars(tempfile)["tempdir"] = None  # a module may have asked for it in the template, which has another TMPDIR
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:  # `random` does so itself; torch starts with the same seed in every process anyway
        numpy_random.seed()


def _say(fd: int, message: msgspec.Struct) -> None:
    os.write(fd, msgspec.json.encode(message) + b"\n")


def _lines(fd: int, when_idle: Callable[[], None]) -> Iterator[bytes]:
    """Lines until the other end is closed; nothing is read ahead into a buffer that a child would inherit."""
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


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
