"""The state of the nodes' GPUs, at `/v1/nodes` and for Prometheus."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_core.domain.devices.device import Device, DeviceLink, DeviceType, Health, LinkKind, MpsLevel, NodeFacts
from gpufn_core.domain.devices.device_metrics import DeviceMetrics, GpuProcess
from gpufn_core.protocol.reports import DeviceReport, NodeReport, ProcessReport
from gpufn_gateway.metrics.gpus import FIELDS
from gpufn_gateway.settings import GatewaySettings
from gpufn_platform.process.settings import InvalidSetting

L4 = Device("GPU-1", DeviceType.GPU, "NVIDIA L4", 24 << 30)
HOT = Device("GPU-2", DeviceType.GPU, "NVIDIA L4", 24 << 30, health=Health.DEGRADED, health_reason="it is hot")
REPORT = NodeReport(
    "n1", 1.0, (L4, HOT), links=(DeviceLink("GPU-1", "GPU-2", LinkKind.NVLINK),), facts=NodeFacts(mps=MpsLevel.V2)
)
METRICS = DeviceMetrics(
    uuid="GPU-1", utilisation=0.5, memory_used_bytes=1 << 30, energy_joules=5000.0, rows_pending=False,
    clock_limits=("power",), recovery_action="none", xids={"13": 2}, last_xid=13, processes=(GpuProcess(7, 1 << 20),),
)  # fmt: skip


def _report(gateway: Any) -> None:
    gateway.registry.receive_node_report(REPORT)
    gateway.registry.device_reports.receive(DeviceReport("n1", 1.0, (METRICS,)))


async def _samples(gateway: Any) -> dict[str, float]:
    lines = (await gateway.get("/metrics")).text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


async def test_reports_of_nodes_have_the_health_of_their_gpus(gateway: Any) -> None:
    _report(gateway)
    (node,) = (await gateway.get("/v1/nodes")).json()["nodes"]
    assert node["devices"][1] == {
        "uuid": "GPU-2", "type": "gpu", "kind": "NVIDIA L4", "memory_bytes": 24 << 30, "health": "degraded",
        "health_reason": "it is hot",
    }  # fmt: skip
    assert (node["links"], node["facts"]) == ([["GPU-1", "GPU-2", 5]], {"mps": "v2"})
    (metrics,) = node["metrics"]
    assert (metrics["uuid"], metrics["utilisation"], metrics["processes"]) == ("GPU-1", 0.5, [[7, 1 << 20, None]])
    gateway.clock.now += 11
    gateway.registry.receive_node_report(REPORT)
    assert (await gateway.get("/v1/nodes")).json()["nodes"][0]["metrics"] == []


async def test_gpu_utilization_of_a_functions_workers_is_reported_if_the_driver_has_it(gateway: Any) -> None:
    processes = tuple(
        ProcessReport(worker, function, 2, 7, 0.0, gpus_busy=measured)
        for worker, function, measured in (
            ("w-1", "f", 1.5),
            ("w-2", "f", 0.25),
            ("w-3", "f", None),
            ("w-4", "g", None),
        )
    )
    gateway.registry.receive_node_report(msgspec.structs.replace(REPORT, processes=processes))
    told = {name: value for name, value in (await _samples(gateway)).items() if "gpus_busy" in name}
    assert told == {'gpufn_function_gpus_busy{function="f",node="n1"}': 1.75}


async def test_the_gpu_use_of_the_workers_of_a_function_is_added_up(gateway: Any) -> None:
    processes = tuple(
        ProcessReport(worker, "f", 2, 7, 0.0, gpu_bytes={"GPU-1": 9, "GPU-elsewhere": 1}) for worker in ("w-1", "w-2")
    )
    gateway.registry.receive_node_report(msgspec.structs.replace(REPORT, processes=processes))
    told = {name: value for name, value in (await _samples(gateway)).items() if "function_gpu_memory" in name}
    assert told == {'gpufn_function_gpu_memory_bytes{function="f",gpu="GPU-1",node="n1"}': 18}


async def test_gpus_are_exposed_to_prometheus(gateway: Any) -> None:
    _report(gateway)
    samples = await _samples(gateway)
    labels = 'gpu="GPU-1",kind="NVIDIA L4",node="n1"'
    told = {
        f"gpufn_gpu_utilisation_ratio{{{labels}}}": 0.5,
        f"gpufn_gpu_memory_used_bytes{{{labels}}}": 2.0**30,
        f"gpufn_gpu_energy_joules_total{{{labels}}}": 5000.0,
        f"gpufn_gpu_rows_pending{{{labels}}}": 0.0,
        f'gpufn_gpu_clock_limited{{by="power",{labels}}}': 1.0,
        f'gpufn_gpu_recovery_action{{action="none",{labels}}}': 1.0,
        f'gpufn_gpu_xid_errors_total{{{labels},xid="13"}}': 2.0,
        f'gpufn_gpu_health{{{labels},state="healthy"}}': 1.0,
        f'gpufn_gpu_health{{{labels},state="degraded"}}': 0.0,
        'DCGM_FI_DEV_GPU_UTIL{Hostname="n1",UUID="GPU-1",gpu="0",modelName="NVIDIA L4"}': 50.0,
        'DCGM_FI_DEV_FB_USED{Hostname="n1",UUID="GPU-1",gpu="0",modelName="NVIDIA L4"}': 1024.0,
        'DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{Hostname="n1",UUID="GPU-1",gpu="0",modelName="NVIDIA L4"}': 5e6,
        'DCGM_FI_DEV_XID_ERRORS{Hostname="n1",UUID="GPU-1",gpu="0",modelName="NVIDIA L4"}': 13.0,
        'gpufn_gpu_health{gpu="GPU-2",kind="NVIDIA L4",node="n1",state="degraded"}': 1.0,
    }
    assert {name: samples.get(name) for name in told} == told
    assert not [
        name for name in samples if name.startswith(("gpufn_gpu_power", "DCGM_FI_DEV_POWER"))
    ]  # unknown is not zero


def test_every_reported_value_of_a_gpu_has_a_metric() -> None:
    told_otherwise = {"uuid", "clock_limits", "recovery_action", "xids", "last_xid", "processes"}
    assert set(FIELDS) == set(DeviceMetrics.__struct_fields__) - told_otherwise


@pytest.mark.parametrize(("text", "means"), [("yes", True), ("1", True), ("False", False), ("", False)])
def test_the_operator_decides_on_sharing_across_domains(text: str, means: bool) -> None:
    assert GatewaySettings.from_env({"GPUFN_SHARE_ACROSS_DOMAINS": text}).share_across_domains is means
    with pytest.raises(InvalidSetting, match="GPUFN_SHARE_ACROSS_DOMAINS='perhaps'"):
        GatewaySettings.from_env({"GPUFN_SHARE_ACROSS_DOMAINS": "perhaps"})
