"""The figures that a gateway collects in ten seconds, and the events that it records."""

from __future__ import annotations

from typing import Any

import msgspec

from gpufn_core.domain.devices.device import Device, DeviceShare, DeviceType, Health
from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_core.domain.revision import Function
from gpufn_core.domain.traffic import Returned, Split
from gpufn_core.domain.worker import ColdStart, Exit, ParkedMemory
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.reports import (
    FunctionStatus,
    NodeReport,
    ProcessReport,
    RevisionTraffic,
    RunnerReport,
    Waiting,
    WaitReason,
    WorkerCounts,
    WorkerEvent,
    WorkerEventKind,
)
from gpufn_gateway.history.changes import Changes
from gpufn_gateway.history.collector import OVERVIEW, Collector, with_overview
from gpufn_gateway.history.fields import Field

_GPU = Device("GPU-1", DeviceType.GPU, "NVIDIA L4", 24 << 30)
_SHARE = DeviceShare("cpu-1", 2.0, 1 << 30, gpus=("GPU-1",))


def report(*traffic: RevisionTraffic, runner: str = "r") -> RunnerReport:
    return RunnerReport("a", runner, 0.0, traffic=traffic)


def node(*devices: Device, processes: tuple[ProcessReport, ...] = ()) -> NodeReport:
    return NodeReport("a", 0.0, devices, processes=processes)


def status(name: str, wanted: int = 0, **fields: object) -> FunctionStatus:
    plain = FunctionStatus(function=name, serving=1, workers=WorkerCounts(), wanted=wanted)
    return msgspec.structs.replace(plain, **fields)


def function(name: str, active: int) -> Function:
    return Function(name=name, active=active, serving=active, latest=active, updated_at=0.0)


def test_calls_count_from_the_first_report_on_and_a_reset_counter_starts_at_zero() -> None:
    collector = Collector()
    collector.on_runner_report(report(RevisionTraffic("f", 1, 90, 90, 9, 90.0, 45.0)))  # before this gateway started
    assert collector.take() == {}
    collector.on_runner_report(report(RevisionTraffic("f", 1, 92, 92, 10, 93.0, 46.0), RevisionTraffic("f", 2, 1, 1)))
    collector.on_runner_report(report(RevisionTraffic("f", 1, 3, 3, 0, 1.0, 0.5)))
    points = collector.take()
    assert points["function:f"] == {Field.CALLS: 6, Field.FAILED: 1, Field.RUN_MS: 4000, Field.GPU_MS: 1500}
    assert (points["function:f@1"][Field.CALLS], points["function:f@2"][Field.CALLS]) == (5, 1)
    collector.on_runner_report(report(RevisionTraffic("f", 1, 500, 500), runner="its successor"))
    assert collector.take() == {}


def test_gathered_calls_count_by_the_size_of_their_batch() -> None:
    collector = Collector()
    collector.on_runner_report(report(RevisionTraffic("f", 1, 9, 9, batches={1: 9})))
    collector.on_runner_report(report(RevisionTraffic("f", 1, 15, 15, batches={1: 11, 4: 4})))
    points = collector.take()
    assert points["function:f"][Field.BATCHES] == points["function:f@1"][Field.BATCHES] == {1: 2, 4: 4}


def test_a_sample_counts_seconds_of_workers_of_held_gpus_and_of_waiting() -> None:
    collector = Collector()
    process = ProcessReport("w", "f", 1, 1, 0.0, 200 << 20, _SHARE, gpus_busy=0.5, gpu_bytes={"GPU-1": 300 << 20})
    waiting = Waiting(WaitReason.NO_CAPACITY, "no room")
    statuses = [status("f", workers=WorkerCounts(ready=2), queued=3, waiting=waiting), status("idle")]
    metrics = DeviceMetrics(uuid="GPU-1", power_w=70.4, utilisation=0.25, temperature_c=60)
    for _ in range(2):
        collector.sample(statuses, [node(_GPU, processes=(process,))], lambda name: [metrics], 1)
    points = with_overview(collector.take(), 2)
    assert "function:idle" not in points
    function = points["function:f"]
    assert [function[field] for field in (Field.READY, Field.QUEUED, Field.QUEUED_MAX)] == [4, 6, 3]
    assert (function[Field.GPU_HELD_MS], function[Field.GPU_BUSY_MS]) == (2000, 1000)
    assert function[Field.WAITING] == {"no_capacity": 2}
    gpu = points["gpu:GPU-1"]
    assert (gpu[Field.POWER_W], gpu[Field.TEMPERATURE_MAX_C], gpu[Field.MEASURED]) == (140, 60, 2)
    overview = points[OVERVIEW]
    assert (overview[Field.SECONDS], overview[Field.READY], overview[Field.GPUS], overview[Field.POWER_W]) == (
        2,
        4,
        2,
        140,
    )


def test_a_parked_worker_holds_no_gpu() -> None:
    collector = Collector()
    parked = ProcessReport("w", "f", 1, 1, 0.0, share=_SHARE, parked=ParkedMemory(1))
    collector.sample([], [node(_GPU, processes=(parked,))], lambda name: [], 1)
    assert Field.GPU_HELD_MS not in collector.take().get("function:f", {})


