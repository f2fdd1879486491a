"""Metrics of a GPU, read each second. None: this GPU or driver does not report the metric."""

from __future__ import annotations

import msgspec


class GpuProcess(msgspec.Struct, frozen=True, array_like=True):
    """`memory_bytes` is the GPU memory that the process holds. `utilisation` is the share of the last second in which
    the GPU ran its kernels. None if the driver does not report it; it never reports `utilisation` of MPS clients."""

    pid: int
    memory_bytes: int | None = None
    utilisation: float | None = None


class DeviceMetrics(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Shares are from 0 to 1. Counters increase until the driver is reloaded. `utilisation` is the share of the last
    second in which any kernel ran, however small: usable as a guard, never as a measure of free capacity."""

    uuid: str
    utilisation: float | None = None
    memory_busy: float | None = None  # share of time in which memory was read or written
    encoder: float | None = None
    decoder: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_reserved_bytes: int | None = None  # by the driver
    temperature_c: int | None = None
    temperature_limit_c: int | None = None  # the hardware slows the GPU down from there on
    fan: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_joules: float | None = None  # counter; Volta and newer, and whole GPUs only
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    clock_limits: tuple[str, ...] = ()  # reasons that limit the clocks
    performance_state: int | None = None  # 0 is the fastest
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    rows_remapped_corrected: int | None = None
    rows_remapped_uncorrected: int | None = None
    rows_pending: bool | None = None  # rows are remapped at the next reset
    recovery_action: str | None = None  # of the driver, from release 565 on, such as "none" or "gpu_reset"
    rows_failed: bool | None = None  # a remapping failed because no reserve row was left
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_replays: int | None = None
    pcie_sent_bytes_per_s: int | None = None
    pcie_received_bytes_per_s: int | None = None
    nvlink_sent_bytes: int | None = None  # counter, over all links
    nvlink_received_bytes: int | None = None
    last_xid: int | None = None  # None: none since the agent started
    xids: dict[str, int] = {}  # the driver's error events since the agent started, by number
    processes: tuple[GpuProcess, ...] = ()
    mps_clients: int | None = None
