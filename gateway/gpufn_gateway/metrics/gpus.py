"""GPU series from the reports of the nodes, under gpufn's names and under the names of DCGM's exporter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from gpufn_core.domain.devices.device import Device, DeviceType, Health
from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_core.protocol.reports import NodeReport
from gpufn_gateway.metrics.families import Families
from gpufn_gateway.metrics.telemetry import Fill
from gpufn_gateway.nodes.health_trends import HealthTrends

_MHZ: Final = 1e6
_MIB: Final = 1 << 20
_MAX_GPUS: Final = 256  # MIG instances included; of one node
_MAX_LABELS: Final = 64  # different Xids or reasons of one GPU

# Series by field of DeviceMetrics, with the factor of the unit.
FIELDS: Final[dict[str, tuple[str, float]]] = {
    "utilisation": ("gpufn_gpu_utilisation_ratio", 1),
    "memory_busy": ("gpufn_gpu_memory_busy_ratio", 1),
    "encoder": ("gpufn_gpu_encoder_ratio", 1),
    "decoder": ("gpufn_gpu_decoder_ratio", 1),
    "memory_total_bytes": ("gpufn_gpu_memory_total_bytes", 1),
    "memory_used_bytes": ("gpufn_gpu_memory_used_bytes", 1),
    "memory_reserved_bytes": ("gpufn_gpu_memory_reserved_bytes", 1),
    "temperature_c": ("gpufn_gpu_temperature_celsius", 1),
    "temperature_limit_c": ("gpufn_gpu_temperature_limit_celsius", 1),
    "fan": ("gpufn_gpu_fan_ratio", 1),
    "power_w": ("gpufn_gpu_power_watts", 1),
    "power_limit_w": ("gpufn_gpu_power_limit_watts", 1),
    "energy_joules": ("gpufn_gpu_energy_joules", 1),
    "sm_clock_mhz": ("gpufn_gpu_sm_clock_hertz", _MHZ),
    "sm_clock_max_mhz": ("gpufn_gpu_sm_clock_max_hertz", _MHZ),
    "memory_clock_mhz": ("gpufn_gpu_memory_clock_hertz", _MHZ),
    "performance_state": ("gpufn_gpu_performance_state", 1),
    "ecc_corrected": ("gpufn_gpu_ecc_corrected_errors", 1),
    "ecc_uncorrected": ("gpufn_gpu_ecc_uncorrected_errors", 1),
    "rows_remapped_corrected": ("gpufn_gpu_rows_remapped_corrected", 1),
    "rows_remapped_uncorrected": ("gpufn_gpu_rows_remapped_uncorrected", 1),
    "rows_pending": ("gpufn_gpu_rows_pending", 1),
    "rows_failed": ("gpufn_gpu_rows_failed", 1),
    "pcie_generation": ("gpufn_gpu_pcie_generation", 1),
    "pcie_width": ("gpufn_gpu_pcie_width", 1),
    "pcie_replays": ("gpufn_gpu_pcie_replays", 1),
    "pcie_sent_bytes_per_s": ("gpufn_gpu_pcie_sent_bytes_per_second", 1),
    "pcie_received_bytes_per_s": ("gpufn_gpu_pcie_received_bytes_per_second", 1),
    "nvlink_sent_bytes": ("gpufn_gpu_nvlink_sent_bytes", 1),
    "nvlink_received_bytes": ("gpufn_gpu_nvlink_received_bytes", 1),
    "mps_clients": ("gpufn_gpu_mps_clients", 1),
}
_DCGM: Final[dict[str, tuple[str, float]]] = {
    "utilisation": ("DCGM_FI_DEV_GPU_UTIL", 100),
    "memory_busy": ("DCGM_FI_DEV_MEM_COPY_UTIL", 100),
    "encoder": ("DCGM_FI_DEV_ENC_UTIL", 100),
    "decoder": ("DCGM_FI_DEV_DEC_UTIL", 100),
    "memory_total_bytes": ("DCGM_FI_DEV_FB_TOTAL", 1 / _MIB),
    "memory_used_bytes": ("DCGM_FI_DEV_FB_USED", 1 / _MIB),
    "memory_reserved_bytes": ("DCGM_FI_DEV_FB_RESERVED", 1 / _MIB),
    "temperature_c": ("DCGM_FI_DEV_GPU_TEMP", 1),
    "power_w": ("DCGM_FI_DEV_POWER_USAGE", 1),
    "energy_joules": ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 1000),
    "sm_clock_mhz": ("DCGM_FI_DEV_SM_CLOCK", 1),
    "memory_clock_mhz": ("DCGM_FI_DEV_MEM_CLOCK", 1),
    "last_xid": ("DCGM_FI_DEV_XID_ERRORS", 1),
    "ecc_corrected": ("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", 1),
    "ecc_uncorrected": ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 1),
    "rows_remapped_corrected": ("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", 1),
    "rows_remapped_uncorrected": ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", 1),
    "rows_failed": ("DCGM_FI_DEV_ROW_REMAP_FAILURE", 1),
    "pcie_replays": ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", 1),
}


class GpuSeries:
    """`nodes` returns the reports of the live nodes, `metrics_of` the metrics of a node's GPUs. `trends` has the health
    scores."""

    def __init__(
        self,
        nodes: Callable[[], Iterable[NodeReport]],
        metrics_of: Callable[[str], tuple[DeviceMetrics, ...]],
        trends: HealthTrends,
    ) -> None:
        self._nodes = nodes
        self._metrics_of = metrics_of
        self._trends = trends

    def snapshot(self) -> Fill:
        nodes = [_Node(node, self._metrics_of(node.node), *self._scores(node)) for node in self._nodes()]
        return lambda families: _add_nodes(families, nodes)

    def _scores(self, node: NodeReport) -> tuple[float, dict[str, float]]:
        of_gpus = {gpu.uuid: self._trends.of_gpu(node.node, gpu).value for gpu in _gpus(node)}
        return self._trends.of_node(node).value, of_gpus


class _Node(NamedTuple):
    """A node's report and the metrics of its GPUs, with the health scores of the node and of its GPUs."""

    report: NodeReport
    metrics: tuple[DeviceMetrics, ...]
    score: float
    gpu_scores: dict[str, float]


