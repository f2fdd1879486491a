"""The builds that run in this builder, their memory, and the admission of more (`admission`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gpufn_builder.admission import FreeMemory, Need, RunningBuild, estimate, may_start, shortage
from gpufn_builder.identity import Target
from gpufn_builder.memory_history import MemoryHistory
from gpufn_builder.processes.memory import available_bytes
from gpufn_core.domain.devices.engine import Build
from gpufn_core.protocol.reports import NodeReport

log = logging.getLogger(__name__)


class BuildSlots:
    """`most` limits the number of builds. `limit_bytes` is the memory limit of each process of a build."""

    def __init__(
        self,
        *,
        most: int,
        limit_bytes: int,
        history: MemoryHistory,
        available: Callable[[], int | None] = available_bytes,
    ) -> None:
        self._most = most
        self._limit_bytes = limit_bytes
        self._history = history
        self._available = available
        self._free_gpu_bytes: dict[str, int] = {}  # by uuid
        self._slots: list[Slot] = []

    def on_report(self, report: NodeReport) -> None:
        """Note the free memory of the node's GPUs."""
        self._free_gpu_bytes = free_gpu_memory(report)

    def has_slot(self, device: str) -> bool:
        """Return whether a build for `device` may start, if its memory suffices."""
        return may_start(device, self._running(), self._most)

    def admit(self, build: Build, target: Target) -> Slot | None:
        """Reserve the memory of a build until its Slot is closed. None if it must wait."""
        need = estimate(
            build.model,
            on_gpu=target.is_gpu,
            limit_bytes=min(build.model.memory_limit_bytes or self._limit_bytes, self._limit_bytes),
            earlier_bytes=self._history.get(build),
        )
        free = FreeMemory(self._available(), self._free_gpu_bytes.get(target.uuid))
        if lacking := shortage(target.kind, need, self._running(), free, self._most):
            log.info("build %s waits: %s", build.id, lacking)
            return None
        slot = Slot(build, need, self._close)
        self._slots.append(slot)
        return slot

    def _running(self) -> list[RunningBuild]:
        return [RunningBuild(slot.build.device, slot.need, slot.held_bytes) for slot in self._slots]

    def _close(self, slot: Slot) -> None:
        self._slots.remove(slot)
        if slot.has_succeeded and slot.peak_bytes:  # a build that ended early would make the estimate too low
            self._history.add(slot.build, slot.peak_bytes)


class Slot:
    """The place of a running build; a context manager."""

    def __init__(self, build: Build, need: Need, on_close: Callable[[Slot], None]) -> None:
        self.build = build
        self.need = need
        self.held_bytes = self.peak_bytes = 0
        self.has_succeeded = False
        self._on_close = on_close

    def set_held(self, held_bytes: int) -> None:
        """Set the memory that the build holds now. Called from any thread."""
        self.held_bytes, self.peak_bytes = held_bytes, max(held_bytes, self.peak_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._on_close(self)


def free_gpu_memory(report: NodeReport) -> dict[str, int]:
    """Return the free memory of each device by its uuid, excluding memory of workers and of other users' processes."""
    free = {device.uuid: device.memory_bytes - device.foreign_bytes for device in report.devices}
    for process in report.processes:
        for uuid, held_bytes in process.gpu_bytes.items():
            if uuid in free:
                free[uuid] -= held_bytes
    return free
