"""Pauses of builds while another build measures: a compiler beside a measurement would disturb its timings.

The processes of a build report when a measurement begins. Then the processes of all other builds of this builder are
stopped, also of builds for other devices, because all of them need the CPU. The warm-up of the measurement covers the
time until they have stopped. They continue when the measurement ends. Compilers take hours and a measurement takes
seconds, so no measurement waits for a compiler.

A build may pause the others for a minute in total: a hostile model could measure forever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Protocol, Self

import msgspec

from gpufn_builder.processes.process_messages import WAITS_TO_MEASURE, ProgressUpdate
from gpufn_core.domain.devices.engine import BuildStage

_MOST_S: Final = 60.0

OnProgress = Callable[[ProgressUpdate], None]


class Pausable(Protocol):
    """A process with all its descendants."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class MeasurementPauses:
    """All methods are for the event loop's thread."""

    def __init__(self, *, most_s: float = _MOST_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s = most_s
        self._clock = clock
        self._builds: list[BuildProcess] = []
        self._measuring: BuildProcess | None = None
        self._began_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, name: str, process: Pausable, on_progress: OnProgress) -> BuildProcess:
        """Add the processes of a build, until the returned context is closed. `name` is for the other builds."""
        build = BuildProcess(self, name, process, on_progress, self._most_s)
        self._builds.append(build)
        if self._measuring is not None:
            process.pause()
            self._send(build)
        return build

    def on_progress(self, build: BuildProcess, update: ProgressUpdate) -> None:
        build.last = update
        is_measuring = update.stage is BuildStage.MEASURE and not update.detail.endswith(WAITS_TO_MEASURE)
        if self._measuring is build and not is_measuring:
            self._end()
        elif self._measuring is None and is_measuring and build.allowance_s > 0:
            self._begin(build)
        self._send(build)

    def remove(self, build: BuildProcess) -> None:
        self._builds.remove(build)
        if self._measuring is build:
            self._end()

    def _begin(self, build: BuildProcess) -> None:
        self._measuring, self._began_at = build, self._clock()
        self._timer = asyncio.get_running_loop().call_later(build.allowance_s, self._end)
        for other in self._builds:
            if other is not build:
                other.process.pause()
                self._send(other)

    def _end(self) -> None:
        if (measuring := self._measuring) is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._measuring = None
        measuring.allowance_s -= self._clock() - self._began_at
        for other in self._builds:
            if other is not measuring:
                other.process.resume()
                self._send(other)

    def _send(self, build: BuildProcess) -> None:
        """Send the last progress of a build; of a paused one, with the reason why it waits."""
        update = build.last
        if self._measuring not in (None, build):
            detail = f"waiting for the measurement of {self._measuring.name}"
            update = msgspec.structs.replace(update, detail=detail)
        build.send(update)


class BuildProcess:
    """The processes of one build. `allowance_s` is how long it may still pause the others."""

    def __init__(
        self,
        pauses: MeasurementPauses,
        name: str,
        process: Pausable,
        on_progress: OnProgress,
        allowance_s: float,
    ) -> None:
        self._pauses = pauses
        self.name = name
        self.process = process
        self.send = on_progress
        self.allowance_s = allowance_s
        self.last = ProgressUpdate(BuildStage.INGEST, 0.0)

    def on_progress(self, update: ProgressUpdate) -> None:
        self._pauses.on_progress(self, update)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pauses.remove(self)
