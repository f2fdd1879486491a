"""The energy of GPUs, divided among the calls that ran on them."""

from __future__ import annotations

from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_runtime.runner.core.attempt import Attempt
from gpufn_runtime.runner.gpu.call_energy import CallEnergy
from tests.runtime.runner.core.bench import Bench, FakeWorker


class Gpus:
    """Energy counters of GPUs, and functions with calls on them."""

    def __init__(self) -> None:
        self.energy = CallEnergy()
        self.counters: dict[str, float | None] = {"A": 1000.0, "B": 5000.0}
        self.benches: list[Bench] = []
        self.now = 0.0

    def worker(self, *gpus: str, part: float = 1.0) -> Bench:
        bench = Bench(concurrency=2)
        self.now = bench.monotonic
        bench.worker(gpus=gpus, gpus_charged=part * len(gpus))
        self.benches.append(bench)
        return bench

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for bench in self.benches:
            bench.wait(seconds)

    def end(self, bench: Bench, attempt: Attempt, run_s: float = 9.0) -> None:
        bench.result(attempt, run_s=run_s)
        self.energy.end(attempt, self.now)

    def sample(self, **spent: float | None) -> dict[str, float]:
        """Let the GPUs use energy; return the joules of the calls that have ended, by call."""
        for gpu, joules in spent.items():
            before = self.counters[gpu]
            self.counters[gpu] = None if joules is None or before is None else before + joules
        metrics = [DeviceMetrics(uuid=uuid, energy_joules=joules) for uuid, joules in self.counters.items()]
        workers: list[FakeWorker] = [worker for bench in self.benches for worker in bench.capacity.workers.values()]
        running = [attempt for worker in workers if worker.gpus for attempt in worker.attempts.values()]
        return {message.id: joules for message, joules in self.energy.on_sample(metrics, running, self.now)}


def test_a_call_that_runs_alone_gets_all_energy_of_each_of_its_gpus() -> None:
    gpus = Gpus()
    bench = gpus.worker("A", "B")
    gpus.sample()
    call = bench.start()
    gpus.wait(1.0)
    assert gpus.sample(A=300.0, B=200.0) == {}
    gpus.wait(0.5)
    gpus.end(bench, call)
    assert gpus.sample(A=100.0, B=50.0) == {call.message.id: 650.0}
    assert gpus.sample(A=60.0) == {}  # no call runs


def test_calls_on_one_gpu_get_parts_in_proportion_to_their_gpu_seconds() -> None:
    gpus = Gpus()
    large, small = gpus.worker("A", part=0.75), gpus.worker("A", part=0.25)
    gpus.sample()
    first, second = large.start(), small.start()
    gpus.wait(1.0)
    gpus.sample(A=400.0)  # 300 and 100
    gpus.end(large, first)
    gpus.wait(1.0)
    gpus.end(small, second)
    assert gpus.sample(A=80.0) == {first.message.id: 300.0, second.message.id: 180.0}


def test_concurrent_calls_of_one_worker_share_its_energy() -> None:
    gpus = Gpus()
    bench = gpus.worker("A")
    gpus.sample()
    calls = [bench.start(), bench.start()]
    gpus.wait(1.0)
    for call in calls:
        gpus.end(bench, call)
    assert list(gpus.sample(A=300.0).values()) == [150.0, 150.0]


def test_the_energy_of_a_call_is_unknown_unless_all_of_it_is_known() -> None:
    gpus = Gpus()
    bench = gpus.worker("A")
    early = bench.start()
    gpus.wait(1.0)
    gpus.sample()  # the first
    gpus.wait(1.0)
    gpus.end(bench, early)
    assert gpus.sample(A=300.0) == {}
    reset = bench.start()
    gpus.wait(1.0)
    gpus.sample(A=-1000.0)
    gpus.wait(1.0)
    gpus.end(bench, reset)
    assert gpus.sample(A=300.0) == {}
    silent = bench.start()
    gpus.wait(1.0)
    gpus.end(bench, silent)
    assert gpus.sample(A=None) == {}


def test_the_next_sample_includes_the_energy_of_a_lost_one() -> None:
    gpus = Gpus()
    bench = gpus.worker("A")
    gpus.sample()
    call = bench.start()
    gpus.wait(3.0)
    gpus.end(bench, call)
    assert gpus.sample(A=900.0) == {call.message.id: 900.0}


def test_ended_calls_do_not_pile_up_without_samples() -> None:
    gpus = Gpus()
    bench = gpus.worker("A")
    gpus.sample()
    calls = [bench.start(), bench.start()]
    for call in calls:
        gpus.wait(8.0)
        gpus.end(bench, call, run_s=99.0)
    assert gpus.sample(A=1.0) == {}
    late = bench.start()
    gpus.wait(1.0)
    gpus.end(bench, late)
    assert gpus.sample(A=300.0) == {late.message.id: 300.0}


def test_calls_without_a_gpu_have_no_energy() -> None:
    gpus = Gpus()
    bench = gpus.worker()
    gpus.sample()
    call = bench.start()
    gpus.wait(1.0)
    gpus.end(bench, call)
    assert gpus.sample(A=300.0) == {}
