"""Template launcher: forks workers in milliseconds from a template, a process that has their modules imported.

1. `set_uses(uses)` sets the revisions in use. `run` creates and retires templates in the background, one at a time.
2. A template's first line reports its modules, or why it must not be forked and which module caused that. Templates
   without that module are created instead, and each launch reports the reason.
3. `launch` sends a ForkRequest to the smallest template that has the worker's modules, imported with its `env`. An idle
   template keeps one child forked in advance. If no template with one of the modules is ready, but one imports them,
   the launch waits: that template began earlier than the worker.
4. If a fork fails or times out, the template is killed and the worker starts cold. If the template that a launch waits
   for fails, the worker starts as if there were none.
5. After a few failures a Preload is given up. Failures to create a template are counted until a success; unexpected
   deaths are counted until a fork succeeds.

Templates read requests from a pipe of the agent, so they end with the agent. Workers forked from them live on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from gpufn_core.encoding.msgspec_errors import DECODE_ERRORS
from gpufn_core.errors import PlatformError
from gpufn_core.protocol.launch import (
    ENV_VARIABLE,
    MAX_LINE_BYTES,
    SANDBOX_VARIABLE,
    ForkReply,
    ForkRequest,
    Sandbox,
    TemplateReady,
)
from gpufn_core.spec.isolation import Network
from gpufn_runtime.agent.decide import template_choice
from gpufn_runtime.agent.decide.template_choice import Preload, Use, network_of
from gpufn_runtime.agent.environments.environment import Environment
from gpufn_runtime.agent.launchers.base import Launched, Launcher, LaunchOrder, NodeFault
from gpufn_runtime.agent.launchers.process import WORKER, command_in
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.environment import preload_environment, template_environment

log = logging.getLogger(__name__)

_FORK_TIMEOUT_S = 2.0
_BACKGROUND_NICE = 10
_PIPE_BYTES = 1 << 16
_RETRY_S = 5.0  # after an unexpected exception

_S = TypeVar("_S", bound=msgspec.Struct)


class RequestTooLong(PlatformError):
    """The request is too large for a template's pipe: its environment is too large."""


class TemplateGone(PlatformError):
    """The template ended or does not answer."""


