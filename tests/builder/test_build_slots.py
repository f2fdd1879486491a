"""Slots of builds: reservations, and estimates from earlier builds."""

from __future__ import annotations

from pathlib import Path

from gpufn_builder.build_slots import BuildSlots, free_gpu_memory
from gpufn_builder.identity import Target
from gpufn_builder.memory_history import MemoryHistory
from gpufn_core.domain.devices.device import Device, DeviceType
from gpufn_core.domain.devices.engine import Build
from gpufn_core.protocol.reports import NodeReport, ProcessReport
from gpufn_core.spec.model_spec import ModelFile, ModelSpec
from tests.builder import bench

GIB = 1 << 30
CPU, L4 = Target("cpu", ""), Target("NVIDIA L4", "8.9", "GPU-1")


def _slots(folder: Path, available_bytes: int, most: int = 4) -> BuildSlots:
    history = MemoryHistory(folder / "caches" / "memory.json")
    return BuildSlots(most=most, limit_bytes=64 * GIB, history=history, available=lambda: available_bytes)


def _build(name: str, device: str = "cpu") -> Build:
    return bench.build_of(ModelSpec(parameter="net", files=(ModelFile("m.onnx", name * 64, GIB),)), device)


def test_a_build_reserves_memory_until_its_slot_is_closed(tmp_path: Path) -> None:
    slots = _slots(tmp_path, 12 * GIB)
    first = slots.admit(_build("a"), CPU)
    assert first is not None
    assert slots.admit(_build("b"), CPU) is None
    with first:
        first.set_held(8 * GIB)  # nearly all that it needs
        second = slots.admit(_build("b"), CPU)
        assert second is not None
    with second:
        assert slots.has_slot("cpu")


def test_the_number_of_builds_is_limited(tmp_path: Path) -> None:
    slots = _slots(tmp_path, 640 * GIB, most=1)
    slot = slots.admit(_build("a"), CPU)
    assert slot is not None
    with slot:
        assert not slots.has_slot("cpu")
        assert slots.has_slot(L4.kind)
        assert slots.admit(_build("b"), CPU) is None
    assert slots.has_slot("cpu")


def test_the_memory_of_a_build_is_the_estimate_for_the_next_even_after_a_restart(tmp_path: Path) -> None:
    slots = _slots(tmp_path, 12 * GIB)
    slot = slots.admit(_build("a"), CPU)
    assert slot is not None
    with slot:
        for held in (GIB, 2 * GIB, GIB):
            slot.set_held(held)
        slot.has_succeeded = True
    again = _slots(tmp_path, 12 * GIB).admit(_build("a"), CPU)
    assert again is not None
    assert slot.need.host_bytes > 8 * GIB
    assert 2 * GIB < again.need.host_bytes < 3 * GIB
    assert MemoryHistory(tmp_path / "caches" / "memory.json").get(_build("a", "NVIDIA L4")) is None


def test_a_build_that_ended_early_does_not_change_the_estimate(tmp_path: Path) -> None:
    """Regression: after a build that was cancelled at 30 MiB, the estimate for a model of 2 GiB was 36 MiB."""
    slots = _slots(tmp_path, 12 * GIB)
    slot = slots.admit(_build("a"), CPU)
    assert slot is not None
    with slot:
        slot.set_held(30 << 20)
    again = slots.admit(_build("a"), CPU)
    assert again is not None
    assert again.need == slot.need


def test_a_damaged_history_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "memory.json").write_text("{")
    assert MemoryHistory(tmp_path / "memory.json").get(_build("a")) is None


def test_gpu_builds_share_the_memory_that_workers_and_others_do_not_hold(tmp_path: Path) -> None:
    gpu = Device("GPU-1", DeviceType.GPU, "NVIDIA L4", 24 * GIB, foreign_bytes=2 * GIB)
    worker = ProcessReport("w", "f", 1, 9, 0.0, gpu_bytes={"GPU-1": 6 * GIB, "GPU-2": GIB})
    report = NodeReport("n", 0.0, (gpu,), processes=(worker,))
    assert free_gpu_memory(report) == {"GPU-1": 16 * GIB}
    slots = _slots(tmp_path, 640 * GIB)
    slots.on_report(report)
    admitted = [slots.admit(_build(name, L4.kind), L4) is not None for name in "abc"]
    assert admitted == [True, True, False]  # each needs 6.5 GiB
