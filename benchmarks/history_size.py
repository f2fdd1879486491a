"""Cost of the history: CPU time per second of the sampler and the store, and the size of the stream and of the copy.

    python benchmarks/history_size.py [--functions 200] [--busy 1.0]

`busy` is the part of the functions that have a worker and calls in any ten seconds. The benchmark makes the reports;
points, messages and file are as in a gateway. NATS compresses the stream further (s2), which is not counted.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gpufn_core.domain.devices.device import Device, DeviceShare, DeviceType
from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_core.protocol.reports import (
    FunctionStatus,
    NodeReport,
    ProcessReport,
    RevisionTraffic,
    RunnerReport,
    WorkerCounts,
)
from gpufn_gateway.history.blocks import HOUR, MINUTE, SECONDS_10, encode_blocks, subject_of
from gpufn_gateway.history.collector import Collector, function_subject, revision_subject, with_overview
from gpufn_gateway.history.durations import bucket_of
from gpufn_gateway.history.fields import Field, Point, Points, add_count, merge_points
from gpufn_gateway.history.index import Index
from gpufn_gateway.history.revisions import collapse, expand
from gpufn_platform.bus.storage.ordered_reader import StoredMessage

_NODES, _GPUS = 4, 4
_CALLS_PER_S = 2
_NOTHING = {"encode": 0.0, "store": 0.0}
_SLOTS = {SECONDS_10: 720, MINUTE: 2_880, HOUR: 720}


class Fleet:
    def __init__(self, functions: int, busy: float) -> None:
        self.random = random.Random(1)
        self.functions = [f"prod/app-{number // 10}/function-{number}" for number in range(functions)]
        self.busy = busy
        self.ended = dict.fromkeys(self.functions, 0)
        self.active = self.functions
        self.typical_s = {name: self.random.lognormvariate(-2.5, 1.2) for name in self.functions}

    def begin_slot(self) -> None:
        self.active = [name for name in self.functions if self.random.random() < self.busy]

    def statuses(self) -> list[FunctionStatus]:
        active = set(self.active)
        return [
            FunctionStatus(
                function=name,
                serving=3,
                workers=WorkerCounts(ready=int(name in active)),
                queued=self.random.randrange(3) if name in active else 0,
                running=int(name in active),
                wanted=int(name in active),
            )
            for name in self.functions
        ]

    def nodes(self) -> list[NodeReport]:
        return [
            NodeReport(
                f"node-{number}",
                0.0,
                (
                    Device(f"cpu-{number}", DeviceType.CPU, "cpu", 1 << 38, 64.0),
                    *(Device(f"GPU-{number}-{gpu}", DeviceType.GPU, "NVIDIA L4", 24 << 30) for gpu in range(_GPUS)),
                ),
                processes=tuple(self._process(name, number) for name in self.active[number::_NODES]),
            )
            for number in range(_NODES)
        ]

    def _process(self, name: str, number: int) -> ProcessReport:
        share = DeviceShare(f"cpu-{number}", 1.0, 1 << 30, gpus=(f"GPU-{number}-0",))
        memory = self.random.randrange(1 << 28, 1 << 32)
        return ProcessReport(
            f"w-{name}", name, 3, 1, 0.0, memory, share, gpus_busy=0.4, gpu_bytes={f"GPU-{number}-0": memory}
        )

    def metrics(self, node: str) -> list[DeviceMetrics]:
        number = node.rpartition("-")[2]
        return [
            DeviceMetrics(
                uuid=f"GPU-{number}-{gpu}",
                utilisation=self.random.random(),
                power_w=self.random.uniform(30, 72),
                temperature_c=self.random.randrange(40, 80),
                memory_used_bytes=self.random.randrange(24 << 30),
            )
            for gpu in range(_GPUS)
        ]

    def runner_reports(self) -> list[RunnerReport]:
        for name in self.active:
            self.ended[name] += _CALLS_PER_S
        return [
            RunnerReport(
                f"node-{number}",
                "r",
                0.0,
                traffic=tuple(
                    RevisionTraffic(name, 3, ended, ended, ended // 50, ended * 0.1, ended * 0.08)
                    for name, ended in list(self.ended.items())[number::_NODES]
                ),
            )
            for number in range(_NODES)
        ]

    def calls(self) -> Points:
        points: Points = {}
        for name in self.active:
            point: Point = {}
            for _ in range(_CALLS_PER_S * 10):
                latency_s = self.typical_s[name] * self.random.lognormvariate(0.0, 0.4)
                add_count(point, Field.LATENCY, bucket_of(latency_s))
                add_count(point, Field.QUEUE_TIME, bucket_of(self.random.lognormvariate(-7, 0.7)))
            points[revision_subject(name, 3)] = point
            merge_points(points, {function_subject(name): point})
        return points


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--functions", type=int, default=200)
    options.add_argument("--busy", type=float, default=1.0)
    arguments = options.parse_args()
    fleet, collector = Fleet(arguments.functions, arguments.busy), Collector()
    sizes = dict.fromkeys(_SLOTS, 0)
    spent = {"sample": 0.0, "encode": 0.0, "store": 0.0}
    now = time.time()
    with tempfile.TemporaryDirectory() as folder:
        index = Index(Path(folder))
        index.open("s")
        sequence = iter(range(1, 1 << 30))
        minute: Points = {}
        for number in range(_SLOTS[SECONDS_10]):
            points = _slot(fleet, collector, spent)
            merge_points(minute, expand(points)) if number < 6 else None
            slot = (int(now) - 7200) // SECONDS_10 + number
            sizes[SECONDS_10] += _store(index, (SECONDS_10, slot), points, sequence, spent)
        print(f"CPU of the sampler: {spent['sample'] / _SLOTS[SECONDS_10] / 10:.3%} of a core")
        print(f"CPU of encoding ten seconds (the leader): {spent['encode'] / _SLOTS[SECONDS_10] / 10:.3%} of a core")
        print(f"CPU of the copy (each gateway): {spent['store'] / _SLOTS[SECONDS_10] / 10:.3%} of a core")
        started = time.process_time()
        for resolution in (MINUTE, HOUR):
            for number in range(_SLOTS[resolution]):
                slot = int(now) // resolution - _SLOTS[resolution] + number
                sizes[resolution] += _store(index, (resolution, slot), collapse(minute), sequence, dict(_NOTHING))
        print(f"CPU of reading two days and thirty days anew: {time.process_time() - started:.1f} s")
        for resolution, size in sizes.items():
            print(f"stream, {resolution:>4} s: {size / 2**20:6.1f} MiB in {_SLOTS[resolution]:,} messages")
        print(f"stream, all   : {sum(sizes.values()) / 2**20:6.1f} MiB")
        print(f"copy, before pruning: {index.used_bytes() / 2**20:.1f} MiB")
        started = time.process_time()
        index.prune(now)
        print(f"copy, after pruning:  {index.used_bytes() / 2**20:.1f} MiB ({time.process_time() - started:.1f} s)")
        for resolution in _SLOTS:
            first = index.first_slot(resolution)
            print(
                f"  points of {resolution} s go back {0 if first is None else (now - first * resolution) / 3600:.1f} h"
            )
        names = [function_subject(fleet.functions[0])]
        for resolution, hours in ((SECONDS_10, 2), (MINUTE, 24), (HOUR, 720)):
            started = time.perf_counter()
            found = index.read(resolution, int(now - hours * 3600) // resolution, int(now) // resolution, names)
            print(f"query of {len(found)} points of {resolution} s: {(time.perf_counter() - started) * 1000:.1f} ms")
        index.close()


def _slot(fleet: Fleet, collector: Collector, spent: dict[str, float]) -> Points:
    fleet.begin_slot()
    nodes, statuses = fleet.nodes(), fleet.statuses()
    for _ in range(10):
        reports = fleet.runner_reports()
        started = time.process_time()
        for report in reports:
            collector.on_runner_report(report)
        collector.sample(statuses, nodes, fleet.metrics, 1)
        spent["sample"] += time.process_time() - started
    collector.add(fleet.calls())
    return with_overview(collector.take(), 10)


def _store(
    index: Index, span: tuple[int, int], points: Points, sequence: Iterator[int], spent: dict[str, float]
) -> int:
    started = time.process_time()
    payloads = list(encode_blocks(*span, "gw", points))
    encoded = time.process_time()
    messages = [StoredMessage(subject_of(span[0]), next(sequence), payload, {}, 0.0) for payload in payloads]
    index.apply(messages)
    spent["encode"] += encoded - started
    spent["store"] += time.process_time() - encoded
    return sum(map(len, payloads))


if __name__ == "__main__":
    main()
