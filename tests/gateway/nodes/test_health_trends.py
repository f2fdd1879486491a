"""Scores of nodes and GPUs from what happened in the last hour."""

from __future__ import annotations

import pytest

from gpufn_core.domain.devices.device import Device, DeviceType, Health
from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_core.protocol.reports import DeviceReport, FunctionTotals, NodeReport, TotalsReport
from gpufn_gateway.nodes.health_score import GpuTrend, NodeTrend, Score, gpu_score, node_score
from gpufn_gateway.nodes.health_trends import HealthTrends

GPU = Device("GPU-1", DeviceType.GPU, "NVIDIA L4", 24 << 30)


@pytest.mark.parametrize(
    ("trend", "value", "drain"),
    [
        (GpuTrend(), 1.0, False),
        (GpuTrend(ecc_corrected=999, pcie_replays=99, limited=0.05), 1.0, False),
        (GpuTrend(ecc_corrected=1_000), 0.8, False),
        (GpuTrend(ecc_uncorrected=1), 0.5, False),
        (GpuTrend(ecc_uncorrected=1, rows_pending=True), 0.3, True),
        (GpuTrend(xids=2), 0.8, False),
        (GpuTrend(xids=100), 0.5, False),
        (GpuTrend(limited=1.0), 0.7, False),
        (GpuTrend(Health.DEGRADED, "it is hot", limited=0.5), 0.35, True),
        (GpuTrend(Health.FAILED, "Xid 79", ecc_uncorrected=1), 0.0, True),
    ],
)
def test_each_sign_lowers_the_score_of_a_gpu(trend: GpuTrend, value: float, drain: bool) -> None:
    score = gpu_score(trend)
    assert (score.value, score.drain, bool(score.reasons)) == (value, drain, value < 1)


@pytest.mark.parametrize(
    ("trend", "gpus", "value"),
    [
        (NodeTrend(), [], 1.0),
        (NodeTrend(starts=0, failed_starts=4, failing=4), [], 1.0),  # too few for a trend
        (NodeTrend(starts=5, failed_starts=5, failing=3), [], 0.5),
        (NodeTrend(starts=0, failed_starts=50, failing=2), [], 1.0),  # the fault of their code
        (NodeTrend(attempts=100, retries=9, retrying=5), [], 1.0),
        (NodeTrend(attempts=100, retries=30, retrying=3), [], 0.7),
        (NodeTrend(attempts=100, retries=90, retrying=1), [], 1.0),
        (NodeTrend(), [Score(1.0), Score(0.0, ("failed",), True)], 0.5),
        (NodeTrend(), [Score(1.0), Score(0.8, ("warm",))], 1.0),
    ],
)
def test_a_node_is_judged_by_its_starts_retries_and_gpus(trend: NodeTrend, gpus: list[Score], value: float) -> None:
    assert node_score(trend, gpus).value == value


def _sampled(trends: HealthTrends, now: float, **metrics: object) -> None:
    trends.add_devices(DeviceReport("n", 0.0, (DeviceMetrics(uuid="GPU-1", **metrics),)), now)  # type: ignore[arg-type]


def test_only_errors_of_the_last_hour_count_and_those_before_the_first_sample_do_not() -> None:
    trends = HealthTrends()
    _sampled(trends, 0.0, ecc_uncorrected=7)
    assert trends.of_gpu("n", GPU).value == 1.0
    for minute in range(1, 5):
        _sampled(trends, 60.0 * minute, ecc_uncorrected=8)
    assert trends.of_gpu("n", GPU).reasons == ("1 uncorrected memory error",)
    for minute in range(5, 120):
        _sampled(trends, 60.0 * minute, ecc_uncorrected=8)
    assert trends.of_gpu("n", GPU).value == 1.0


def test_a_counter_that_starts_at_zero_again_counts_on() -> None:
    trends = HealthTrends()
    for minute, count in enumerate((5, 6, 0, 2)):
        _sampled(trends, 60.0 * minute, ecc_uncorrected=count)
    assert trends.of_gpu("n", GPU).reasons == ("3 uncorrected memory errors",)


def test_heat_counts_by_its_share_of_the_time() -> None:
    trends = HealthTrends()
    for second in range(100):
        _sampled(trends, float(second), clock_limits=("hardware_thermal",) if second < 40 else ("idle",))
    assert trends.of_gpu("n", GPU).value == 0.8


def test_failing_starts_of_several_functions_are_the_fault_of_their_node() -> None:
    trends = HealthTrends()
    for second, failed in ((0, 3), (30, 4), (90, 6)):
        totals = [FunctionTotals(name, failed_starts=failed) for name in "fgh"]
        trends.add_totals(TotalsReport("n", "r", 0.0, 0.0, (*totals, FunctionTotals("fine", starts=2))), float(second))
    score = trends.of_node(NodeReport("n", 0.0, (GPU,)))
    assert (score.value, score.reasons) == (0.4, ("9 of 9 starts failed, of 3 functions",))
    assert trends.of_node(NodeReport("unknown", 0.0, ())).value == 1.0


def test_failures_older_than_an_hour_or_of_an_earlier_runner_are_forgotten() -> None:
    trends = HealthTrends()
    report = NodeReport("n", 0.0, ())
    for minute in range(150):
        failed = min(minute, 10)
        totals = tuple(FunctionTotals(name, failed_starts=failed) for name in "fgh")
        trends.add_totals(TotalsReport("n", "r", 0.0, 0.0, totals), minute * 60.0)
        if minute == 20:
            assert trends.of_node(report).drain
    assert trends.of_node(report).value == 1.0
    trends.add_totals(TotalsReport("n", "next", 0.0, 0.0, ()), 151 * 60.0)
    assert trends.of_node(report).value == 1.0
