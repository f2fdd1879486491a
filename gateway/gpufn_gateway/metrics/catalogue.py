"""The catalogue of all series at `/metrics`. The documentation and the exposition are made from it.

A series of the gateway counts events of this gateway only, so the figures of several gateways add up. A series of the
platform comes from reports that every gateway receives. Only the gateway whose controller leads exposes it, so it is
not counted twice.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

# Units that end a name, by the conventions of Prometheus.
_UNITS_IN_NAMES: Final = ("seconds", "bytes", "ratio", "celsius", "watts", "joules", "hertz")


class Kind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    UNKNOWN = "unknown"  # a counter with a name of DCGM, which does not end with _total


class Scope(enum.StrEnum):
    GATEWAY = "each gateway"
    PLATFORM = "the leader"


class Series(NamedTuple):
    """One metric. A counter's `name` is without `_total`."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    meaning: str
    scope: Scope = Scope.PLATFORM

    @property
    def exposed_name(self) -> str:
        """The name in queries.

        >>> Series("gpufn_calls", Kind.COUNTER, "", (), "Calls").exposed_name
        'gpufn_calls_total'
        """
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name

    @property
    def unit_in_name(self) -> str:
        """The unit that the name ends with, or ""."""
        return self.unit if self.unit in _UNITS_IN_NAMES and self.name.endswith(f"_{self.unit}") else ""


_C, _G, _H, _U = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM, Kind.UNKNOWN
_HERE: Final = Scope.GATEWAY
_F: Final = ("function",)
_NF: Final = ("node", "function")
_GPU: Final = ("node", "gpu", "kind")
_DCGM: Final = ("gpu", "UUID", "modelName", "Hostname")

