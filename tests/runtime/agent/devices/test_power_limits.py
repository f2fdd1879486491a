"""Power limits that the agent sets and restores."""

from __future__ import annotations

from pathlib import Path

import pynvml
import pytest

from gpufn_core.domain.devices.device import NodeFacts
from gpufn_runtime.agent.devices.declared import cpu_pool
from gpufn_runtime.agent.devices.nvml import NvmlInventory
from gpufn_runtime.agent.devices.power_limits import PowerLimits, parse_power_limits
from tests.runtime.agent.devices.fake_nvml import FakeGpu, FakeNvml

REFUSED = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)


class Node:
    """A node with GPUs, whose agent can be started, stopped and killed."""

    def __init__(self, folder: Path, *gpus: FakeGpu) -> None:
        self.nvml = FakeNvml(*gpus)
        self.file = folder / "power-limits.json"

    def start(self, setting: str = "") -> NodeFacts:
        self.limits = PowerLimits(self.file, parse_power_limits(setting), self.nvml)
        found = NvmlInventory(cpu_pool("n"), self.nvml).find()
        return self.limits.apply(found.devices[1:], NodeFacts(driver="595"))

    def stop(self) -> None:
        self.limits.restore()


def test_without_the_setting_nothing_is_read_or_changed(tmp_path: Path) -> None:
    node = Node(tmp_path, FakeGpu("GPU-0", power_limit=350_000))
    limits = PowerLimits(node.file, {}, node.nvml)
    facts = limits.apply(NvmlInventory(cpu_pool("n"), FakeNvml(*node.nvml.gpus)).find().devices[1:], NodeFacts())
    limits.restore()
    assert (facts, node.nvml.calls, node.file.exists()) == (NodeFacts(), 0, False)


def test_a_limit_is_set_for_the_time_of_the_agent(tmp_path: Path) -> None:
    gpu = FakeGpu("GPU-0")
    node = Node(tmp_path, gpu)
    facts = node.start("300")
    assert gpu.power_limit == 300_000
    assert facts == NodeFacts(driver="595", power_limits={"GPU-0": 300.0})
    node.stop()
    assert (gpu.power_limit, node.file.exists()) == (400_000, False)


def test_the_limit_is_that_of_the_kind(tmp_path: Path) -> None:
    large, small, other = FakeGpu("GPU-0", "NVIDIA H100"), FakeGpu("GPU-1", "NVIDIA L4"), FakeGpu("GPU-2", "Tesla T4")
    facts = Node(tmp_path, large, small, other).start("H100=350,L4=120")
    assert [gpu.power_limit for gpu in (large, small, other)] == [350_000, 120_000, 400_000]
    assert facts.power_limits == {"GPU-0": 350.0, "GPU-1": 120.0}


def test_the_limit_of_instances_is_that_of_their_gpu(tmp_path: Path) -> None:
    gpu = FakeGpu("GPU-0", is_cut=True)
    gpu.instances = [FakeGpu(f"MIG-{number}", f"{gpu.name} MIG 1g.10gb", multiprocessors=14) for number in range(2)]
    assert Node(tmp_path, gpu).start("A100=300").power_limits == {"GPU-0": 300.0}
    assert gpu.power_limit == 300_000


@pytest.mark.parametrize("setting", ["", "250", "L4=60"])
def test_the_next_agent_restores_the_limit_that_a_killed_one_left(tmp_path: Path, setting: str) -> None:
    gpu = FakeGpu("GPU-0")
    node = Node(tmp_path, gpu)
    node.start("300")
    node.start(setting)
    assert gpu.power_limit == (250_000 if setting == "250" else 400_000)
    node.stop()
    assert (gpu.power_limit, node.file.exists()) == (400_000, False)


def test_a_limit_that_was_changed_meanwhile_stays(tmp_path: Path) -> None:
    gpu = FakeGpu("GPU-0")
    node = Node(tmp_path, gpu)
    node.start("300")
    gpu.power_limit = 220_000
    node.stop()
    assert (gpu.power_limit, node.file.exists()) == (220_000, False)


def test_a_limit_is_never_raised(tmp_path: Path) -> None:
    gpu = FakeGpu("GPU-0", power_limit=200_000)
    node = Node(tmp_path, gpu)
    assert node.start("300").power_limits == {"GPU-0": 200.0}
    node.stop()
    assert gpu.power_limit == 200_000


def test_a_limit_that_the_gpu_does_not_allow_becomes_the_nearest_and_is_noted(tmp_path: Path) -> None:
    gpu = FakeGpu("GPU-0")
    facts = Node(tmp_path, gpu).start("60")
    (notice,) = facts.power_limit_notices
    assert (gpu.power_limit, facts.power_limits) == (100_000, {"GPU-0": 100.0})
    assert notice.startswith("GPU-0: a power limit of 60 W is not possible")


@pytest.mark.parametrize(
    "breaks",
    [
        {"nvmlDeviceSetPowerManagementLimit": REFUSED},
        {"nvmlDeviceGetPowerManagementLimitConstraints": pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)},
        {"nvmlDeviceGetPowerManagementLimit": pynvml.NVMLLibraryMismatchError("the driver is older")},
    ],
)
def test_a_refusal_of_the_driver_is_noted(tmp_path: Path, breaks: dict[str, Exception]) -> None:
    refusing, other = FakeGpu("GPU-0", breaks=breaks), FakeGpu("GPU-1")
    node = Node(tmp_path, refusing, other)
    facts = node.start("300")
    (notice,) = facts.power_limit_notices
    assert notice == f"GPU-0: its power limit cannot be set: {next(iter(breaks.values()))}"
    assert (refusing.power_limit, other.power_limit, facts.power_limits) == (400_000, 300_000, {"GPU-1": 300.0})
    node.stop()
    assert (other.power_limit, node.file.exists()) == (400_000, False)


def test_a_limit_that_cannot_be_restored_is_restored_by_a_later_agent(tmp_path: Path) -> None:
    gpu = FakeGpu("GPU-0")
    node = Node(tmp_path, gpu)
    node.start("300")
    gpu.breaks["nvmlDeviceSetPowerManagementLimit"] = REFUSED
    node.stop()
    (notice,) = node.start("200").power_limit_notices
    assert notice.startswith("GPU-0: its power limit of 300 W cannot be restored")
    node.stop()
    gpu.breaks.clear()
    node.start()
    assert (gpu.power_limit, node.file.exists()) == (400_000, False)


def test_a_limit_that_cannot_be_recorded_is_not_set(tmp_path: Path) -> None:
    gpu = FakeGpu("GPU-0")
    (notice,) = Node(tmp_path / "missing", gpu).start("300").power_limit_notices
    assert (gpu.power_limit, "cannot be recorded" in notice) == (400_000, True)


def test_a_driver_missing_at_the_end_is_no_crash(tmp_path: Path) -> None:
    node = Node(tmp_path, FakeGpu("GPU-0"))
    node.start("300")
    node.nvml.error = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    node.stop()
    assert node.file.exists()
