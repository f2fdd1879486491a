"""Devices without a driver: the node's CPU pool, and devices from GPUFN_DEVICES (fakes for tests)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from gpufn_core.domain.devices.device import Device, DeviceType
from gpufn_platform.process.settings import InvalidSetting
from gpufn_runtime.agent.devices.base import FoundDevices, Sample

_UNLIMITED = 1 << 60  # cgroup v1 reports "no limit" as a number near 2**63


def cpu_pool(
    node: str, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup"), *, memory_bytes: int | None = None
) -> Device:
    """Return the cores and the memory that this process may use, within its affinity and cgroup limits. `memory_bytes`
    is the operator's setting of the memory for workers."""
    return Device(
        uuid=f"cpu-{node}",
        type=DeviceType.CPU,
        kind=_cpu_model(proc),
        memory_bytes=memory_bytes or min(_total_memory(proc), _memory_limit(cgroup)),
        cores=min(float(len(os.sched_getaffinity(0))), _cpu_quota(cgroup)),
    )


def parse_devices(text: str) -> tuple[Device, ...]:
    """Parse GPUFN_DEVICES: a JSON array of Device objects. Raises InvalidSetting."""
    try:
        return msgspec.json.decode(text, type=tuple[Device, ...])
    except msgspec.DecodeError as error:
        raise InvalidSetting(f"GPUFN_DEVICES must be a JSON array of devices: {error}") from error


class DeclaredInventory:
    """The `declared` devices, plus the CPU pool if they contain none: each worker needs a CPU pool."""

    def __init__(self, declared: tuple[Device, ...], pool: Device) -> None:
        has_pool = any(device.type is DeviceType.CPU for device in declared)
        self._devices = declared if has_pool else (pool, *declared)

    def find(self) -> FoundDevices:
        return FoundDevices(self._devices)

    def sample(self) -> Sample:
        return Sample()


def _cpu_model(proc: Path) -> str:
    with contextlib.suppress(OSError):
        for line in (proc / "cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "CPU"


def _total_memory(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{proc / 'meminfo'} has no MemTotal")


def _memory_limit(cgroup: Path) -> int:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return int((cgroup / name).read_text())
    return _UNLIMITED


def _cpu_quota(cgroup: Path) -> float:
    """Return the number of cores that the cgroup allows."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())
        if quota_us > 0:
            return quota_us / int((cgroup / "cpu/cpu.cfs_period_us").read_text())
    return float("inf")