_CALLS: Final = (
    Series("gpufn_calls_in_flight", _G, "calls", (), "Calls that wait for a result", _HERE),
    Series("gpufn_calls", _C, "calls", (*_F, "outcome"), "Ended calls that a client waited for", _HERE),
    Series(
        "gpufn_refusals", _C, "requests", (*_F, "code"), "Requests that were refused before they became a call", _HERE
    ),
    Series("gpufn_call_seconds", _H, "seconds", _F, "Time from the request to the result, with exemplars", _HERE),
    Series("gpufn_queue_seconds", _H, "seconds", _F, "Time from the request to the start of the run", _HERE),
    Series("gpufn_run_seconds", _H, "seconds", _F, "Time from the start of the run to the result", _HERE),
    Series("gpufn_cold_starts", _C, "calls", _F, "Calls that waited for a cold start", _HERE),
    Series("gpufn_cold_start_seconds", _C, "seconds", (*_F, "phase"), "Time that calls waited for cold starts", _HERE),
    Series("gpufn_webhooks", _C, "webhooks", (*_F, "outcome"), "Webhooks that were delivered or given up", _HERE),
)
_GATEWAY: Final = (
    Series("gpufn_controller_leading", _G, "", (), "1 if the controller of this gateway leads", _HERE),
    Series("gpufn_controller_step_seconds", _H, "seconds", (), "Time of a controller step", _HERE),
    Series("gpufn_controller_epoch", _G, "", (), "Number of the leader's term; it grows when the leader changes"),
    Series("gpufn_bus_connected", _G, "", (), "1 if this gateway is connected to the bus", _HERE),
    Series("gpufn_audit_records_waiting", _G, "records", (), "Audit records that are not stored yet", _HERE),
    Series("gpufn_audit_failures", _C, "writes", (), "Writes of audit records that failed", _HERE),
    Series("gpufn_certificate_expiry_timestamp_seconds", _G, "seconds", ("certificate",),
           "Unix time at which the TLS certificate of the `gateway` or the `bus` ends", _HERE),
    Series("gpufn_trace_spans", _C, "spans", ("result",),
           "Spans: `exported`, `refused` by the collector, `dropped` by the exporter, or `not_sent` to the gateway",
           _HERE),
    Series("gpufn_exported_log_lines", _C, "lines", ("result",),
           "Log lines of functions: `exported`, `refused` by the collector, or `dropped` by the exporter", _HERE),
    Series("gpufn_limit_used_ratio", _G, "ratio", ("holder", "limit"),
           "Used part of a limit of an API key or a team, for those that made calls at this gateway", _HERE),
    Series("gpufn_metrics_dropped_series", _G, "series", (), "Series of this scrape beyond the bounds", _HERE),
)  # fmt: skip
_FUNCTIONS: Final = (
    Series("gpufn_attempts", _C, "attempts", _NF, "Ended attempts of all calls, also submitted ones"),
    Series("gpufn_attempts_failed", _C, "attempts", _NF, "Attempts that did not succeed"),
    Series("gpufn_attempts_seconds", _C, "seconds", _NF, "Run time of attempts"),
    Series("gpufn_revision_attempts", _C, "attempts", (*_NF, "revision"), "Ended attempts, while the calls are split"),
    Series("gpufn_revision_attempts_failed", _C, "attempts", (*_NF, "revision"),
           "Attempts that did not succeed, while the calls are split"),
    Series("gpufn_revision_attempts_seconds", _C, "seconds", (*_NF, "revision"),
           "Run time of attempts, while the calls are split"),
    Series("gpufn_retries", _C, "attempts", _NF, "Retries that were queued"),
    Series("gpufn_gpu_seconds", _C, "seconds", _NF, "GPU seconds charged to calls"),
    Series("gpufn_starts", _C, "workers", (*_NF, "result"), "Starts of workers: `ready`, `resumed` or `failed`"),
    Series("gpufn_start_phase_seconds", _C, "seconds", (*_NF, "phase"), "Time that starts of workers took, by phase"),
    Series("gpufn_function_queued_calls", _G, "calls", _F, "Calls that wait for a worker"),
    Series("gpufn_function_running_calls", _G, "calls", _F, "Calls that run"),
    Series("gpufn_function_oldest_wait_seconds", _G, "seconds", _F,
           "Age of the oldest call that no runner has received; 0 without one, also if it came over the fast path"),
    Series("gpufn_function_wanted_workers", _G, "workers", _F, "Workers that the controller wants"),
    Series("gpufn_function_start_blocked", _G, "", _F, "1 while starts pause because the workers fail to start"),
    Series("gpufn_workers", _G, "workers", (*_F, "state"), "Workers by state"),
    Series("gpufn_function_gpu_memory_bytes", _G, "bytes", (*_NF, "gpu"), "GPU memory that the workers hold"),
    Series("gpufn_function_gpus_busy", _G, "GPUs", _NF, "GPUs that the workers kept busy in the last second"),
)  # fmt: skip
_PLATFORM: Final = (
    Series("gpufn_nodes", _G, "nodes", ("state",), "Nodes by state: `up`, `silent` or `gone`"),
    Series("gpufn_node_up", _G, "", ("node",), "1 if the agent reported in the last 10 s; absent after an hour"),
    Series("gpufn_node_health_ratio", _G, "ratio", ("node",), "Health score of a node: 1 is best, below 0.5 drain it"),
    Series("gpufn_node_gpu_fragmentation_ratio", _G, "ratio", ("node",),
           "Part of the free GPU memory that is on GPUs in use, where no worker with a whole GPU fits"),
    Series("gpufn_dropped_outcomes", _C, "outcomes", ("node",), "Outcomes of submitted calls that had already ended"),
    Series("gpufn_log_dropped_lines", _C, "lines", ("node",), "Log lines of functions that were not stored"),
    Series("gpufn_weights_starts", _C, "workers", ("node", "result"), "Starts with weights: did the node have them"),
    Series("gpufn_weights_fetched_bytes", _C, "bytes", ("node",), "Bytes of weights that were fetched"),
    Series("gpufn_weights_evicted_bytes", _C, "bytes", ("node",), "Bytes of weights that were removed to make room"),
    Series("gpufn_weights_stored_bytes", _G, "bytes", ("node",), "Weights on the disk"),
    Series("gpufn_builds", _G, "builds", ("state",), "Builds that have not ended: `pending` or `building`"),
    Series("gpufn_build_oldest_wait_seconds", _G, "seconds", (), "Time since which the oldest pending build waits"),
)  # fmt: skip
_BUS: Final = (
    Series("gpufn_bus_response_seconds", _G, "seconds", (), "Time of the last JetStream request of this kind"),
    Series("gpufn_bus_storage_bytes", _G, "bytes", ("storage",), "Bytes in JetStream: `file` or `memory`"),
    Series("gpufn_bus_storage_limit_bytes", _G, "bytes", ("storage",), "Limit of the JetStream account, if it has one"),
    Series("gpufn_bus_disk_free_bytes", _G, "bytes", (), "Free bytes of the disk of a bus on this machine", _HERE),
    Series("gpufn_bus_disk_size_bytes", _G, "bytes", (), "Size of the disk of a bus on this machine", _HERE),
    Series("gpufn_bus_stream_bytes", _G, "bytes", ("stream",), "Bytes in a stream"),
    Series("gpufn_bus_stream_messages", _G, "messages", ("stream",), "Messages in a stream"),
    Series("gpufn_bus_stream_limit_bytes", _G, "bytes", ("stream",), "Limit of a stream, if it has one"),
    Series("gpufn_bus_stream_lag", _G, "operations", ("stream",), "Operations that the slowest replica lags behind"),
    Series("gpufn_object_store_bytes", _G, "bytes", ("store",), "Bytes in an object store"),
)
_GPUS: Final = (
    Series("gpufn_gpu_health", _G, "", (*_GPU, "state"), "1 for the current state: `healthy`, `degraded` or `failed`"),
    Series("gpufn_gpu_health_ratio", _G, "ratio", _GPU, "Health score of a GPU: 1 is healthy, below 0.5 drain it"),
    Series("gpufn_gpu_utilisation_ratio", _G, "ratio", _GPU, "Part of the last second in which any kernel ran"),
    Series(
        "gpufn_gpu_memory_busy_ratio", _G, "ratio", _GPU, "Part of the time in which GPU memory was read or written"
    ),
    Series("gpufn_gpu_encoder_ratio", _G, "ratio", _GPU, "Part of the time in which the video encoder was busy"),
    Series("gpufn_gpu_decoder_ratio", _G, "ratio", _GPU, "Part of the time in which the video decoder was busy"),
    Series("gpufn_gpu_memory_total_bytes", _G, "bytes", _GPU, "GPU memory"),
    Series("gpufn_gpu_memory_used_bytes", _G, "bytes", _GPU, "GPU memory in use"),
    Series("gpufn_gpu_memory_reserved_bytes", _G, "bytes", _GPU, "GPU memory that the driver reserves"),
    Series("gpufn_gpu_temperature_celsius", _G, "celsius", _GPU, "Temperature"),
    Series(
        "gpufn_gpu_temperature_limit_celsius", _G, "celsius", _GPU, "Temperature from which the hardware slows down"
    ),
    Series("gpufn_gpu_fan_ratio", _G, "ratio", _GPU, "Fan speed as a part of its maximum"),
    Series("gpufn_gpu_power_watts", _G, "watts", _GPU, "Power"),
    Series("gpufn_gpu_power_limit_watts", _G, "watts", _GPU, "Power limit"),
    Series("gpufn_gpu_energy_joules", _C, "joules", _GPU, "Energy since the driver was loaded"),
    Series("gpufn_gpu_sm_clock_hertz", _G, "hertz", _GPU, "Clock of the multiprocessors"),
    Series("gpufn_gpu_sm_clock_max_hertz", _G, "hertz", _GPU, "Highest clock of the multiprocessors"),
    Series("gpufn_gpu_memory_clock_hertz", _G, "hertz", _GPU, "Clock of the memory"),
    Series("gpufn_gpu_clock_limited", _G, "", (*_GPU, "by"), "1 for each reason that limits the clocks"),
    Series("gpufn_gpu_performance_state", _G, "", _GPU, "Performance state; 0 is the fastest"),
    Series("gpufn_gpu_ecc_corrected_errors", _C, "errors", _GPU, "Corrected memory errors since the driver was loaded"),
    Series("gpufn_gpu_ecc_uncorrected_errors", _C, "errors", _GPU, "Uncorrected memory errors since then"),
    Series("gpufn_gpu_rows_remapped_corrected", _C, "rows", _GPU, "Rows remapped because of corrected errors"),
    Series("gpufn_gpu_rows_remapped_uncorrected", _C, "rows", _GPU, "Rows remapped because of uncorrected errors"),
    Series("gpufn_gpu_rows_pending", _G, "", _GPU, "1 if memory rows will be remapped at the next reset"),
    Series("gpufn_gpu_rows_failed", _G, "", _GPU, "1 if a memory row could not be remapped"),
    Series("gpufn_gpu_recovery_action", _G, "", (*_GPU, "action"), "1 for the recovery that the driver requests"),
    Series("gpufn_gpu_xid_errors", _C, "errors", (*_GPU, "xid"), "Error events of the driver since the agent started"),
    Series("gpufn_gpu_pcie_generation", _G, "", _GPU, "Generation of the PCIe link"),
    Series("gpufn_gpu_pcie_width", _G, "lanes", _GPU, "Lanes of the PCIe link"),
    Series("gpufn_gpu_pcie_replays", _C, "transfers", _GPU, "PCIe transfers that had to be repeated"),
    Series(
        "gpufn_gpu_pcie_sent_bytes_per_second", _G, "bytes/s", _GPU, "Rate of bytes sent over PCIe, as NVML measures it"
    ),
    Series("gpufn_gpu_pcie_received_bytes_per_second", _G, "bytes/s", _GPU, "Rate of bytes received over PCIe"),
    Series("gpufn_gpu_nvlink_sent_bytes", _C, "bytes", _GPU, "Bytes sent over all NVLinks"),
    Series("gpufn_gpu_nvlink_received_bytes", _C, "bytes", _GPU, "Bytes received over all NVLinks"),
    Series("gpufn_gpu_mps_clients", _G, "processes", _GPU, "Processes that share the GPU by MPS"),
)
_OF_DCGM: Final = (
    Series("DCGM_FI_DEV_GPU_UTIL", _G, "%", _DCGM, "As gpufn_gpu_utilisation_ratio"),
    Series("DCGM_FI_DEV_MEM_COPY_UTIL", _G, "%", _DCGM, "As gpufn_gpu_memory_busy_ratio"),
    Series("DCGM_FI_DEV_ENC_UTIL", _G, "%", _DCGM, "As gpufn_gpu_encoder_ratio"),
    Series("DCGM_FI_DEV_DEC_UTIL", _G, "%", _DCGM, "As gpufn_gpu_decoder_ratio"),
    Series("DCGM_FI_DEV_FB_TOTAL", _G, "MiB", _DCGM, "As gpufn_gpu_memory_total_bytes"),
    Series("DCGM_FI_DEV_FB_USED", _G, "MiB", _DCGM, "As gpufn_gpu_memory_used_bytes"),
    Series("DCGM_FI_DEV_FB_FREE", _G, "MiB", _DCGM, "GPU memory that is neither used nor reserved"),
    Series("DCGM_FI_DEV_FB_RESERVED", _G, "MiB", _DCGM, "As gpufn_gpu_memory_reserved_bytes"),
    Series("DCGM_FI_DEV_GPU_TEMP", _G, "celsius", _DCGM, "As gpufn_gpu_temperature_celsius"),
    Series("DCGM_FI_DEV_POWER_USAGE", _G, "watts", _DCGM, "As gpufn_gpu_power_watts"),
    Series("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", _U, "mJ", _DCGM, "As gpufn_gpu_energy_joules_total"),
    Series("DCGM_FI_DEV_SM_CLOCK", _G, "MHz", _DCGM, "As gpufn_gpu_sm_clock_hertz"),
    Series("DCGM_FI_DEV_MEM_CLOCK", _G, "MHz", _DCGM, "As gpufn_gpu_memory_clock_hertz"),
    Series("DCGM_FI_DEV_XID_ERRORS", _G, "", _DCGM, "Number of the last Xid"),
    Series("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", _U, "errors", _DCGM, "As gpufn_gpu_ecc_corrected_errors_total"),
    Series("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", _U, "errors", _DCGM, "As gpufn_gpu_ecc_uncorrected_errors_total"),
    Series("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", _U, "rows", _DCGM, "As gpufn_gpu_rows_remapped_corrected_total"),
    Series(
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", _U, "rows", _DCGM, "As gpufn_gpu_rows_remapped_uncorrected_total"
    ),
    Series("DCGM_FI_DEV_ROW_REMAP_FAILURE", _G, "", _DCGM, "As gpufn_gpu_rows_failed"),
    Series("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", _U, "transfers", _DCGM, "As gpufn_gpu_pcie_replays_total"),
)

SECTIONS: Final = {
    "Calls": _CALLS,
    "Gateway and controller": _GATEWAY,
    "Functions and workers": _FUNCTIONS,
    "Nodes, builds and limits": _PLATFORM,
    "Bus": _BUS,
    "GPUs": _GPUS,
    "GPUs, under the names of DCGM": _OF_DCGM,
}
SERIES: Final = {series.name: series for section in SECTIONS.values() for series in section}