def test_starts_have_their_phases() -> None:
    collector = Collector()
    ready = WorkerEvent(WorkerEventKind.READY, "w", "f", 1, "a", 0.0, cold_start=ColdStart(0.5, 0.0, 1.0, 2.0, 0.0))
    collector.on_worker_event(ready)
    point = collector.take()["function:f"]
    assert point[Field.STARTS] == 1
    assert point[Field.START_PHASE_MS] == {"place": 500, "fetch": 0, "launch": 1000, "load": 2000, "warm": 0}


def test_deploys_rollbacks_and_deletions_are_marks_and_the_first_look_is_none() -> None:
    changes = Changes()
    for functions in ({"f": 1}, {"f": 1}, {"f": 2, "g": 1}, {"f": 1, "g": 1}, {"f": 1}):
        changes.on_functions({name: function(name, active) for name, active in functions.items()}, 5.0)
    events = {(event.kind.value, event.subject, event.revision) for event in changes.take()}
    assert events == {
        ("deploy", "function:f", 2),
        ("deploy", "function:g", 1),
        ("rollback", "function:f", 1),
        ("delete", "function:g", None),
    }


def test_splits_and_their_returns_are_marks() -> None:
    changes = Changes()
    split = Split(weights={1: 90, 2: 10}, set_at=1.0)
    returned = Returned(at=3.0, reason="errors>2%: 5.0% of 120 calls failed", revision=2, weights="1=90, 2=10")
    plain = function("f", 1)
    for change in ({}, {"traffic": split}, {"traffic": split}, {"returned": returned}, {}):
        changes.on_functions({"f": msgspec.structs.replace(plain, **change)}, 5.0)
    events = [(event.kind.value, event.text.partition(":")[0], event.revision) for event in changes.take()]
    assert events == [("traffic", "calls are split", 1), ("traffic", "the split 1=90, 2=10 was undone", 2)]


def test_scale_decisions_of_ten_seconds_are_one_mark_and_none_if_they_end_where_they_began() -> None:
    changes = Changes()
    for wanted in ((1, 1), (4, 2), (7, 1)):
        changes.on_statuses([status("f", wanted[0]), status("flaps", wanted[1])], 5.0)
    changes.end_slot(9.0)
    (event,) = changes.take()
    assert (event.kind.value, event.subject, event.details) == ("scale", "function:f", {"from": 1, "to": 7})


def scaled(before: int, *reports: FunctionStatus) -> str:
    changes = Changes()
    changes.on_statuses([status("f", before)], 1.0)
    for report in reports:
        changes.on_statuses([report], 2.0)
    changes.end_slot(9.0)
    return changes.take()[0].text


def test_a_scale_decision_says_what_is_wanted_and_what_was_placed() -> None:
    up: Any = {"wanted": 2, "reason": "2 queued, 0 running: 2 workers (max_workers)"}
    no_room = Waiting(WaitReason.NO_CAPACITY, "no node has a GPU; held by other/f (1 worker)")
    started = WorkerCounts(starting=1)
    texts = [
        scaled(0, status("f", **up), status("f", **up, waiting=no_room)),
        scaled(0, status("f", **up), status("f", **up, workers=started, waiting=no_room)),
        scaled(0, status("f", **up, workers=WorkerCounts(ready=1, starting=1))),
        scaled(0, status("f", 1, reason="no calls: 1 worker (min_workers)")),
        scaled(1, status("f", 0, reason="no calls: no workers")),
    ]
    assert texts == [
        "wants 2 workers, 0 before: 2 queued, 0 running (max_workers); none placed: no node has a GPU",
        "wants 2 workers, 0 before: 2 queued, 0 running (max_workers); 1 placed: no node has a GPU",
        "wants 2 workers, 0 before: 2 queued, 0 running (max_workers)",
        "wants 1 worker, 0 before: no calls (min_workers); none placed",
        "wants no workers, 1 before: no calls",
    ]


def test_faults_quarantines_and_lost_nodes_are_marks() -> None:
    changes = Changes()
    sick = msgspec.structs.replace(_GPU, health=Health.FAILED, health_reason="XID 79")
    for devices, now in ((_GPU, 1.0), (sick, 2.0), (_GPU, 3.0)):
        changes.on_nodes([node(devices)], now, is_settled=False)
    changes.on_nodes([], 9.0, is_settled=True)
    changes.on_nodes([], 10.0, is_settled=True)
    changes.on_nodes([node(_GPU)], 11.0, is_settled=True)
    failing = status("f", start_error=ErrorInfo("worker_crashed", "no module x"))
    changes.on_statuses([failing], 12.0)
    changes.on_statuses([failing], 13.0)
    for ended in (Exit(code=0), Exit(signal=9, killed_for="it stops"), Exit(signal=11)):
        changes.on_worker_event(WorkerEvent(WorkerEventKind.EXITED, "w", "f", 1, "a", 14.0, exit=ended))
    kinds = [event.kind.value for event in changes.take()]
    assert kinds == ["quarantine", "recovery", "node_lost", "node_up", "fault", "fault"]
