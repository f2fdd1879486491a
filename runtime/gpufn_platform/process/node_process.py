"""Main function of a process that runs once per node until it is signaled: the runner, the builder."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

import uvloop

from gpufn_core.errors import BusUnavailable, GpufnError
from gpufn_core.home import Home
from gpufn_core.weights.credentials import OF_AWS
from gpufn_platform.process import fd_limit
from gpufn_platform.process.proc_hardening import hide_environment
from gpufn_platform.process.settings import EXIT_CONFIGURATION
from gpufn_platform.process.watchdog import notify_watchdog


class Settings(Protocol):
    @property
    def home(self) -> Home: ...


S = TypeVar("S", bound=Settings)


def run(name: str, read: Callable[[Mapping[str, str]], S], serve: Callable[[S], Coroutine[Any, Any, None]]) -> int:
    """Run `serve` with the settings that `read` parses from the environment; returns the process's exit code."""
    gc.freeze()  # neither later collections nor the exit visit the imported modules, which takes 0.05 to 0.1 s
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(message)s", stream=sys.stderr)
    try:
        settings = read(os.environ)
        hide_environment("GPUFN_NATS_URL", *OF_AWS)
        fd_limit.raise_to_hard_limit()
        settings.home.ensure()
        uvloop.run(_run_with_watchdog(serve(settings)))
    except GpufnError as error:
        print(error, file=sys.stderr)  # noqa: T201  the supervisor shows the last line of a process's output
        return 1 if isinstance(error, BusUnavailable) else EXIT_CONFIGURATION
    return 0


async def _run_with_watchdog(work: Coroutine[Any, Any, None]) -> None:
    notify_watchdog()
    await work


async def run_until_signaled(
    work: Coroutine[Any, Any, None], name: str, may_end: Callable[[], Coroutine[Any, Any, None]] | None = None
) -> None:
    """Run `work` until SIGTERM or SIGINT. The signal cancels it after `may_end()`, a second signal at once."""
    task = asyncio.create_task(work, name=name)
    shutdown_tasks: set[asyncio.Task[None]] = set()

    def on_signal() -> None:
        if may_end is None or shutdown_tasks:
            task.cancel()
        else:
            shutdown_tasks.add(asyncio.create_task(may_end(), name=f"{name} may end"))
            next(iter(shutdown_tasks)).add_done_callback(lambda _: task.cancel())

    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, on_signal)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    for shutdown in shutdown_tasks:
        shutdown.cancel()
