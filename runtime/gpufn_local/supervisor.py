"""Supervisor of the platform's processes on one machine.

1. Start NATS, then the other processes, each with its own log file.
2. Wait on pidfds for a process to end. Restart it after 0.1 s; the delay doubles with each restart, up to 5 s.
3. Kill a process that hangs for a minute; it is restarted too.
4. On a signal stop in order: gateway and agent together, which let running calls finish within the grace period; then
   runner and builder; NATS last. A second signal ends the grace period, a third kills everything at once.

Until the platform is ready for the first time, restarts are limited. A process that exits with EXIT_CONFIGURATION stops
everything with its last line as the error; so does a process that ends three times. Afterwards every process is
restarted without limit, and each second the supervisor checks whether NATS has to be restarted.

No process outlives the supervisor, not even after `kill -9`. The kernel kills our children when we die
(`gpufn_platform.process.parent_death`), and workers exit when a FIFO closes that we hold open
(`gpufn_platform.process.supervisor_fifo`).
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from gpufn_core.errors import BusUnavailable, PlatformError
from gpufn_local.watchdog_listener import Watchdog
from gpufn_platform.process.parent_death import end_with_parent
from gpufn_platform.process.private_files import create_private
from gpufn_platform.process.settings import EXIT_CONFIGURATION, InvalidSetting

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_HEALTHY_AFTER_S = 10.0  # a process that lived this long restarts after the shortest delay
_STOP_TIMEOUT_S = 30.0  # in addition to the grace period
_STOPPING_S = 1.0  # interval of `stopping` calls
_KILL_AFTER = 2  # further signals after the one that stops the supervisor
_SILENT_S = 60.0
_DUMP_S = 5.0  # time for a hung process to dump its stacks before it is killed
_READY_CHECK_S = 0.05
_BUS_CHECK_S = 1.0
_MAX_EARLY_ENDS = 3
_LOG_BYTES = 10 << 20
_LAST_LINES = 15


class Bus(Protocol):
    """The interface of nats-server (gpufn_local.nats_process)."""

    @property
    def pid(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def has_tls(self) -> bool: ...
    @property
    def exit_code(self) -> int | None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True)
class Program:
    """A process of the platform, run as `python -m module`. `has_grace`: it may use the grace period to stop."""

    name: str
    module: str
    has_grace: bool = False


@dataclass
class _Child:
    name: str
    process: subprocess.Popen[bytes] | None = None  # None: NATS, which is started elsewhere
    pid: int = 0
    pidfd: int = -1
    started_at: float = 0.0
    ends: int = 0
    pause_s: float = 0.0
    start_at: float = 0.0  # while it is down
    kill_at: float = math.inf  # set when it hangs
    has_grace: bool = False

    @property
    def is_running(self) -> bool:
        return self.pidfd >= 0


@dataclass
class Supervisor:
    """`start_bus` is None if NATS runs elsewhere. `changed` is called with the pids after each start or end, and
    `must_restart_bus` each second while NATS runs."""

    programs: list[Program]  # in stop order
    environment: Callable[[str], dict[str, str]]
    start_bus: Callable[[], Bus] | None
    is_ready: Callable[[], bool]
    logs: Path
    bus_log: Path
    cwd: Path
    ready_timeout_s: float
    changed: Callable[[dict[str, int], bool], None]
    say: Callable[[str], None]
    must_restart_bus: Callable[[], bool] = lambda: False
    grace_s: Callable[[], float] = lambda: 0.0
    stopping: Callable[[float], None] = lambda remaining_s: None  # called each second of the grace period
    silent_s: float = _SILENT_S
    _children: dict[str, _Child] = field(default_factory=dict)
    _bus: Bus | None = None
    _is_ready: bool = False
    _check_bus_at: float = 0.0
    _signals: int = 0

    def run(self) -> None:
        """Start all processes. Return after a signal, when all have stopped. Raises PlatformError if they cannot
        start."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self._watchdog = Watchdog(self.silent_s)
        with self._signal_pipe() as wake, contextlib.closing(self._watchdog):
            try:
                if self.start_bus is not None:
                    self._start_bus()
                for program in self.programs:
                    self._children[program.name] = _Child(program.name, has_grace=program.has_grace)
                    self._start(program)
                self._changed()
                self._watch(wake)
            finally:
                self._stop(wake)

    # Watching

    def _watch(self, wake: socket.socket) -> None:
        give_up = time.monotonic() + self.ready_timeout_s
        while not self._signals:
            self._wait(wake, self._pause())
            for child in list(self._children.values()):
                if child.is_running and _has_ended(child.pidfd):
                    self._handle_end(child)
                if not child.is_running and time.monotonic() >= child.start_at and not self._signals:
                    self._restart(child)
            self._kill_hung()
            if self._is_ready and not self._signals:
                self._check_bus()
            if not self._is_ready and not self._signals:
                if self.is_ready():
                    self._is_ready = True
                    self._changed()
                elif time.monotonic() > give_up:
                    raise PlatformError(
                        f"the platform was not ready after {self.ready_timeout_s:g} s; its logs are in {self.logs}\n"
                        + last_lines(self._log("gateway"))
                    )

    def _kill_hung(self) -> None:
        now = time.monotonic()
        silent = self._watchdog.look(now)
        for child in self._children.values():
            if child.is_running and child.pid in silent:
                log = self._log(child.name)
                self.say(f"{child.name} hangs: no heartbeat for {self.silent_s:g} s (stack dump: {log})")
                _signal(child, signal.SIGABRT)
                _signal(child, signal.SIGCONT)  # a stopped process handles SIGABRT only after that
                child.kill_at = now + _DUMP_S
            if child.is_running and child.kill_at <= now:
                _signal(child, signal.SIGKILL)
                child.kill_at = math.inf

    def _check_bus(self) -> None:
        now = time.monotonic()
        if self._bus is None or now < self._check_bus_at:
            return
        self._check_bus_at = now + _BUS_CHECK_S
        if self._children["nats"].is_running and self.must_restart_bus():
            self._bus.stop()  # handled like any other end

    def _pause(self) -> float:
        """Return the seconds until the next due action."""
        now = time.monotonic()
        due = [self._watchdog.look_every_s]
        due += [(child.kill_at if child.is_running else child.start_at) - now for child in self._children.values()]
        if not self._is_ready:
            due.append(_READY_CHECK_S)
        elif self._bus is not None:
            due.append(self._check_bus_at - now)
        return max(min(due), 0.0)

    def _wait(self, wake: socket.socket, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        poll.register(self._watchdog, select.POLLIN)
        for child in self._children.values():
            if child.is_running:
                poll.register(child.pidfd, select.POLLIN)
        poll.poll(timeout_s * 1000)
        with contextlib.suppress(BlockingIOError):
            wake.recv(64)

    def _handle_end(self, child: _Child) -> None:
        os.close(child.pidfd)
        child.pidfd = -1
        child.kill_at = math.inf
        self._watchdog.forget(child.pid)
        code = child.process.wait() if child.process is not None else (self._bus.exit_code if self._bus else None)
        child.ends += 1
        if not self._is_ready and code == EXIT_CONFIGURATION:
            last_line = last_lines(self._log(child.name)).rpartition("\n")[2]
            raise PlatformError(f"{child.name} cannot start: {last_line}")
        if not self._is_ready and child.ends >= _MAX_EARLY_ENDS:
            raise PlatformError(f"{child.name} cannot start:\n{last_lines(self._log(child.name))}")
        lived_s = time.monotonic() - child.started_at
        child.pause_s = _FIRST_PAUSE_S if lived_s >= _HEALTHY_AFTER_S else min(child.pause_s * 2, _LONGEST_PAUSE_S)
        child.pause_s = max(child.pause_s, _FIRST_PAUSE_S)
        child.start_at = time.monotonic() + child.pause_s
        self.say(f"{child.name} {_how(code)}; restarting in {child.pause_s:g} s (log: {self._log(child.name)})")
        self._changed()

    def _restart(self, child: _Child) -> None:
        try:
            if child.process is not None:
                self._start(next(program for program in self.programs if program.name == child.name))
            else:
                self._start_bus()
        except (BusUnavailable, InvalidSetting, OSError) as error:  # a full disk has no space for a log either
            child.pause_s = min(max(child.pause_s * 2, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            child.start_at = time.monotonic() + child.pause_s
            self.say(f"{child.name} does not start: {getattr(error, 'message', error)}")
            return
        self._changed()

    # Starting

    def _start_bus(self) -> None:
        assert self.start_bus is not None
        self._bus = self.start_bus()
        child = self._children.setdefault("nats", _Child("nats"))
        child.pid, child.pidfd = self._bus.pid, os.pidfd_open(self._bus.pid)
        child.started_at = time.monotonic()
        tls_host = self._bus.host if self._bus.has_tls else ""
        self._watchdog.watch_nats(child.pid, self._bus.port, child.started_at, tls_host=tls_host)

    def _start(self, program: Program) -> None:
        log = self._log(program.name)
        _rotate(log)
        child = self._children[program.name]
        with open(log, "ab", opener=create_private) as output:
            child.process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", "-m", program.module],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self.environment(program.name), **self._watchdog.environment},
                cwd=self.cwd,
                start_new_session=True,  # Ctrl-C in the terminal reaches only us; we stop the children in order
                preexec_fn=end_with_parent(signal.SIGKILL),  # noqa: PLW1509  this process has one thread
            )
        child.pid, child.pidfd = child.process.pid, os.pidfd_open(child.process.pid)
        child.started_at = time.monotonic()
        self._watchdog.watch(child.pid)

    # Stopping

    def _stop(self, wake: socket.socket) -> None:
        signals = max(self._signals, 1)
        until = time.monotonic() + self.grace_s()
        children = [self._children[program.name] for program in self.programs if program.name in self._children]
        running = [child for child in children if child.process is not None and child.is_running]
        self._end([child for child in running if child.has_grace], wake, signals, until)
        for child in running:
            if not child.has_grace:
                self._end([child], wake, signals, time.monotonic())
        if self._bus is not None:
            self._bus.stop()

    def _end(self, children: list[_Child], wake: socket.socket, signals: int, until: float) -> None:
        """Stop children. Their grace period lasts `until`; then they have the stop timeout. `signals` were received
        before."""
        if self._signals < signals + _KILL_AFTER:
            for child in children:
                _signal(child, signal.SIGTERM)
            self._wait_for(children, wake, signals, until)
        for child in children:
            assert child.process is not None
            child.process.kill()
            child.process.wait()
            os.close(child.pidfd)
            child.pidfd = -1

    def _wait_for(self, children: list[_Child], wake: socket.socket, signals: int, until: float) -> None:
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        for child in children:
            poll.register(child.pidfd, select.POLLIN)
        is_hurried = self._signals > signals
        if is_hurried:
            until = time.monotonic()
        while (remaining := [child for child in children if not _has_ended(child.pidfd)]) and (
            self._signals < signals + _KILL_AFTER and (now := time.monotonic()) < until + _STOP_TIMEOUT_S
        ):
            if self._signals > signals and not is_hurried:
                is_hurried, until = True, now
                for child in remaining:
                    _signal(child, signal.SIGTERM)
            if now < until:
                self.stopping(until - now)
            poll.poll(1000 * min(_STOPPING_S, until + _STOP_TIMEOUT_S - now))
            for child in children:
                if child not in remaining or _has_ended(child.pidfd):
                    with contextlib.suppress(KeyError):
                        poll.unregister(child.pidfd)
            with contextlib.suppress(BlockingIOError):
                wake.recv(64)

    # Helpers

    @contextlib.contextmanager
    def _signal_pipe(self) -> Iterator[socket.socket]:
        """Count SIGINT, SIGTERM and SIGHUP, and wake the poll."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)

        def count(number: int, frame: FrameType | None) -> None:
            self._signals += 1

        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, count) for number in handled}
        wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            with ours, theirs:
                yield ours
                signal.set_wakeup_fd(wakeup)
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _changed(self) -> None:
        self.changed({child.name: child.pid for child in self._children.values() if child.is_running}, self._is_ready)

    def _log(self, name: str) -> Path:
        return self.bus_log if name == "nats" else self.logs / f"{name}.log"


def last_lines(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - 16_384, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_LAST_LINES:])


def _rotate(log: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > _LOG_BYTES:
            log.replace(log.with_suffix(".log.1"))


def _has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def _signal(child: _Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(child.pidfd, number)


def _how(code: int | None) -> str:
    if code is None:
        return "ended"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"
