"""Power limits of the node's GPUs. If the operator sets one, the agent applies it at its start and restores the limit
before it at its end. Setting a limit requires root.

A killed agent leaves its limits. So each is recorded in a file before it is set, and the next agent restores it first.
A limit that was changed meanwhile stays: by a user, or by a boot or a reload of the driver, which end all limits.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gpufn_core.domain.devices.device import ANY_KIND, Device, DeviceType, NodeFacts, has_kind
from gpufn_platform.process.private_files import write_private
from gpufn_platform.process.settings import InvalidSetting, number
from gpufn_runtime.agent.devices.sampling import text

log = logging.getLogger(__name__)


class _Limit(msgspec.Struct, frozen=True):
    """Milliwatts, as the driver reports them."""

    before_mw: int
    set_mw: int


_records = msgspec.json.Decoder(dict[str, _Limit])


class PowerLimits:
    """`watts` are the limits by kind of GPU, as `parse_power_limits` returns them. `path` is the file."""

    def __init__(self, path: Path, watts: Mapping[str, float], nvml: Any = None) -> None:
        self._path = path
        self._watts = watts
        self._nvml = nvml
        self._records: dict[str, _Limit] = {}  # by uuid of the GPU
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            self._records = _records.decode(path.read_bytes())
        self._notices: list[str] = []
        self._applied: dict[str, float] = {}

    def apply(self, gpus: Iterable[Device], facts: NodeFacts) -> NodeFacts:
        """Restore the limits that a killed agent left, then set the operator's. Return the facts with the result. Never
        raises."""
        self.restore()
        if self._watts and self._load():
            with self._open():
                for uuid in dict.fromkeys(gpu.parent or gpu.uuid for gpu in gpus):
                    with self._noting(uuid, "its power limit cannot be set"):
                        self._set(uuid)
        return msgspec.structs.replace(facts, power_limits=self._applied, power_limit_notices=tuple(self._notices))

    def restore(self) -> None:
        """Restore the limits. Never raises."""
        if self._records and self._load():
            with self._open():
                for uuid, limit in list(self._records.items()):
                    with self._noting(uuid, f"its power limit of {limit.set_mw / 1000:g} W cannot be restored"):
                        self._restore(uuid, limit)

    def _set(self, uuid: str) -> None:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        watts = self._watts_of(text(nvml.nvmlDeviceGetName(handle)))
        if watts is None or uuid in self._records:  # a record whose limit could not be restored must stay
            return
        least, most = nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
        wanted = min(max(round(watts * 1000), least), most)
        if wanted != round(watts * 1000):
            allowed = f"{least / 1000:g} to {most / 1000:g} W"
            self._note(f"{uuid}: a power limit of {watts:g} W is not possible: the GPU allows {allowed}")
        before = nvml.nvmlDeviceGetPowerManagementLimit(handle)
        if before <= wanted:
            self._applied[uuid] = before / 1000  # a lower limit is another's, and stays
            return
        self._records[uuid] = _Limit(before, wanted)
        if not self._save():  # before the change, because the agent may be killed
            del self._records[uuid]
            self._note(f"{uuid}: its power limit is not changed, because the original cannot be recorded")
            return
        try:
            nvml.nvmlDeviceSetPowerManagementLimit(handle, wanted)
        except nvml.NVMLError:
            del self._records[uuid]
            self._save()
            raise
        set_mw = nvml.nvmlDeviceGetPowerManagementLimit(handle)  # the driver may round
        self._records[uuid] = _Limit(before, set_mw)
        self._save()
        self._applied[uuid] = set_mw / 1000
        log.info("%s: its power limit is %g W, and was %g W", uuid, set_mw / 1000, before / 1000)

    def _restore(self, uuid: str, limit: _Limit) -> None:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        now = nvml.nvmlDeviceGetPowerManagementLimit(handle)
        if now == limit.set_mw:
            nvml.nvmlDeviceSetPowerManagementLimit(handle, limit.before_mw)
            log.info("%s: its power limit is %g W again", uuid, limit.before_mw / 1000)
        else:
            log.info("%s: its power limit stays %g W: it was changed since the agent set it", uuid, now / 1000)
        del self._records[uuid]
        self._save()

    def _watts_of(self, name: str) -> float | None:
        gpu = Device(uuid="", type=DeviceType.GPU, kind=name, memory_bytes=0)
        return next((watts for kind, watts in self._watts.items() if has_kind(gpu, kind)), None)

    def _load(self) -> bool:
        """Import the library. A node without it has no GPUs."""
        with contextlib.suppress(ImportError):
            self._nvml = self._nvml or importlib.import_module("pynvml")
        return self._nvml is not None

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Open NVML, which counts its users. If that fails, each query fails too, and is noted."""
        is_open = False
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlInit()
            is_open = True
        try:
            yield
        finally:
            if is_open:
                with contextlib.suppress(self._nvml.NVMLError):
                    self._nvml.nvmlShutdown()

    @contextlib.contextmanager
    def _noting(self, uuid: str, problem: str) -> Iterator[None]:
        try:
            yield
        except (self._nvml.NVMLError, self._nvml.NVMLLibraryMismatchError) as error:
            self._note(f"{uuid}: {problem}: {error}")

    def _note(self, notice: str) -> None:
        log.warning("%s", notice)
        self._notices.append(notice)

    def _save(self) -> bool:
        temporary = self._path.with_suffix(".new")
        try:
            if self._records:
                write_private(temporary, msgspec.json.encode(self._records))
                temporary.replace(self._path)
            else:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot record the power limits in %s: %s", self._path, error)
            return False
        return True


def parse_power_limits(setting: str) -> dict[str, float]:
    """Parse GPUFN_GPU_POWER_LIMIT. Raises InvalidSetting.

    >>> parse_power_limits("300")
    {'any': 300.0}
    >>> parse_power_limits("H100=500, L4=60")
    {'H100': 500.0, 'L4': 60.0}
    """
    limits: dict[str, float] = {}
    for part in filter(None, map(str.strip, setting.split(","))):
        kind, sign, watts = part.rpartition("=")
        kind = kind.strip() if sign else ANY_KIND
        limits[kind] = number("GPUFN_GPU_POWER_LIMIT", watts)
        if not kind or set(kind) & {"=", ";"} or not limits[kind]:
            raise InvalidSetting(f"GPUFN_GPU_POWER_LIMIT={setting!r}: write watts, as in 300 or H100=500,L4=60.")
    return limits
