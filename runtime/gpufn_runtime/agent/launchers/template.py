"""Workers in milliseconds: forked from a template, a process with their imports done. Cold when there is none.

1. `want(uses)` says which revisions matter; `run` makes and retires templates, one at a time, in the background
2. a template's first line says what it has, or why it must not be forked from; the latter is remembered
3. `launch` sends a ForkRequest to the smallest template that has the worker's modules, imported with its `env`
   (of which one waits, forked ahead, while the template is idle)
4. a fork that fails or takes too long costs the template its life, and the worker starts cold
5. a Preload whose template fails a few times is given up: until it could be made, or forked from, respectively

Templates read their requests from our pipe, so they end when we do. The workers forked from them do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from gpufn_core.errors import PlatformError
from gpufn_core.protocol.launch import LONGEST_LINE_BYTES, ForkReply, ForkRequest, TemplateReady
from gpufn_runtime.agent.decide import template_choice
from gpufn_runtime.agent.decide.template_choice import Preload, Use
from gpufn_runtime.agent.launchers.base import Launched, Launcher, LaunchOrder
from gpufn_runtime.agent.launchers.process import WORKER
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.environment import template_environment

log = logging.getLogger(__name__)

_FORK_TIMEOUT_S = 2.0
_BACKGROUND_NICE = 10
_PIPE_BYTES = 1 << 16
_PAUSE_S = 5.0  # after a defect of our own

_S = TypeVar("_S", bound=msgspec.Struct)


class RequestTooLong(PlatformError):
    """No template can take it: its environment is too large."""


class TemplateGone(PlatformError):
    """The template ended, or does not answer."""


class Template:
    """One template process. It has one request at a time."""

    def __init__(self, asked_for: Preload, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.asked_for = asked_for
        self.covers = asked_for.modules
        self.pid = process.pid
        self._process = processes.identify(process.pid)
        self._requests = process.stdin
        self._answers = process.stdout
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._waiter: asyncio.Future[bytes] | None = None
        self._turn = asyncio.Lock()
        self._is_open = True
        self.on_gone: Callable[[], None] = lambda: None
        os.set_blocking(self._requests.fileno(), False)
        os.set_blocking(self._answers.fileno(), False)
        self._loop.add_reader(self._answers.fileno(), self._on_readable)

    @classmethod
    def start(cls, command: Sequence[str], asked_for: Preload, scratch: Path) -> Template:
        scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            process = subprocess.Popen(  # noqa: S603
                [*command, "--template", *sorted(asked_for.modules)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                cwd=scratch,
                env=template_environment(scratch, dict(asked_for.env)),
                start_new_session=True,  # Ctrl-C in the terminal is for the agent
            )
        except (OSError, ValueError) as error:
            raise TemplateGone(f"Cannot start {command[0]}: {error}.") from error
        process.returncode = 0  # the agent reaps by pid
        _set_background(process.pid, True)
        return cls(asked_for, process)

    def is_for(self, preload: Preload) -> bool:
        """What it was asked for may have brought more: torch brings numpy."""
        return self.asked_for.env == preload.env and self.asked_for.modules <= preload.modules <= self.covers

    @property
    def is_open(self) -> bool:
        return self._is_open

    async def ready(self, timeout_s: float = template_choice.READY_TIMEOUT_S) -> TemplateReady:
        """Its first line. Raises TemplateGone."""
        ready = _decode(await self._line(timeout_s), TemplateReady)
        self.covers = self.asked_for.modules | frozenset(ready.modules)
        if not ready.error:
            _set_background(self.pid, False)  # workers inherit it
            with contextlib.suppress(OSError):
                os.write(self._requests.fileno(), b"\n")  # so one may be forked ahead only now
        return ready

    async def fork(self, request: ForkRequest, timeout_s: float = _FORK_TIMEOUT_S) -> ForkReply:
        """Raises TemplateGone, RequestTooLong."""
        async with self._turn:
            if not self._is_open:
                raise TemplateGone("It ended.")
            data = msgspec.json.encode(request) + b"\n"
            if len(data) > _PIPE_BYTES:
                raise RequestTooLong(f"A request of {len(data):,} bytes is more than its pipe holds.")
            try:
                # The pipe is empty, for the last request was answered.
                written = os.write(self._requests.fileno(), data)
            except OSError as error:
                raise TemplateGone(f"It takes no request: {error.strerror}.") from error
            if written < len(data):
                raise TemplateGone("It has left requests unread.")
            return _decode(await self._line(timeout_s), ForkReply)

    def kill(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._answers.fileno())
            self._requests.close()
            self._answers.close()
            if self._process is not None:
                processes.kill(self._process)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(TemplateGone("It ended."))
            self.on_gone()

    async def _line(self, timeout_s: float) -> bytes:
        if (line := self._take_line()) is not None:
            return line
        if not self._is_open:
            raise TemplateGone("It ended.")
        self._waiter = self._loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._waiter
        except TimeoutError:
            raise TemplateGone(f"It did not answer within {timeout_s:g} s.") from None
        finally:
            self._waiter = None

    def _on_readable(self) -> None:
        try:
            data = os.read(self._answers.fileno(), 1 << 16)
        except BlockingIOError:
            return
        self._buffer += data
        if not data or len(self._buffer) > LONGEST_LINE_BYTES:
            self.kill()
        elif self._waiter is not None and not self._waiter.done() and (line := self._take_line()) is not None:
            self._waiter.set_result(line)

    def _take_line(self) -> bytes | None:
        end = self._buffer.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line


class StandbyLauncher:
    """`cold` starts what no template can."""

    def __init__(
        self,
        cold: Launcher,
        *,
        scratch: Path,
        limit: int,
        command: Sequence[str] = WORKER,
        fork_timeout_s: float = _FORK_TIMEOUT_S,
    ) -> None:
        self._cold = cold
        self._scratch = scratch
        self._limit = limit
        self._command = command
        self._fork_timeout_s = fork_timeout_s
        self._templates: dict[Preload, Template] = {}
        self._refused: set[Preload] = set()
        self._failures: dict[Preload, int] = {}  # could not be made, since it last could
        self._deaths: dict[Preload, int] = {}  # ended when it should not, since one was last forked from
        self._uses: tuple[Use, ...] = ()
        self._poke = asyncio.Event()
        self._settled = asyncio.Event()

    @property
    def templates(self) -> tuple[str, ...]:
        return tuple(map(str, self._templates))

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(template.pid for template in self._templates.values())

    def want(self, uses: Iterable[Use]) -> None:
        wanted = tuple(uses)
        if wanted != self._uses:
            self._uses = wanted
            for forgotten in (self._failures, self._deaths):
                for preload in forgotten.keys() - {use.preload for use in wanted} - {template_choice.EMPTY}:
                    del forgotten[preload]
            self._review()

    async def settled(self) -> None:
        """Return once every template that is worth having is ready, or refused."""
        await self._settled.wait()

    async def run(self) -> None:
        """Make and retire templates until cancelled; then end them all."""
        try:
            while True:
                await self._poke.wait()
                self._poke.clear()
                try:
                    while (preload := self._step()) is not None:
                        await self._make(preload)
                except Exception:
                    log.exception("templates could not be reviewed; again in %g s", _PAUSE_S)
                    await asyncio.sleep(_PAUSE_S)
                    self._poke.set()
                if not self._poke.is_set():
                    self._settled.set()
        finally:
            self._uses = ()
            for template in list(self._templates.values()):
                template.kill()

    async def launch(self, order: LaunchOrder) -> Launched:
        suitable = [t for t in self._templates.values() if t.asked_for.suits(order.told.spec.env)]
        have = template_choice.closest((t.covers for t in suitable), order.modules)
        template = next((t for t in suitable if t.covers == have), None)
        if template is None:
            return await self._cold.launch(order)
        request = ForkRequest(os.fspath(order.config), os.fspath(order.output), order.environment)
        try:
            reply = await template.fork(request, self._fork_timeout_s)
        except RequestTooLong as error:
            log.info("%s starts cold: %s", order.worker, error.message)
            return await self._cold.launch(order)
        except TemplateGone as error:
            log.warning("%s starts cold: its template (pid %d) is gone: %s", order.worker, template.pid, error.message)
            template.kill()
            # It may have forked before it fell silent: never two processes for one worker.
            processes.kill_writers(order.output)
            return await self._cold.launch(order)
        if reply.error or not reply.pid:
            log.warning("%s starts cold: its template (pid %d) says: %s", order.worker, template.pid, reply.error)
            return await self._cold.launch(order)
        self._deaths.pop(template.asked_for, None)
        return Launched(reply.pid, is_standby=True)

    def _review(self) -> None:
        self._settled.clear()
        self._poke.set()

    def _step(self) -> Preload | None:
        """Name what to make next; retire what is worth it no longer, but not before its successor is there."""
        wanted = self._wanted()
        lacking = [preload for preload in wanted if not any(t.is_for(preload) for t in self._templates.values())]
        if not lacking or len(self._templates) > self._limit:
            for template in list(self._templates.values()):
                if not any(template.is_for(preload) for preload in wanted):
                    log.info("template [%s] is retired", template.asked_for)
                    template.kill()
        return lacking[0] if lacking else None

    def _wanted(self) -> list[Preload]:
        given_up = {
            preload
            for known in (self._failures, self._deaths)
            for preload, count in known.items()
            if count >= template_choice.MOST_FAILURES
        }
        return template_choice.worth_having(self._uses, self._limit, self._refused | given_up)

    async def _make(self, preload: Preload) -> None:
        began = time.monotonic()
        try:
            template = Template.start(self._command, preload, self._scratch)
        except TemplateGone as error:
            _count(self._failures, preload, error.message)
            return
        try:
            ready = await template.ready()
        except BaseException as error:
            template.kill()
            if not isinstance(error, TemplateGone):
                raise
            _count(self._failures, preload, error.message)
            return
        self._failures.pop(preload, None)
        if ready.error:
            template.kill()
            self._refused.add(preload)
            log.warning("template [%s] cannot be forked from, its workers start cold: %s", preload, ready.error)
            return
        self._templates[preload] = template
        template.on_gone = lambda: self._on_gone(preload, template)
        log.info("template [%s] is ready: pid=%d took_s=%.2f", preload, template.pid, time.monotonic() - began)

    def _on_gone(self, preload: Preload, template: Template) -> None:
        if self._templates.get(preload) is template:
            del self._templates[preload]
            if any(template.is_for(wanted) for wanted in self._wanted()):
                _count(self._deaths, preload, "it ended")
                self._review()


def _count(failures: dict[Preload, int], preload: Preload, why: str) -> None:
    failures[preload] = failures.get(preload, 0) + 1
    log.warning("no template [%s] (%d of %d): %s", preload, failures[preload], template_choice.MOST_FAILURES, why)


def _decode(line: bytes, kind: type[_S]) -> _S:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise TemplateGone(f"It does not speak as agreed ({error}): {line[:80]!r}") from error


def _set_background(pid: int, is_background: bool) -> None:
    """Making a template must not slow down calls. Niceness can be taken back by root only, a batch policy by all."""
    with contextlib.suppress(OSError):
        if os.geteuid() == 0:
            os.setpriority(os.PRIO_PROCESS, pid, _BACKGROUND_NICE if is_background else 0)
        else:
            os.sched_setscheduler(pid, os.SCHED_BATCH if is_background else os.SCHED_OTHER, os.sched_param(0))
