"""A test bench for the state machine: fake workers and deliveries, and a clock that the test sets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.revision import Revision
from gpufn_core.domain.worker import ColdStart, WorkerState
from gpufn_core.errors import ErrorInfo
from gpufn_core.ids import digest_of
from gpufn_core.protocol import frames
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.spec.function_spec import CallKind, EntryPoint, FunctionSpec, MethodSpec
from gpufn_runtime.runner.core import actions, events
from gpufn_runtime.runner.core.attempt import Attempt
from gpufn_runtime.runner.core.busy_time import BusyTime
from gpufn_runtime.runner.core.events import Now
from gpufn_runtime.runner.core.machine import RevisionMachine
from gpufn_runtime.runner.core.slots import SlotPool

A = TypeVar("A", bound=actions.Action)

NOW = 1_000_000.0  # unix seconds, when a test begins
START = 500.0  # monotonic seconds, when a test begins
RAISED = ErrorInfo("function_raised", "no", error_type="OSError", error_bases=("OSError", "Exception"))


def revision_of(kind: CallKind = CallKind.SYNC, **options: Any) -> Revision:
    """A Revision of a function `f`. `options` are fields of its FunctionSpec."""
    methods = (MethodSpec(kind=kind),)
    spec = FunctionSpec(name="f", entry=EntryPoint(module="m", qualname="f"), methods=methods, **options)
    return Revision(function="f", number=1, spec=spec, bundle=digest_of(b""), created_at=0.0)


def message_of(id_: str = "i-1", *, reply: str = "reply.to", **fields: Any) -> InvocationMessage:
    """The message of a call whose caller waits. A submitted call has no `reply`."""
    values: dict[str, Any] = {"method": "", "submitted_at": NOW - 1.0} | fields
    return InvocationMessage(
        id=id_, function="f", revision=1, content_type="application/json", accept="application/json", reply=reply,
        **values,
    )  # fmt: skip


@dataclass(eq=False)
class FakeDelivery:
    """A DeliveryView. `delivered` counts the hand-overs of its message, from 1."""

    is_direct: bool = False
    is_withdrawn: bool = False
    delivered: int = 1
    settled_at: str = "$JS.ACK"
    seq: int = 1
    subject: str = "queue"
    payload: bytes = b""

    def starts_since(self, delivered: int = 0) -> int:
        return max(0, self.delivered - delivered - 1)

    def ack(self) -> None:
        raise AssertionError("only the edge settles a delivery")

    def nak(self, delay_s: float = 0, *, has_begun: bool = False) -> None:
        raise AssertionError("only the edge settles a delivery")

    def term(self, reason: str = "") -> None:
        raise AssertionError("only the edge settles a delivery")

    def touch(self) -> None:
        raise AssertionError("only the edge extends an ack deadline")


@dataclass(eq=False)
class FakeWorker:
    """A WorkerView. It `shares_by_time` if it has a `gpu`."""

    id: str
    revision: Revision
    state: WorkerState = WorkerState.READY
    gpus: tuple[str, ...] = ()
    gpus_charged: float = 0.0
    gpu: str = ""
    must_take_turns: bool = False
    needs_turn: bool = False
    idle_since: float | None = START
    cold_start: ColdStart | None = None
    ready_at: float | None = None
    busy: BusyTime = field(default_factory=BusyTime)
    attempts: dict[int, Attempt] = field(default_factory=dict)
    last_number: int = 0

    def __post_init__(self) -> None:
        self.slots = SlotPool(self.revision.spec.slots, self.revision.spec.calls_per_worker)

    @property
    def accepts_calls(self) -> bool:
        return self.state is WorkerState.READY and not self.slots.poisoned

    @property
    def free(self) -> int:
        return self.slots.free if self.accepts_calls else 0

    @property
    def shares_by_time(self) -> bool:
        return bool(self.gpu)

    def next_attempt_number(self) -> int:
        self.last_number += 1
        return self.last_number

    @property
    def seat(self) -> Any:
        raise AssertionError("only the edge knows turns")

    def send(self, frame: Any, body: bytes = b"") -> None:
        raise AssertionError("only the edge sends frames")

    def adopt(self, attempt: Any) -> None:
        raise AssertionError("only the edge adopts attempts")


class Bench:
    """A machine, and the actions that the last event caused."""

    def __init__(self, kind: CallKind = CallKind.SYNC, **options: Any) -> None:
        self.revision = revision_of(kind, **options)
        self.machine: RevisionMachine[FakeWorker] = RevisionMachine(self.revision)
        self.capacity = self.machine.capacity
        self.monotonic = START
        self.unix = NOW
        self.actions: list[actions.Action] = []
        self._ids = itertools.count(1)

    # --- events -------------------------------------------------------------------------------------------------------

    def handle(self, event: events.Event) -> list[actions.Action]:
        self.actions = self.machine.handle(event, Now(self.monotonic, self.unix))
        return self.actions

    def wait(self, seconds: float) -> None:
        """Let time pass without an event."""
        self.monotonic += seconds
        self.unix += seconds

    def tick(self, seconds: float = 0.1) -> list[actions.Action]:
        """Let time pass, then tick. All frames have been handled."""
        self.wait(seconds)
        return self.handle(events.Ticked(self.monotonic))

    def worker(self, name: str = "w-1", **fields: Any) -> FakeWorker:
        """A worker that takes calls."""
        worker = FakeWorker(name, self.revision, **fields)
        self.capacity.workers[name] = worker
        self.handle(events.WorkerReady(worker, self.unix))
        self.handle(events.CapacityIncreased())
        return worker

    def arrive(
        self, message: InvocationMessage | None = None, *, body: bytes = b"{}", caller_was_away: bool = False,
        **delivery: Any,
    ) -> FakeDelivery:  # fmt: skip
        """Hand over a call. `delivery` are fields of its FakeDelivery."""
        handed_over = FakeDelivery(**delivery)
        message = message or message_of(f"i-{next(self._ids)}")
        self.handle(events.Arrived(handed_over, message, body, caller_was_away))
        return handed_over

    def arrive_submitted(self, *, delivered: int = 1, body: bytes = b"{}", **fields: Any) -> FakeDelivery:
        """Hand over a call for whose reply no caller waits. `fields` replace fields of its message."""
        message = message_of(f"i-{next(self._ids)}", reply="", **fields)
        return self.arrive(message, body=body, delivered=delivered)

    def start(self, **delivery: Any) -> Attempt:
        """Hand over a call, which begins."""
        self.arrive(**delivery)
        return self.one(actions.SendRun).attempt

    def start_submitted(self, **fields: Any) -> Attempt:
        self.arrive_submitted(**fields)
        return self.one(actions.SendRun).attempt

    def result(
        self, attempt: Attempt, kind: OutcomeKind = OutcomeKind.SUCCEEDED, error: ErrorInfo | None = None,
        *, body: bytes = b"null", run_s: float = 0.001, shared_body: str = "", charged_s: float | None = None,
    ) -> list[actions.Action]:  # fmt: skip
        """The worker sends the result of the attempt. The edge removes the attempt from the worker first."""
        del attempt.worker.attempts[attempt.number]
        result = frames.Result(attempt.number, kind, error, "application/json", run_s, shared_body, charged_s)
        return self.handle(events.ResultReceived(attempt, result, body))

    def cancel(self, attempt: Attempt) -> list[actions.Action]:
        return self.handle(events.Cancelled(attempt))

    def lose(self, worker: FakeWorker, within_s: float = 10.0) -> list[actions.Action]:
        """The worker's socket closes."""
        worker.state = WorkerState.FAILED
        return self.handle(events.WorkerLost(worker, within_s))

    def make_calls_short(self) -> None:
        """Let the backlog know that calls are short."""
        for _ in range(50):
            self.capacity.ended(0.001, 10)

    # --- actions ------------------------------------------------------------------------------------------------------

    def all(self, kind: type[A]) -> list[A]:
        """The actions of this type that the last event caused."""
        return [action for action in self.actions if isinstance(action, kind)]

    def one(self, kind: type[A]) -> A:
        """The action of this type, if the last event caused exactly one."""
        (action,) = self.all(kind)
        return action

    @property
    def kinds(self) -> list[type[actions.Action]]:
        return [type(action) for action in self.actions]