class Template:
    """One template process. It handles one request at a time."""

    def __init__(self, preload: Preload, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.preload = preload
        self.covers = preload.modules
        self.pid = process.pid
        self._process = processes.identify(process.pid)
        self._requests = process.stdin
        self._replies = process.stdout
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._waiter: asyncio.Future[bytes] | None = None
        self._lock = asyncio.Lock()
        self._is_open = True
        self.on_gone: Callable[[], None] = lambda: None
        os.set_blocking(self._requests.fileno(), False)
        os.set_blocking(self._replies.fileno(), False)
        self._loop.add_reader(self._replies.fileno(), self._on_readable)

    @classmethod
    def start(cls, command: Sequence[str], preload: Preload, scratch: Path, sandbox: Sandbox | None = None) -> Template:
        scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
        environment = template_environment(scratch, sees_gpus=preload.sees_gpus, python=preload.python)
        if preload.env:
            environment[ENV_VARIABLE] = msgspec.json.encode(preload_environment(dict(preload.env))).decode()
        if sandbox is not None:
            environment[SANDBOX_VARIABLE] = msgspec.json.encode(sandbox).decode()
        try:
            process = subprocess.Popen(  # noqa: S603
                [*command_in(preload.python, command), "--template", *sorted(preload.modules)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                cwd=scratch,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal must reach the agent only
            )
        except (OSError, ValueError) as error:
            raise TemplateGone(f"Cannot start {command[0]}: {error}.") from error
        process.returncode = 0  # the agent reaps all children by pid
        _set_background(process.pid, True)
        return cls(preload, process)

    def is_for(self, preload: Preload) -> bool:
        """Return whether this template serves `preload`. Imports may bring more modules: torch imports numpy."""
        return self.preload.has_context_of(preload) and self.preload.modules <= preload.modules <= self.covers

    @property
    def is_open(self) -> bool:
        return self._is_open

    async def ready(self, timeout_s: float = template_choice.READY_TIMEOUT_S) -> TemplateReady:
        """Read the template's first line. Raises TemplateGone."""
        ready = _decode(await self._line(timeout_s), TemplateReady)
        self.covers = self.preload.modules | frozenset(ready.modules)
        if not ready.error:
            _set_background(self.pid, False)  # workers inherit the priority
            with contextlib.suppress(OSError):
                os.write(self._requests.fileno(), b"\n")  # lets the template fork a child in advance
        return ready

    async def fork(self, request: ForkRequest, timeout_s: float = _FORK_TIMEOUT_S) -> ForkReply:
        """Fork a worker. Raises TemplateGone, RequestTooLong."""
        async with self._lock:
            if not self._is_open:
                raise TemplateGone("The template ended.")
            data = msgspec.json.encode(request) + b"\n"
            if len(data) > _PIPE_BYTES:
                raise RequestTooLong(f"A request of {len(data):,} bytes does not fit in the template's pipe.")
            try:
                # The pipe is empty: the previous request was answered.
                written = os.write(self._requests.fileno(), data)
            except OSError as error:
                raise TemplateGone(f"The template accepts no request: {error.strerror}.") from error
            if written < len(data):
                raise TemplateGone("The template has not read earlier requests.")
            return _decode(await self._line(timeout_s), ForkReply)

    def kill(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._replies.fileno())
            self._requests.close()
            self._replies.close()
            if self._process is not None:
                processes.kill(self._process)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(TemplateGone("The template ended."))
            self.on_gone()

    async def _line(self, timeout_s: float) -> bytes:
        if (line := self._take_line()) is not None:
            return line
        if not self._is_open:
            raise TemplateGone("The template ended.")
        self._waiter = self._loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._waiter
        except TimeoutError:
            raise TemplateGone(f"The template did not answer within {timeout_s:g} s.") from None
        finally:
            self._waiter = None

    def _on_readable(self) -> None:
        try:
            data = os.read(self._replies.fileno(), 1 << 16)
        except BlockingIOError:
            return
        self._buffer += data
        if not data or len(self._buffer) > MAX_LINE_BYTES:
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


@dataclass
class _Importing:
    """A template that is being created."""

    template: Template
    finished: asyncio.Event = field(default_factory=asyncio.Event)


class SandboxOf(Protocol):
    async def __call__(self, scratch: Path, *, network: Network, python: Environment | None) -> Sandbox:
        """Return the sandbox of a template. Raises NodeFault if the network of its workers cannot be set up."""


class TemplateLauncher:
    """Forks workers from templates. `cold` starts the workers that no template can. `sandbox_of` returns the sandbox of
    the templates that use a folder as scratch space; None does not confine them. Without `imports_with_env` no template
    imports modules with a function's variables, which may make a module run code of the function."""

    def __init__(
        self,
        cold: Launcher,
        *,
        scratch: Path,
        limit: int,
        command: Sequence[str] = WORKER,
        fork_timeout_s: float = _FORK_TIMEOUT_S,
        sandbox_of: SandboxOf | None = None,
        imports_with_env: bool = True,
    ) -> None:
        self._cold = cold
        self._sandbox_of = sandbox_of
        self._imports_with_env = imports_with_env
        self._scratch = scratch
        self._limit = limit
        self._command = command
        self._fork_timeout_s = fork_timeout_s
        self._templates: dict[Preload, Template] = {}
        self._importing: _Importing | None = None
        self._refusals: dict[tuple[str, bool], str] = {}  # reasons, by module and whether the template sees GPUs
        self._failures: dict[Preload, int] = {}  # failures to create a template, since the last success
        self._deaths: dict[Preload, int] = {}  # unexpected ends, since the last successful fork
        self._uses: tuple[Use, ...] = ()
        self._poke = asyncio.Event()
        self._settled = asyncio.Event()

    @property
    def templates(self) -> tuple[str, ...]:
        return tuple(map(str, self._templates))

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(template.pid for template in self._templates.values())

    def set_uses(self, uses: Iterable[Use]) -> None:
        wanted = tuple(uses if self._imports_with_env else map(template_choice.without_env, uses))
        if self._sandbox_of is not None:  # packages of a user run in the sandbox of their worker only
            wanted = tuple(use for use in wanted if use.python is None)
        if wanted != self._uses:
            self._uses = wanted
            for counters in (self._failures, self._deaths):
                for preload in (
                    counters.keys() - {use.preload for use in self._forkable(wanted)} - {template_choice.EMPTY}
                ):
                    del counters[preload]
            self._review()

    async def settled(self) -> None:
        """Wait until every wanted template is ready, refused or given up."""
        await self._settled.wait()

    async def run(self) -> None:
        """Create and retire templates until cancelled; then kill them all."""
        try:
            while True:
                await self._poke.wait()
                self._poke.clear()
                try:
                    while (preload := self._step()) is not None:
                        await self._make(preload)
                except Exception:
                    log.exception("template review failed; next try in %g s", _RETRY_S)
                    await asyncio.sleep(_RETRY_S)
                    self._poke.set()
                if not self._poke.is_set():
                    self._settled.set()
        finally:
            self._uses = ()
            for template in list(self._templates.values()):
                template.kill()

    async def launch(self, order: LaunchOrder) -> Launched:
        spec = order.worker_config.spec
        has_gpu = bool(spec.resources.gpu)
        refused_modules = "; ".join(
            reason for (module, sees_gpus), reason in self._refusals.items()
            if module in order.modules and sees_gpus == has_gpu
        )  # fmt: skip
        await self._wait_for_imports(order, has_gpu=has_gpu)
        launched = await self._fork(order, has_gpu=has_gpu) or await self._cold.launch(order)
        return dataclasses.replace(launched, refused_modules=refused_modules)

    async def _wait_for_imports(self, order: LaunchOrder, *, has_gpu: bool) -> None:
        """Wait for the template that is being created, if the worker starts sooner from it. A template that fails or
        takes READY_TIMEOUT_S ends the wait."""
        importing = self._importing
        if importing is None or not self._may_fork(order, importing.template.preload, has_gpu=has_gpu):
            return
        ready = self._best_template(order, has_gpu=has_gpu)
        modules = importing.template.preload.modules
        if not template_choice.is_worth_waiting_for(modules, order.modules, ready.preload.modules if ready else None):
            return
        _set_background(importing.template.pid, False)  # from now on a call waits for it
        log.info("worker %s waits for the imports of template [%s]", order.worker, importing.template.preload)
        await importing.finished.wait()

    def _may_fork(self, order: LaunchOrder, preload: Preload, *, has_gpu: bool) -> bool:
        """Return whether the worker may fork from a template with this preload."""
        config = order.worker_config
        if self._sandbox_of is not None and (config.sandbox is None or order.python is not None):
            return False  # it must not be confined, and a template is; or its packages may not run in a template
        network = network_of(config.spec)
        return preload.serves(
            config.spec.env, has_gpu=has_gpu, network=network, domain=order.domain, python=order.python
        )

    def _best_template(self, order: LaunchOrder, *, has_gpu: bool) -> Template | None:
        candidates = [t for t in self._templates.values() if self._may_fork(order, t.preload, has_gpu=has_gpu)]
        modules_of_template = template_choice.closest((t.covers for t in candidates), order.modules)
        return next((t for t in candidates if t.covers == modules_of_template), None)

    async def _fork(self, order: LaunchOrder, *, has_gpu: bool) -> Launched | None:
        """Fork the worker from a template. Return None if it must start cold."""
        template = self._best_template(order, has_gpu=has_gpu)
        if template is None:
            return None
        request = ForkRequest(os.fspath(order.config), os.fspath(order.output), order.environment)
        try:
            reply = await template.fork(request, self._fork_timeout_s)
        except RequestTooLong as error:
            log.info("worker %s starts cold: %s", order.worker, error.message)
            return None
        except TemplateGone as error:
            log.warning("worker %s starts cold: template %d is gone: %s", order.worker, template.pid, error.message)
            template.kill()
            # The template may have forked before it failed. One worker must never have two processes.
            processes.kill_writers(order.output)
            return None
        if reply.error or not reply.pid:
            log.warning("worker %s starts cold: template %d reports: %s", order.worker, template.pid, reply.error)
            return None
        self._deaths.pop(template.preload, None)
        return Launched(reply.pid, is_standby=True)

    def _review(self) -> None:
        self._settled.clear()
        self._poke.set()

    def _step(self) -> Preload | None:
        """Return the next Preload to create. Retire unwanted templates, but not before their successors are ready."""
        wanted = self._wanted()
        missing = [preload for preload in wanted if not any(t.is_for(preload) for t in self._templates.values())]
        if not missing or len(self._templates) > self._limit:
            for template in list(self._templates.values()):
                if not any(template.is_for(preload) for preload in wanted):
                    log.info("retiring template [%s]", template.preload)
                    template.kill()
        return missing[0] if missing else None

    def _wanted(self) -> list[Preload]:
        given_up = {
            preload
            for failures in (self._failures, self._deaths)
            for preload, count in failures.items()
            if count >= template_choice.MAX_FAILURES
        }
        return template_choice.select_preloads(self._forkable(self._uses), self._limit, given_up)

    def _forkable(self, uses: Iterable[Use]) -> list[Use]:
        """Return `uses` without the modules that forbid forks."""
        return [
            dataclasses.replace(
                use, modules=frozenset(m for m in use.modules if (m, use.has_gpu) not in self._refusals)
            )
            for use in uses
        ]

    async def _make(self, preload: Preload) -> None:
        try:
            sandbox = None
            if self._sandbox_of is not None:
                sandbox = await self._sandbox_of(self._scratch, network=preload.network, python=preload.python)
            template = Template.start(self._command, preload, self._scratch, sandbox)
        except (NodeFault, TemplateGone) as error:
            _count_failure(self._failures, preload, error.message)
            return
        self._importing = importing = _Importing(template)
        try:
            await self._when_ready(template)
        finally:
            self._importing = None
            importing.finished.set()

    async def _when_ready(self, template: Template) -> None:
        preload, started = template.preload, time.monotonic()
        try:
            ready = await template.ready()
        except BaseException as error:
            template.kill()
            if not isinstance(error, TemplateGone):
                raise
            _count_failure(self._failures, preload, error.message)
            return
        if ready.error:
            template.kill()
            if ready.refused_module in preload.modules:
                self._refusals[ready.refused_module, preload.sees_gpus] = ready.error
                log.warning("template [%s] cannot be forked; the next one omits the module: %s", preload, ready.error)
            else:
                _count_failure(self._failures, preload, ready.error)
            return
        self._failures.pop(preload, None)
        self._templates[preload] = template
        template.on_gone = lambda: self._on_gone(preload, template)
        log.info("template [%s] is ready: pid=%d took_s=%.2f", preload, template.pid, time.monotonic() - started)

    def _on_gone(self, preload: Preload, template: Template) -> None:
        if self._templates.get(preload) is template:
            del self._templates[preload]
            if any(template.is_for(wanted) for wanted in self._wanted()):
                _count_failure(self._deaths, preload, "it ended")
                self._review()


def _count_failure(failures: dict[Preload, int], preload: Preload, reason: str) -> None:
    failures[preload] = failures.get(preload, 0) + 1
    log.warning("no template [%s] (%d of %d): %s", preload, failures[preload], template_choice.MAX_FAILURES, reason)


def _decode(line: bytes, kind: type[_S]) -> _S:
    try:
        return msgspec.json.decode(line, type=kind)
    except DECODE_ERRORS as error:
        raise TemplateGone(f"The template sent an invalid message ({error}): {line[:80]!r}") from error


def _set_background(pid: int, is_background: bool) -> None:
    """Lower the priority while a template is created, so that calls are not slowed down. Only root can undo niceness;
    any user can undo a batch policy."""
    with contextlib.suppress(OSError):
        if os.geteuid() == 0:
            os.setpriority(os.PRIO_PROCESS, pid, _BACKGROUND_NICE if is_background else 0)
        else:
            os.sched_setscheduler(pid, os.SCHED_BATCH if is_background else os.SCHED_OTHER, os.sched_param(0))
