"""A simulated platform: queues, nodes and workers that follow the plan, in steps of 0.1 s. No clock, no bus."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gpufn_core.domain.devices.device import Device, DeviceShare, DeviceType
from gpufn_core.domain.revision import Function, Revision, RevisionKey
from gpufn_core.domain.worker import Assignment, ColdStart, Desired, ParkedMemory, StartFailure, WorkerState
from gpufn_core.errors import ErrorInfo
from gpufn_core.ids import Digest
from gpufn_core.protocol.reports import (
    FunctionStatus,
    NodeReport,
    ProcessReport,
    RevisionTraffic,
    RunnerReport,
    WorkerEvent,
    WorkerEventKind,
    WorkerReport,
)
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec, ScalingPolicy
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.decide.actions import (
    Action,
    Delete,
    Drain,
    EndQueued,
    MoveServing,
    Park,
    Plan,
    Resume,
    Start,
)
from gpufn_gateway.controller.decide.plan import plan
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.state.world import World

GIB = 1 << 30


def cpu(cores: float = 2.0, memory_bytes: int = 8 * GIB) -> Device:
    return Device("cpu", DeviceType.CPU, "x86", memory_bytes, cores)


def gpu(uuid: str, kind: str = "NVIDIA L4", memory_bytes: int = 24 * GIB) -> Device:
    return Device(uuid, DeviceType.GPU, kind, memory_bytes)


def node(name: str = "a", *devices: Device, park_bytes: int = 0) -> NodeReport:
    return NodeReport(name, 0.0, devices or (cpu(),), park_bytes=park_bytes)


def revision(
    name: str = "f", number: int = 1, scaling: ScalingPolicy | None = None, resources: Resources | None = None
) -> Revision:
    spec = FunctionSpec(
        name=name,
        entry=EntryPoint("m", name),
        methods=(MethodSpec(),),
        scaling=scaling or ScalingPolicy(),
        resources=resources or Resources(),
    )
    return Revision(function=name, number=number, spec=spec, bundle=Digest("0" * 64), created_at=0.0)


def function(name: str = "f", serving: int = 1, active: int | None = None, **options: object) -> Function:
    active = serving if active is None else active
    fields: dict[str, object] = {"name": name, "serving": serving, "active": active, "latest": active} | options
    return Function(updated_at=0.0, **fields)  # type: ignore[arg-type]


def assignment(worker: str, name: str = "f", number: int = 1, node: str = "a") -> Assignment:
    share = DeviceShare(cpu_device="cpu", cores=0.1, memory_bytes=128 << 20)
    return Assignment(worker=worker, node=node, function=name, revision=number, share=share, epoch=1, created_at=0.0)


class Sim:
    """A call takes `service_s`, a start `start_s`; starts of a revision fail if `fails(key)`. Parking and resuming take
    a step each, and a parked worker takes `parked_bytes` of host memory."""

    def __init__(
        self,
        *nodes: NodeReport,
        service_s: float = 0.4,
        start_s: float = 0.3,
        limits: Limits | None = None,
        fails: Callable[[RevisionKey], bool] = lambda key: False,
        parked_bytes: int = GIB,
    ) -> None:
        self.now = 1000.0
        self.world = World(self.now)
        self.nodes = nodes or (node(),)
        self.service_s = service_s
        self.start_s = start_s
        self.limits = limits
        self.fails = fails
        self.parked_bytes = parked_bytes
        self.parking: set[str] = set()
        self.parked: set[str] = set()
        self.resuming: set[str] = set()
        self.queues: dict[RevisionKey, list[float]] = {}
        self.running: dict[str, float] = {}  # worker → when its call ends
        self.starting: dict[str, float] = {}
        self.idle_since: dict[str, float] = {}
        self.draining: set[str] = set()
        self.traffic: dict[RevisionKey, tuple[int, float]] = {}
        self.done: dict[str, int] = {}
        self.waits: list[float] = []
        self.history: list[Action] = []
        self.statuses: dict[str, FunctionStatus] = {}
        self.most: dict[str, int] = {}
        self._ids = 0
        self._tick_at = self.now
        self._tell()
        self.world.on_depths({}, self.now, self.now)

    def deploy(self, record: Revision, **options: object) -> None:
        self.world.on_revision((record.function, record.number), record)
        known = self.world.functions.get(record.function)
        serving = known.serving if known else record.number
        self.world.on_function(record.function, function(record.function, serving, record.number, **options))

    def call(self, name: str, count: int = 1, number: int | None = None) -> None:
        key = (name, self.world.functions[name].serving if number is None else number)
        self.queues.setdefault(key, []).extend([self.now] * count)
        if not any(view.state is WorkerState.READY for view in self.world.view(key).workers.values()):
            self.world.on_wakeup(name, self.now, number)
            self._apply(plan(self.world, self.now, only={name}, limits=self.limits))

    def workers(self, name: str, number: int | None = None) -> int:
        return sum(
            view.key[0] == name and number in (None, view.key[1]) and view.state is not WorkerState.DRAINING
            for view in self.world.workers.values()
        )

    def count(self, kind: type[Action]) -> int:
        return sum(isinstance(action, kind) for action in self.history)

    def run(self, seconds: float, each: Callable[[Sim], None] = lambda sim: None) -> None:
        """Run the simulation. `each(sim)` is called every 0.1 s, to generate traffic."""
        until = self.now + seconds
        while self.now < until - 1e-6:
            self.now = round(self.now + 0.1, 3)
            each(self)
            self._work()
            if self.now >= self._tick_at:
                self._tick_at = self.now + 1.0
                self._tell()
                asked = {key: len(queue) for key, queue in self.queues.items()}
                for worker in self.running:
                    key = self.world.workers[worker].key
                    asked[key] = asked.get(key, 0) + 1
                self.world.on_depths(asked, self.now, self.now)
                self._apply(plan(self.world, self.now, limits=self.limits))
            for view in self.world.workers.values():
                name = view.key[0]
                self.most[name] = max(self.most.get(name, 0), self.workers(name))

    def _work(self) -> None:
        changed: set[str] = set()
        for worker, at in list(self.starting.items()):
            if self.now >= at:
                del self.starting[worker]
                changed.add(self._end_of_start(worker))
        for worker, at in list(self.running.items()):
            if self.now >= at:
                del self.running[worker]
                self.idle_since[worker] = self.now
                key = self.world.workers[worker].key
                ended, seconds = self.traffic.get(key, (0, 0.0))
                self.traffic[key] = ended + 1, seconds + self.service_s
                self.done[key[0]] = self.done.get(key[0], 0) + 1
        for worker in list(self.idle_since):
            queue = self.queues.get(self.world.workers[worker].key)
            if worker in self.draining:
                changed.add(self._gone(worker))
            elif worker in self.parking:
                self.parking.discard(worker)
                self.parked.add(worker)
                changed.add(self.world.workers[worker].key[0])
            elif worker in self.resuming:
                self.resuming.discard(worker)
                self.parked.discard(worker)
                changed.add(self.world.workers[worker].key[0])
            elif queue and worker not in self.parked:
                self.waits.append(self.now - queue.pop(0))
                del self.idle_since[worker]
                self.running[worker] = self.now + self.service_s
        if changed:
            self._tell()
            self._apply(plan(self.world, self.now, only=changed, limits=self.limits))

    def _end_of_start(self, worker: str) -> str:
        key = self.world.workers[worker].key
        if self.fails(key):
            failure = StartFailure("load", ErrorInfo("function_start_failed", "ImportError: no module named nope"))
            self.world.on_event(
                WorkerEvent(WorkerEventKind.START_FAILED, worker, *key, "a", self.now, failure=failure), self.now
            )
            self.world.on_assignment(worker, None, self.now)
            return key[0]
        self.idle_since[worker] = self.now
        cold = ColdStart(load_s=self.start_s)
        self.world.on_event(WorkerEvent(WorkerEventKind.READY, worker, *key, "a", self.now, cold_start=cold), self.now)
        return key[0]

    def _gone(self, worker: str) -> str:
        name = self.world.workers[worker].key[0]
        self.idle_since.pop(worker, None)
        for workers in (self.draining, self.parking, self.parked, self.resuming):
            workers.discard(worker)
        self.world.on_assignment(worker, None, self.now)
        return name

    def _tell(self) -> None:
        for report in self.nodes:
            processes = tuple(
                ProcessReport(worker, *view.key, 1, 0.0, parked=ParkedMemory(self.parked_bytes))
                for worker, view in self.world.workers.items()
                if worker in self.parked - self.resuming and view.assignment.node == report.node
            )
            self.world.on_node_report(msgspec.structs.replace(report, processes=processes), self.now)
            workers = tuple(
                WorkerReport(
                    worker,
                    *self.world.workers[worker].key,
                    WorkerState.PARKED if worker in self.parked else WorkerState.READY,
                    slots=1,
                    in_use=int(worker in self.running),
                    idle_since=self.idle_since.get(worker),
                )
                for worker in (*self.running, *self.idle_since)
                if self.world.workers[worker].assignment.node == report.node
            )
            traffic = tuple(RevisionTraffic(*key, n, n, 0, s) for key, (n, s) in self.traffic.items())
            if report is self.nodes[0]:
                told = RunnerReport(report.node, f"r-{report.node}", self.now, workers, traffic)
            else:
                told = RunnerReport(report.node, f"r-{report.node}", self.now, workers)
            self.world.on_runner_report(told, self.now)

    def _apply(self, planned: Plan) -> None:
        self.history += planned.actions
        self.statuses |= planned.statuses
        for action in planned.actions:
            match action:
                case Start():
                    self._ids += 1
                    worker = f"w-{self._ids}"
                    made = Assignment(
                        worker=worker,
                        node=action.node,
                        function=action.function,
                        revision=action.revision,
                        share=action.share,
                        epoch=1,
                        created_at=self.now,
                    )
                    self.world.on_assignment(worker, made, self.now)
                    self.starting[worker] = self.now + self.start_s
                case Drain():
                    self.world.workers[action.worker].drain_requested = True
                    self.draining.add(action.worker)
                    if self.starting.pop(action.worker, None) is not None:
                        self._gone(action.worker)
                case Park():
                    self.world.set_desired(
                        self.world.workers[action.worker], Desired.PARK, action.host_bytes, action.expected_bytes
                    )
                    self.parking.add(action.worker)
                case Resume():
                    self.world.set_desired(self.world.workers[action.worker], Desired.RUN)
                    if action.worker in self.parked:
                        self.resuming.add(action.worker)
                    self.parking.discard(action.worker)
                case Delete():
                    self.world.on_assignment(action.worker, None, self.now)
                case MoveServing():
                    was = self.world.functions[action.function]
                    self.world.on_function(action.function, function(action.function, action.revision, was.active))
                case EndQueued():
                    self.queues.pop((action.function, action.revision), None)