def _gpus(node: NodeReport) -> list[Device]:
    return [device for device in node.devices if device.type is DeviceType.GPU][:_MAX_GPUS]


def _add_nodes(families: Families, nodes: Iterable[_Node]) -> None:
    for node, devices, score, gpu_scores in nodes:
        metrics = {each.uuid: each for each in devices}
        families.add("gpufn_node_health_ratio", score, node.node)
        gpus = _gpus(node)
        for number, device in enumerate(gpus):
            labels = (node.node, device.uuid, device.kind)
            for state in Health:
                families.add("gpufn_gpu_health", device.health is state, *labels, state.value)
            families.add("gpufn_gpu_health_ratio", gpu_scores[device.uuid], *labels)
            if (each := metrics.get(device.uuid)) is not None:
                _add_metrics(families, each, labels)
                _add_dcgm(families, each, (str(number), device.uuid, device.kind, node.node))
        _add_functions(families, node, gpus)


def _add_metrics(families: Families, each: DeviceMetrics, labels: tuple[str, str, str]) -> None:
    for field, (name, factor) in FIELDS.items():
        if (value := getattr(each, field)) is not None:
            families.add(name, value * factor, *labels)
    for reason in each.clock_limits[:_MAX_LABELS]:
        families.add("gpufn_gpu_clock_limited", 1, *labels, reason)
    if each.recovery_action is not None:
        families.add("gpufn_gpu_recovery_action", 1, *labels, each.recovery_action)
    for xid, count in list(each.xids.items())[:_MAX_LABELS]:
        families.add("gpufn_gpu_xid_errors", count, *labels, xid)


def _add_dcgm(families: Families, each: DeviceMetrics, labels: tuple[str, str, str, str]) -> None:
    for field, (name, factor) in _DCGM.items():
        if (value := getattr(each, field)) is not None:
            families.add(name, value * factor, *labels)
    if (used := each.memory_used_bytes) is not None and each.memory_total_bytes is not None:
        free = each.memory_total_bytes - used - (each.memory_reserved_bytes or 0)
        families.add("DCGM_FI_DEV_FB_FREE", max(0, free) / _MIB, *labels)


def _add_functions(families: Families, node: NodeReport, gpus: list[Device]) -> None:
    """Add the GPU resources that the workers of each function hold. A worker has no label: its id is new at each
    start."""
    held: dict[tuple[str, str], int] = {}
    busy: dict[str, float] = {}
    uuids = {device.uuid for device in gpus}
    for process in node.processes:
        for uuid, count in process.gpu_bytes.items():
            if uuid in uuids:
                key = process.function, uuid
                held[key] = held.get(key, 0) + count
        if process.gpus_busy is not None:
            busy[process.function] = busy.get(process.function, 0.0) + process.gpus_busy
    for (function, uuid), count in held.items():
        families.add("gpufn_function_gpu_memory_bytes", count, node.node, function, uuid)
    for function, number in busy.items():
        families.add("gpufn_function_gpus_busy", number, node.node, function)
