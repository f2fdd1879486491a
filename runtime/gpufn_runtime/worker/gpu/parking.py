"""A worker gives its GPU's memory up, and takes it again: what it had there waits in memory of the host.

park
    1. the class's @park hooks; of a function without any, torch's tensors
    2. the sessions of its models
    3. what is left on the device is told with the rest
resume: the same, backwards

Before anything is moved it is known how much there is: what does not fit is not begun.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from gpufn_core.domain.worker import ParkedMemory
from gpufn_runtime.worker.arguments.loader import Loaded

_PAGE = os.sysconf("SC_PAGE_SIZE")


class CannotPark(Exception):
    """`needs_bytes` of the host's memory would have done; 0: memory is not what it lacks."""

    def __init__(self, message: str, needs_bytes: int = 0) -> None:
        super().__init__(message)
        self.needs_bytes = needs_bytes


class _Movable(Protocol):
    def park(self) -> None: ...
    def resume(self) -> None: ...


class Parking:
    """`memory_bytes` is what the worker may use of the host; None: as much as it likes."""

    def __init__(
        self, loaded: Loaded, call_hook: Callable[[Callable[[], Any]], None], memory_bytes: int | None
    ) -> None:
        self._loaded = loaded
        self._call_hook = call_hook
        self._memory_bytes = memory_bytes
        self._moved: list[_Movable] = []

    def park(self, host_bytes: int) -> ParkedMemory:
        """CannotPark says what is in the way. Whatever is raised, the worker is of no use any more but to end."""
        from gpufn_runtime.worker.gpu.torch_memory import NotMovable, torch_memory  # noqa: PLC0415  (rarely needed)

        torch = torch_memory()
        sessions = [session for session in self._loaded.sessions.values() if session.on_gpu]
        needed = sum(session.parked_bytes for session in sessions)
        movable: list[_Movable] = [*sessions]
        if torch is not None and not self._loaded.park:
            try:
                found = torch.find()
            except NotMovable as error:
                raise CannotPark(f"{error}: give its class @park and @resume") from error
            if found:
                needed += found
                movable.insert(0, torch)
        if not movable and not self._loaded.park:
            raise CannotPark("nothing of it is known to be on a GPU: give its class @park and @resume")
        self._check_memory(needed, host_bytes)
        before = resident_bytes()
        for hook in self._loaded.park:
            self._call_hook(hook)
        for each in movable:
            each.park()
        self._moved = movable
        # What hooks take is known only afterwards.
        taken = max(needed, resident_bytes() - before if self._loaded.park else 0)
        if taken > host_bytes:
            raise _too_much(taken, host_bytes)
        return ParkedMemory(taken, torch.left_bytes() if torch is not None else 0)

    def resume(self) -> None:
        """What is raised leaves the worker of no use."""
        for each in reversed(self._moved):
            each.resume()
        self._moved = []
        for hook in self._loaded.resume:
            self._call_hook(hook)

    def _check_memory(self, needed: int, host_bytes: int) -> None:
        if needed > host_bytes:
            raise _too_much(needed, host_bytes)
        if self._memory_bytes is not None and needed > (left := self._memory_bytes - resident_bytes()):
            raise CannotPark(
                f"parking takes {needed >> 20} MiB of the host's memory, and {max(left, 0) >> 20} MiB of its own are "
                "left: memory=... gives it more"
            )


def _too_much(needed: int, host_bytes: int) -> CannotPark:
    return CannotPark(
        f"parking takes {needed >> 20} MiB of the host's memory, and {host_bytes >> 20} MiB are left for parked "
        "workers: GPUFN_PARK_MEMORY of its agent allows more",
        needed,
    )


def resident_bytes() -> int:
    """Of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE
