"""File of the GPUs that failed. Without it, a restarted agent would place workers on a GPU that still needs a reset."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import msgspec

from gpufn_platform.process.private_files import write_private

log = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _File(msgspec.Struct):
    boot_id: str
    failures: dict[str, str]


class FailedGpus:
    """`path` is None in tests that need no file."""

    def __init__(self, path: Path | None = None, *, boot_id: str = "") -> None:
        self._path = path
        self._boot_id = boot_id
        with contextlib.suppress(OSError):  # a sandbox may hide it; then a failure outlives a boot
            self._boot_id = self._boot_id or _BOOT_ID.read_text().strip()

    def load(self) -> dict[str, str]:
        """Return the failures since the last boot: reasons by GPU uuid. A boot ends them all."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            if self._path is not None:
                file = msgspec.json.decode(self._path.read_bytes(), type=_File)
                return file.failures if file.boot_id == self._boot_id else {}
        return {}

    def save(self, failures: dict[str, str]) -> None:
        if self._path is None:
            return
        temporary = self._path.with_suffix(".new")
        try:
            write_private(temporary, msgspec.json.encode(_File(self._boot_id, failures)))
            temporary.replace(self._path)
        except OSError as error:
            log.warning("cannot record the failed GPUs in %s: %s", self._path, error)
