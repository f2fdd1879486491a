"""File of the GPUs that failed. Without it, a restarted agent would place workers on a GPU that still needs a reset."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import msgspec

from gpufn_core.domain.device_metrics import DeviceMetrics
from gpufn_runtime.agent.devices.health import NO_RECOVERY

log = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Failure(msgspec.Struct, frozen=True):
    """`energy_j` is the GPU's energy counter at the failure. A reset sets the counter to 0."""

    reason: str
    energy_j: float | None = None

    def is_over(self, metrics: DeviceMetrics) -> bool:
        """Return whether the GPU was reset since. Drivers that request recoveries also report that none is needed."""
        if metrics.recovery_action is not None:
            return metrics.recovery_action == NO_RECOVERY
        return None not in (self.energy_j, metrics.energy_j) and (metrics.energy_j or 0.0) < (self.energy_j or 0.0)


class _File(msgspec.Struct):
    boot_id: str
    failures: dict[str, Failure]


class FailedGpus:
    """`path` is None in tests that need no file."""

    def __init__(self, path: Path | None = None, *, boot_id: str | None = None) -> None:
        self._path = path
        self._boot_id = _BOOT_ID.read_text().strip() if boot_id is None else boot_id

    def load(self) -> dict[str, Failure]:
        """Return the failures since the last boot, by GPU uuid. A boot ends them all."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            if self._path is not None:
                file = msgspec.json.decode(self._path.read_bytes(), type=_File)
                return file.failures if file.boot_id == self._boot_id else {}
        return {}

    def save(self, failures: dict[str, Failure]) -> None:
        if self._path is None:
            return
        temporary = self._path.with_suffix(".new")
        try:
            temporary.write_bytes(msgspec.json.encode(_File(self._boot_id, failures)))
            temporary.replace(self._path)
        except OSError as error:
            log.warning("cannot record the failed GPUs in %s: %s", self._path, error)
