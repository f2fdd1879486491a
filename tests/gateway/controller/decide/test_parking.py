"""Parking and resuming, step by step and in a simulation."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufn_core.domain.devices.device import DeviceShare, Share
from gpufn_core.domain.revision import Function
from gpufn_core.domain.worker import Assignment, ColdStart, Desired, Exit, ParkedMemory, StartFailure, WorkerState
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.reports import ProcessReport, RunnerReport, WorkerEvent, WorkerEventKind, WorkerReport
from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.decide.actions import Action, Drain, Park, Resume, RevisionDecision, Start
from gpufn_gateway.controller.decide.plan import plan
from gpufn_gateway.controller.decide.room.scale_down import Removals
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.node_choice import Placement, can_resume
from gpufn_gateway.controller.state.leases import GpuUse, LeaseBook
from gpufn_gateway.controller.state.world import World
from tests.gateway.controller.known_worlds import place, why_no_room
from tests.gateway.controller.simulation import GIB, Sim, cpu, function, gpu, node, revision

PARKS = ScalingPolicy(idle_timeout_s=10, park_timeout_s=100, max_workers=2)
HELD = ParkedMemory(GIB, 300 << 20)
ON_A_GPU = DeviceShare("cpu", 0.1, GIB, gpus=("GPU-0",))


class Scene:
    """A node "a" with a GPU and memory for parked workers, and the reports of its agent and runner."""

    def __init__(self, *functions: str, park_bytes: int = 4 * GIB, scaling: ScalingPolicy = PARKS) -> None:
        self.now = 100.0
        self.world = World(self.now)
        self.park_bytes = park_bytes
        self.states: dict[str, WorkerState] = {}
        self.idle_since: dict[str, float] = {}
        self.held: dict[str, ParkedMemory] = {}
        self.on_gpu: dict[str, int] = {}  # bytes of GPU memory by worker, as the agent measures them
        for name in functions:
            self.world.on_revision((name, 1), revision(name, 1, scaling, Resources(gpu=("any",))))
            self.world.on_function(name, function(name))
        self.tell()

    def add(
        self, worker: str, name: str, state: WorkerState = WorkerState.READY, share: DeviceShare = ON_A_GPU
    ) -> None:
        made = Assignment(worker=worker, node="a", function=name, revision=1, share=share, epoch=1, created_at=0.0)
        self.world.on_assignment(worker, made, self.now)
        self.states[worker], self.idle_since[worker] = state, self.now
        self.tell()

    def tell(self) -> None:
        processes = tuple(
            ProcessReport(
                worker,
                *self.world.workers[worker].key,
                1,
                0.0,
                parked=self.held.get(worker),
                gpu_bytes={"GPU-0": self.on_gpu[worker]} if worker in self.on_gpu else {},
            )
            for worker in self.held.keys() | self.on_gpu
        )
        report = node("a", cpu(), gpu("GPU-0"), park_bytes=self.park_bytes)
        self.world.on_node_report(msgspec.structs.replace(report, processes=processes), self.now)
        reports = tuple(
            WorkerReport(worker, *self.world.workers[worker].key, state, 1, idle_since=self.idle_since[worker])
            for worker, state in self.states.items()
        )
        self.world.on_runner_report(RunnerReport("a", "r", self.now, reports), self.now)

    def after(self, seconds: float, calls: dict[str, int] | None = None) -> list[Action]:
        """Return the actions after some time, with `calls` queued."""
        self.now += seconds
        self.tell()
        self.world.on_depths({(name, 1): count for name, count in (calls or {}).items()}, self.now, self.now)
        return list(plan(self.world, self.now).actions)

    def obey(self, action: Action) -> None:
        if isinstance(action, Park):
            self.world.set_desired(
                self.world.workers[action.worker], Desired.PARK, action.host_bytes, action.expected_bytes
            )
        elif isinstance(action, Resume):
            self.world.set_desired(self.world.workers[action.worker], Desired.RUN)
            self.held.pop(action.worker, None)
            self.states[action.worker] = WorkerState.RESUMING

    def park(self, worker: str, held: ParkedMemory = HELD) -> None:
        """Park a worker, with the proof of its agent."""
        self.obey(Park(worker, 4 * GIB, 0, ""))
        self.states[worker], self.held[worker] = WorkerState.PARKED, held
        self.tell()

    def event(self, worker: str, kind: WorkerEventKind, **what: object) -> None:
        key = self.world.workers[worker].key
        self.world.on_event(WorkerEvent(kind, worker, *key, "a", 0.0, **what), self.now)  # type: ignore[arg-type]

    def state(self, worker: str) -> WorkerState:
        return self.world.workers[worker].state


def test_an_idle_worker_parks_where_it_would_have_ended() -> None:
    scene = Scene("f")
    scene.add("w", "f")
    assert scene.after(9) == []
    (order,) = scene.after(2)
    assert isinstance(order, Park)
    assert order.host_bytes == 4 * GIB
    scene.obey(order)
    assert scene.state("w") is WorkerState.PARKING
    assert scene.after(1) == []


def test_workers_that_park_together_do_not_each_get_all_memory_before_their_need_is_known() -> None:
    """Eight whole GPUs whose workers became idle together could take eight times the operator's budget."""
    scene = Scene("f", "g", "h")
    for worker, name, held_bytes in (("w1", "f", GIB), ("w2", "g", 8 * GIB), ("w3", "h", GIB)):
        scene.on_gpu[worker] = held_bytes
        scene.add(worker, name, share=DeviceShare("cpu", 0.1, 1 << 20, gpus=("GPU-0",), mode=Share.TIME))
    orders = scene.after(11)
    parks = [(order.worker, order.host_bytes, order.expected_bytes) for order in orders if isinstance(order, Park)]
    assert parks == [("w1", 4 * GIB, GIB), ("w2", 3 * GIB, 3 * GIB)]
    assert [order.worker for order in orders if isinstance(order, Drain)] == ["w3"]


def test_memory_promised_to_a_worker_that_does_not_park_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision on the function fails: its actions of this step are dropped."""
    scene = Scene("f", "g")
    for worker, name in (("w1", "f"), ("w2", "g")):
        scene.on_gpu[worker] = 4 * GIB
        scene.add(worker, name, share=DeviceShare("cpu", 0.1, 1 << 20, gpus=("GPU-0",), mode=Share.TIME))
    drain_parked = Removals.drain_parked

    def fail_for_f(leaving: Removals, one: RevisionDecision, of: Function) -> None:
        if of.name == "f":
            raise ArithmeticError
        drain_parked(leaving, one, of)

    monkeypatch.setattr(Removals, "drain_parked", fail_for_f)
    (order,) = scene.after(11)
    assert isinstance(order, Park)
    assert order.worker == "w2"


@pytest.mark.parametrize("scaling", [ScalingPolicy(idle_timeout_s=10, park_timeout_s=0), ScalingPolicy(min_workers=1)])
def test_a_function_that_does_not_park_ends_its_workers_or_keeps_them(scaling: ScalingPolicy) -> None:
    scene = Scene("f", scaling=scaling)
    scene.add("w", "f")
    assert [type(action) for action in scene.after(100)] == ([] if scaling.min_workers else [Drain])


def test_a_parked_worker_holds_its_share_until_it_is_proven_and_again_before_it_resumes() -> None:
    scene = Scene("f")
    scene.add("w", "f")
    whole = scene.world.leases.used("a")
    scene.obey(Park("w", GIB, 0, ""))
    scene.states["w"] = WorkerState.PARKED
    scene.tell()
    assert (scene.state("w"), scene.world.leases.used("a")) == (WorkerState.PARKING, whole)
    scene.held["w"] = ParkedMemory(GIB, 300 << 20)
    scene.tell()
    assert scene.state("w") is WorkerState.PARKED
    parked = scene.world.leases.used("a")
    assert (parked.cores, parked.memory_bytes) == (0, 2 * GIB)
    assert parked.gpus == {"GPU-0": GpuUse(Share.EXCLUSIVE, workers=0, vram_bytes=300 << 20, parked=1)}
    (order,) = scene.after(1, {"f": 1})
    assert isinstance(order, Resume)
    scene.obey(order)
    assert (scene.state("w"), scene.world.leases.used("a")) == (WorkerState.RESUMING, whole)
    assert scene.after(0.1, {"f": 1}) == []


def test_a_worker_that_still_parks_is_wanted_back() -> None:
    scene = Scene("f")
    scene.add("w", "f")
    scene.obey(Park("w", GIB, 0, ""))
    assert [type(action) for action in scene.after(1, {"f": 1})] == [Resume]


def test_a_proof_after_the_request_to_resume_does_not_count() -> None:
    scene = Scene("f")
    scene.add("w", "f")
    scene.park("w")
    scene.obey(Resume("w", ""))
    scene.held["w"] = ParkedMemory(GIB)
    scene.tell()
    assert scene.world.leases.used("a").gpus["GPU-0"].workers == 1


def test_a_controller_that_begins_trusts_no_record_but_a_proof() -> None:
    scene = Scene("f")
    made = Assignment(
        worker="w", node="a", function="f", revision=1, share=ON_A_GPU, epoch=1, created_at=0.0, desired=Desired.PARK
    )
    scene.world.on_assignment("w", made, scene.now, 7)
    assert (scene.state("w"), scene.world.leases.used("a").gpus["GPU-0"].workers) == (WorkerState.PARKING, 1)
    scene.states["w"], scene.idle_since["w"] = WorkerState.PARKED, scene.now
    scene.held["w"] = ParkedMemory(GIB)
    scene.tell()
    assert (scene.state("w"), scene.world.leases.used("a").gpus["GPU-0"].workers) == (WorkerState.PARKED, 0)
    scene.world.on_assignment("w", msgspec.structs.replace(made, desired=Desired.RUN), scene.now, 9)
    scene.world.on_assignment("w", made, scene.now, 8)  # an older record, late
    assert scene.world.leases.used("a").gpus["GPU-0"].workers == 1


def test_a_parked_worker_ends_when_its_time_is_over() -> None:
    scene = Scene("f")
    scene.add("w", "f")
    scene.park("w")
    assert scene.after(109) == []
    (order,) = scene.after(2)
    assert isinstance(order, Drain)
    assert "111 s" in order.reason


def test_parked_workers_of_a_revision_that_is_replaced_end() -> None:
    scene = Scene("f")
    scene.add("w", "f")
    scene.park("w")
    scene.world.on_revision(("f", 2), revision("f", 2, PARKS))
    scene.world.on_function("f", function("f", 2))
    orders = scene.after(1)
    assert ["replaced" in order.reason for order in orders if isinstance(order, Drain)] == [True]


def test_after_a_failure_to_park_similar_workers_are_drained() -> None:
    scene = Scene("f")
    scene.add("w", "f")
    scene.obey(Park("w", GIB, 0, ""))
    failure = StartFailure("park", ErrorInfo("x", "nothing of it can be moved"))
    scene.event("w", WorkerEventKind.NOT_PARKED, failure=failure)
    assert scene.state("w") is WorkerState.DRAINING
    scene.add("v", "f")
    (order,) = scene.after(11)
    assert isinstance(order, Drain)
    assert "not parked" in order.reason
    assert "can be moved" in order.reason


def test_after_a_lack_of_host_memory_the_needed_bytes_are_reported() -> None:
    scene = Scene("f")
    scene.add("w", "f")
    scene.obey(Park("w", GIB, 0, ""))
    failure = StartFailure("park", ErrorInfo("x", "too large"))
    scene.event("w", WorkerEventKind.NOT_PARKED, failure=failure, needs_bytes=5 * GIB)
    scene.add("v", "f")
    (order,) = scene.after(11)
    assert isinstance(order, Drain)
    assert all(fact in order.reason for fact in ("not parked", "5 GiB", "a has 4 GiB"))


@pytest.mark.parametrize(
    ("kind", "what", "why"),
    [
        (
            WorkerEventKind.START_FAILED,
            {"failure": StartFailure("resume", ErrorInfo("x", "CUDA out of memory"))},
            "a worker did not resume: CUDA out of memory",
        ),
        (WorkerEventKind.EXITED, {"exit": Exit(signal=9)}, "a worker was killed by SIGKILL while it parked"),
    ],
)
def test_a_worker_that_fails_while_parking_is_replaced_without_a_failed_start(
    kind: WorkerEventKind, what: dict[str, object], why: str
) -> None:
    scene = Scene("f")
    scene.add("w", "f")
    scene.obey(Park("w", GIB, 0, ""))
    scene.event("w", kind, **what)
    view = scene.world.view(("f", 1))
    assert (scene.state("w"), view.no_parking_reason, view.circuit.last_error) == (WorkerState.FAILED, why, None)
    scene.world.on_assignment("w", None, scene.now)
    del scene.states["w"]
    assert [type(action) for action in scene.after(1, {"f": 1})] == [Start]


def test_the_next_start_is_estimated_as_a_resume_while_a_worker_is_parked() -> None:
    scene = Scene("f")
    scene.add("w", "f")
    for cold in (ColdStart(load_s=8.0), ColdStart(resume_s=0.5)):
        scene.event("w", WorkerEventKind.READY, cold_start=cold)
    view = scene.world.view(("f", 1))
    assert view.cold_start_s == 8.0
    scene.park("w")
    assert view.cold_start_s == 0.5


def _measured(scene: Scene, worker: str, *, resume_s: float, start_s: float, count: int = 3) -> None:
    for cold in (ColdStart(load_s=start_s), ColdStart(resume_s=resume_s)) * count:
        scene.event(worker, WorkerEventKind.READY, cold_start=cold)


@pytest.mark.parametrize(("resume_s", "count", "chosen"), [(3.0, 3, Start), (3.0, 2, Resume), (0.5, 3, Resume)])
def test_a_parked_worker_resumes_unless_starts_were_measured_to_be_faster(
    resume_s: float, count: int, chosen: type[Action]
) -> None:
    scene = Scene("f")
    scene.add("w", "f")
    scene.park("w")
    _measured(scene, "w", resume_s=resume_s, start_s=2.0, count=count)
    assert [type(action) for action in scene.after(1, {"f": 1})] == [chosen]


def test_a_worker_whose_like_start_faster_than_they_resume_is_not_parked() -> None:
    scene = Scene("f")
    scene.add("w", "f")
    _measured(scene, "w", resume_s=3.0, start_s=2.0)
    (order,) = scene.after(11)
    assert isinstance(order, Drain)
    assert all(fact in order.reason for fact in ("not parked", "3.0 s", "2.0 s"))


# --- the host's memory -----------------------------------------------------------------------------------------------


def test_parked_workers_of_least_worth_end_before_another_worker_parks() -> None:
    scene = Scene("f", "g", park_bytes=GIB + (1 << 20))
    scene.add("w", "f")
    scene.park("w")
    scene.add("v", "g")
    scene.world.view(("g", 1)).parked_bytes = GIB
    (order,) = scene.after(11)
    assert (type(order), getattr(order, "worker", "")) == (Drain, "w")
    scene.world.on_assignment("w", None, scene.now)
    del scene.states["w"], scene.held["w"]
    (order,) = scene.after(1)
    assert (type(order), getattr(order, "worker", "")) == (Park, "v")


def test_memory_promised_to_a_parking_worker_is_reserved() -> None:
    scene = Scene("f", "g", park_bytes=3 * GIB)
    for name, worker in (("f", "w"), ("g", "v")):
        scene.add(worker, name)
        scene.world.view((name, 1)).parked_bytes = 2 * GIB
    whole = scene.world.leases.used("a").memory_bytes
    orders = scene.after(11)
    assert [type(order) for order in orders] == [Park, Drain]
    scene.obey(orders[0])
    assert scene.world.leases.used("a").memory_bytes == whole + 2 * GIB
    again = scene.after(1)
    assert [(type(order), getattr(order, "worker", "")) for order in again] == [(Drain, "v")]
    scene.obey(Resume("w", ""))
    assert (scene.world.leases.used("a").memory_bytes, scene.world.holdings.host_memory("a").used) == (whole, 0)


def test_a_node_without_host_memory_parks_no_worker() -> None:
    scene = Scene("f", park_bytes=0)
    scene.add("w", "f")
    (order,) = scene.after(11)
    assert isinstance(order, Drain)
    assert all(fact in order.reason for fact in ("not parked", "a has 0 B"))


def test_leased_memory_is_not_used_for_parking() -> None:
    scene = Scene("f", "g")
    scene.add("w", "f")
    scene.add("v", "g", WorkerState.STARTING, DeviceShare("cpu", 0.1, 6 * GIB + GIB // 2))
    (order,) = [order for order in scene.after(11) if isinstance(order, Park)]
    assert order.host_bytes == GIB // 2


# --- functions that wait for a GPU -----------------------------------------------------------------------------------


def test_an_idle_worker_parks_for_another_function_and_yields_once_that_is_proven() -> None:
    scene = Scene("f", "g")
    scene.add("w", "f")
    (order,) = scene.after(1, {"g": 1})
    assert isinstance(order, Park)
    scene.obey(order)
    assert scene.after(0.1, {"g": 1}) == []
    scene.states["w"], scene.held["w"] = WorkerState.PARKED, ParkedMemory(GIB, 300 << 20)
    assert [type(action) for action in scene.after(0.1, {"g": 1})] == [Start]


def test_a_parked_worker_ends_for_a_worker_that_needs_its_remaining_memory() -> None:
    scene = Scene("f", "g")
    scene.add("w", "f")
    scene.park("w", ParkedMemory(GIB, 3 * GIB))  # of the 24 GiB that the other function wants exclusively
    (order,) = scene.after(1, {"g": 1})
    assert (type(order), getattr(order, "worker", "")) == (Drain, "w")


def test_a_parked_worker_whose_gpu_is_taken_waits_and_another_is_started_where_there_is_room() -> None:
    report = node("a", cpu(), gpu("GPU-0"))
    other = node("b", cpu(), gpu("GPU-1"))
    book = LeaseBook()
    book.grant("other", "a", ON_A_GPU)
    wants, limits = Resources(gpu=("any",)), Limits()
    assert not can_resume(wants, ON_A_GPU, report, book.used("a"), limits)
    book.release("other")
    assert can_resume(wants, ON_A_GPU, report, book.used("a"), limits)
    assert not can_resume(wants, ON_A_GPU, other, book.used("b"), limits)
    assert not can_resume(wants, msgspec.structs.replace(ON_A_GPU, cores=17.0), report, book.used("a"), limits)
    assert not can_resume(
        wants, msgspec.structs.replace(ON_A_GPU, memory_bytes=9 * GIB), report, book.used("a"), limits
    )


def test_a_parked_worker_has_its_share_again_wherever_a_new_one_would_get_it() -> None:
    report = node("a", cpu(1.0, 80 * GIB), gpu("GPU-0"))
    book, limits = LeaseBook(), Limits()
    for number in range(39):  # of forty that fit; the sum of their cores is slightly above 7.8
        book.grant(f"w{number}", "a", DeviceShare("cpu", 0.2, GIB))
    neighbour = msgspec.structs.replace(ON_A_GPU, trust_domain="y")
    book.grant("neighbour", "a", neighbour, ParkedMemory(GIB, 300 << 20))
    wants = Resources(cpu=0.2, gpu=("any",), memory_bytes=GIB, trust_domain="x")
    found = place(wants, [report], book, limits)
    assert isinstance(found, Placement)
    assert can_resume(wants, found.share, report, book.used("a"), limits)


def test_parked_workers_keep_their_gpu_in_its_mode_and_occupy_no_whole_one() -> None:
    report = node("a", cpu(), gpu("GPU-0"))
    book = LeaseBook()
    book.grant("parked", "a", ON_A_GPU, ParkedMemory(GIB, 300 << 20))
    assert isinstance(place(Resources(gpu=("any",)), [report], book), Placement)
    told = why_no_room(Resources(gpu=("any",), share=Share.TIME), [report], book)
    assert "parked workers" in told
    two = node("a", cpu(), gpu("GPU-0"), gpu("GPU-1"))
    found = place(Resources(gpu=("any",)), [two], book)
    assert isinstance(found, Placement)
    assert found.share.gpus == ("GPU-1",)


# --- simulation ------------------------------------------------------------------------------------------------------


def _sim(functions: int, park_bytes: int = 4 * GIB) -> Sim:
    sim = Sim(node("a", cpu(16.0, 32 * GIB), gpu("GPU-0"), park_bytes=park_bytes), start_s=3.0)
    for number in range(functions):
        scaling = ScalingPolicy(idle_timeout_s=5, park_timeout_s=60, max_workers=1)
        sim.deploy(revision(f"f{number}", 1, scaling, Resources(gpu=("any",))))
    return sim


def test_functions_that_share_a_gpu_by_time_start_once_each() -> None:
    sim = _sim(3)
    for _ in range(4):
        for number in range(3):
            sim.call(f"f{number}")
            sim.run(8)
    assert sim.done == {"f0": 4, "f1": 4, "f2": 4}
    assert sim.count(Start) == 3
    assert sim.count(Resume) == 9
    sim.run(90)
    assert sim.world.workers == {}


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 4))
def test_no_gpu_is_ever_leased_twice_and_every_call_is_served(seed: int, functions: int, park_gib: int) -> None:
    sim = _sim(functions, park_gib * GIB)
    dice = random.Random(seed)

    def each(sim: Sim) -> None:
        if dice.random() < 0.1:
            sim.call(f"f{dice.randrange(functions)}")
        _nothing_is_leased_twice(sim, park_gib * GIB)

    sim.run(60, each)
    sim.run(60, lambda sim: _nothing_is_leased_twice(sim, park_gib * GIB))
    assert not any(sim.queues.values())
    sim.run(120)
    assert sim.world.workers == {}
    assert sim.world.leases.used("a").memory_bytes == 0


def _nothing_is_leased_twice(sim: Sim, park_bytes: int) -> None:
    used = sim.world.leases.used("a")
    on_the_gpu = [
        worker for worker in (*sim.starting, *sim.running, *sim.idle_since) if worker not in sim.parked - sim.resuming
    ]
    assert len(on_the_gpu) <= 1
    assert used.gpus.get("GPU-0", GpuUse(Share.EXCLUSIVE, workers=0)).workers <= 1
    assert used.memory_bytes <= 32 * GIB
    assert sim.world.holdings.host_memory("a").used <= park_bytes
