"""The order of the engines of a build: a table of latencies."""

from __future__ import annotations

import pytest

from gpufn_builder.backend_choice import ranked
from gpufn_core.domain.devices.engine import Backend, Latency

TRT, CUDA, CPU = Backend.TENSORRT, Backend.ORT_CUDA, Backend.ORT_CPU


def _latency(milliseconds: float | None, *, settled: bool = True) -> Latency | None:
    if milliseconds is None:
        return None
    seconds = milliseconds / 1e3
    return Latency(seconds, seconds, seconds, 1 / seconds, settled)


@pytest.mark.parametrize(
    ("milliseconds", "order"),
    [
        ({}, ()),
        ({CPU: 5}, (CPU,)),
        ({TRT: 1, CUDA: 2, CPU: 5}, (TRT, CUDA, CPU)),
        ({TRT: 2, CUDA: 1}, (CUDA, TRT)),
        ({TRT: 2, CUDA: 1, CPU: 5}, (CUDA, TRT, CPU)),
        ({TRT: 2, CUDA: 1.81}, (TRT, CUDA)),  # within the margin
        ({TRT: 2, CUDA: 1.79}, (CUDA, TRT)),
        ({TRT: 2, CUDA: 3, CPU: 0.1}, (TRT, CUDA, CPU)),  # the CPU is a substitute
        ({CUDA: 3, CPU: 0.1}, (CUDA, CPU)),
        ({TRT: None, CUDA: 1}, (TRT, CUDA)),
        ({TRT: 2, CUDA: None}, (TRT, CUDA)),
    ],
)
def test_a_faster_engine_is_preferred_beyond_the_margin(
    milliseconds: dict[Backend, float | None], order: tuple[Backend, ...]
) -> None:
    assert ranked({backend: _latency(each) for backend, each in milliseconds.items()}) == order


@pytest.mark.parametrize(("trt_settled", "cuda_settled"), [(False, True), (True, False), (False, False)])
def test_timings_that_did_not_settle_change_no_order(trt_settled: bool, cuda_settled: bool) -> None:
    latencies = {TRT: _latency(9, settled=trt_settled), CUDA: _latency(1, settled=cuda_settled)}
    assert ranked(latencies) == (TRT, CUDA)
