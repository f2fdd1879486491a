"""Parking: a worker moves its GPU memory to host memory, and back on resume.

park
    1. run the class's @park hooks; without hooks, move torch's tensors
    2. move the engines of its models
    3. report the memory that remains on the device
resume: the same, in reverse order

The required memory is computed before anything moves: if it does not fit, nothing is moved.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Protocol

from gpufn_core.domain.worker import ParkedMemory
from gpufn_core.spec.units import format_bytes
from gpufn_runtime.worker.arguments.loader import Loaded

_PAGE = os.sysconf("SC_PAGE_SIZE")


class CannotPark(Exception):
    """Parking is not possible. `needs_bytes`: host memory that would be sufficient; 0 if memory is not the reason."""

    def __init__(self, message: str, needs_bytes: int = 0) -> None:
        super().__init__(message)
        self.needs_bytes = needs_bytes


class _Movable(Protocol):
    def park(self) -> None: ...
    def resume(self) -> None: ...


class Parking:
    """Parks and resumes a worker. `memory_bytes`: its host memory limit; None: unlimited."""

    def __init__(
        self, loaded: Loaded, call_hook: Callable[[Callable[[], Any]], None], memory_bytes: int | None
    ) -> None:
        self._loaded = loaded
        self._call_hook = call_hook
        self._memory_bytes = memory_bytes
        self._moved: list[_Movable] = []

    def park(self, host_bytes: int, cause: str) -> ParkedMemory:
        """Move GPU memory to the host. Raises CannotPark. After any exception the worker must exit."""
        from gpufn_runtime.worker.gpu.torch_memory import NotMovable, torch_memory  # noqa: PLC0415  (rarely needed)

        torch = torch_memory()
        engines = [each.engine for each in self._loaded.sessions.values() if each.manifest.backend.on_gpu]
        needed = sum(engine.parked_bytes for engine in engines)
        movable: list[_Movable] = [*engines]
        if torch is not None and not self._loaded.park:
            try:
                torch_bytes = torch.find()
            except NotMovable as error:
                raise CannotPark(f"{error}: give its class @park and @resume") from error
            if torch_bytes:
                needed += torch_bytes
                movable.insert(0, torch)
        if not movable and not self._loaded.park:
            raise CannotPark("it has no known GPU memory: give its class @park and @resume")
        self._check_memory(needed, host_bytes)
        before = resident_bytes()
        for hook in self._loaded.park:
            self._call_hook(functools.partial(hook, cause))
        for item in movable:
            item.park()
        self._moved = movable
        # The memory that hooks use is known only afterwards.
        used = max(needed, resident_bytes() - before if self._loaded.park else 0)
        if used > host_bytes:
            raise _insufficient_memory(used, host_bytes)
        return ParkedMemory(used, torch.remaining_bytes() if torch is not None else 0)

    def resume(self, cause: str) -> None:
        """Move memory back to the GPU. After an exception the worker is unusable."""
        for item in reversed(self._moved):
            item.resume()
        self._moved = []
        for hook in self._loaded.resume:
            self._call_hook(functools.partial(hook, cause))

    def _check_memory(self, needed: int, host_bytes: int) -> None:
        if needed > host_bytes:
            raise _insufficient_memory(needed, host_bytes)
        if self._memory_bytes is not None and needed > (remaining := self._memory_bytes - resident_bytes()):
            raise CannotPark(
                f"parking takes {format_bytes(needed)} of host memory, but only {format_bytes(remaining)} of its limit "
                "remain: increase memory=..."
            )


def _insufficient_memory(needed: int, host_bytes: int) -> CannotPark:
    return CannotPark(
        f"parking takes {format_bytes(needed)} of host memory, but only {format_bytes(host_bytes)} remain for parked "
        "workers: increase GPUFN_PARK_MEMORY of its agent",
        needed,
    )


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE
