"""What a GPU says of itself each second. None: this GPU, or this driver, does not tell."""

from __future__ import annotations

import msgspec


class GpuProcess(msgspec.Struct, frozen=True, array_like=True):
    """`memory_bytes` is what it holds of the GPU's memory, `utilisation` the share of the last second in which the GPU
    ran its kernels; None where the driver does not say, and of clients of MPS it does not say the latter."""

    pid: int
    memory_bytes: int | None = None
    utilisation: float | None = None


class DeviceMetrics(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Shares are from 0 to 1. Counters go up until the driver is loaded again. `utilisation` is the share of the last
    second in which any kernel ran, however small: a guard, never a measure of what is left."""

    uuid: str
    utilisation: float | None = None
    memory_busy: float | None = None  # share of time in which memory was read or written
    encoder: float | None = None
    decoder: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_reserved_bytes: int | None = None  # by the driver
    temperature_c: int | None = None
    fan: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    clock_limits: tuple[str, ...] = ()  # why the clocks are not higher
    performance_state: int | None = None  # 0 is the fastest
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    rows_remapped_corrected: int | None = None
    rows_remapped_uncorrected: int | None = None
    rows_pending: bool | None = None  # rows are remapped at the next reset
    rows_failed: bool | None = None  # no spare row was left
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_replays: int | None = None
    pcie_sent_bytes_per_s: int | None = None
    pcie_received_bytes_per_s: int | None = None
    xids: dict[str, int] = {}  # the driver's error events since the agent started, by number
    processes: tuple[GpuProcess, ...] = ()
    mps_clients: int | None = None
