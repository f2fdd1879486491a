"""The decision whether a build may run beside others: tables of needs and free memory."""

from __future__ import annotations

import pytest

from gpufn_builder.admission import FreeMemory, Need, RunningBuild, estimate, may_start, shortage
from gpufn_core.spec.model_spec import ModelFile, ModelSpec

GIB = 1 << 30
L4 = "NVIDIA L4"


def cpu(need: int, held: int = 0) -> RunningBuild:
    return RunningBuild("cpu", Need(need * GIB), held * GIB)


def gpu(need: int, gpu_need: int) -> RunningBuild:
    return RunningBuild(L4, Need(need * GIB, gpu_need * GIB))


@pytest.mark.parametrize(
    ("need", "running", "free", "admitted"),
    [
        (99, [], 1, True),  # one always runs
        (99, [gpu(9, 9)], 1, True),  # one of each kind
        (4, [cpu(4)], 8, True),
        (5, [cpu(4)], 8, False),  # 4 of the 8 are reserved
        (5, [cpu(4, held=3)], 8, True),  # it holds 3 of them already
        (5, [cpu(4, held=9)], 5, True),  # it holds more than estimated
        (2, [cpu(1), gpu(2, 1)], 4, False),  # host memory is for all kinds
        (1, [cpu(1), gpu(2, 1)], 4, True),
        (99, [cpu(99)], None, True),  # unknown
        (1, [cpu(1)] * 3, 64, True),
        (1, [cpu(1)] * 4, 64, False),  # the limit
        (1, [gpu(1, 1)] * 4, 64, True),  # the first of its kind, despite the limit
    ],
)
def test_builds_share_the_memory_of_the_host(
    need: int, running: list[RunningBuild], free: int | None, admitted: bool
) -> None:
    memory = FreeMemory(None if free is None else free * GIB)
    assert (shortage("cpu", Need(need * GIB), running, memory, 4) == "") is admitted


@pytest.mark.parametrize(
    ("gpu_need", "running", "gpu_free", "admitted"),
    [
        (9, [], 1, True),
        (9, [cpu(1)], 1, True),
        (4, [gpu(1, 4)], 8, True),
        (5, [gpu(1, 4)], 8, False),
        (5, [gpu(1, 4)], None, True),
    ],
)
def test_builds_share_the_memory_of_their_gpu(
    gpu_need: int, running: list[RunningBuild], gpu_free: int | None, admitted: bool
) -> None:
    memory = FreeMemory(64 * GIB, None if gpu_free is None else gpu_free * GIB)
    assert (shortage(L4, Need(GIB, gpu_need * GIB), running, memory, 4) == "") is admitted


@pytest.mark.parametrize(
    ("running", "most", "has"),
    [([], 1, True), ([cpu(1)], 1, False), ([cpu(1)], 2, True), ([gpu(1, 1)], 1, True), ([gpu(1, 1), cpu(1)], 2, False)],
)
def test_a_slot_is_free_below_the_limit_and_for_the_first_build_of_a_kind(
    running: list[RunningBuild], most: int, has: bool
) -> None:
    assert may_start("cpu", running, most) is has


def test_the_need_follows_from_the_size_unless_earlier_builds_showed_it() -> None:
    spec = ModelSpec(parameter="net", files=(ModelFile("m.onnx", "a" * 64, GIB), ModelFile("w.bin", "b" * 64, GIB)))

    def need(on_gpu: bool = False, limit: int = 64, earlier: int | None = None) -> Need:
        return estimate(spec, on_gpu=on_gpu, limit_bytes=limit * GIB, earlier_bytes=earlier and earlier * GIB)

    assert 16 * GIB < need().host_bytes < 17 * GIB
    assert need().gpu_bytes == 0
    assert need(limit=4).host_bytes == 8 * GIB
    assert need(earlier=5).host_bytes == 6 * GIB
    assert need(on_gpu=True).host_bytes > need().host_bytes
    assert 8 * GIB < need(on_gpu=True).gpu_bytes < 9 * GIB
