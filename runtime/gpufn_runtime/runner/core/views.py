"""The view of deliveries and workers that the state machine needs, which the edge implements. Pure."""

from __future__ import annotations

from typing import Any, Protocol

from gpufn_core.domain.revision import Revision
from gpufn_core.domain.worker import ColdStart, WorkerState
from gpufn_core.protocol.frames import RunnerFrame
from gpufn_runtime.runner.core.busy_time import BusyTime
from gpufn_runtime.runner.core.slots import SlotPool


class DeliveryView(Protocol):
    """A hand-over of a call, from a queue or by the fast path. The machine reads its facts; the edge settles it."""

    @property
    def is_direct(self) -> bool: ...
    @property
    def is_withdrawn(self) -> bool: ...
    @property
    def delivered(self) -> int: ...
    @property
    def settled_at(self) -> str: ...
    def starts_since(self, delivered: int = 0) -> int: ...

    # For the edge:
    @property
    def seq(self) -> int: ...
    @property
    def subject(self) -> str: ...
    @property
    def payload(self) -> bytes: ...
    def ack(self) -> None: ...
    def nak(self, delay_s: float = 0, *, has_begun: bool = False) -> None: ...
    def term(self, reason: str = "") -> None: ...
    def touch(self) -> None: ...


class WorkerView(Protocol):
    """A worker, its slots, and the attempts that have begun in them, by number."""

    slots: SlotPool
    busy: BusyTime
    idle_since: float | None
    cold_start: ColdStart | None
    ready_at: float | None  # unix seconds
    attempts: dict[int, Any]

    @property
    def id(self) -> str: ...
    @property
    def revision(self) -> Revision: ...
    @property
    def state(self) -> WorkerState: ...
    @property
    def gpus_charged(self) -> float:
        """The GPU seconds that each second of the worker costs (`Assignment.gpus_charged`)."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """The uuids of its GPUs."""

    @property
    def free(self) -> int: ...
    @property
    def accepts_calls(self) -> bool: ...
    @property
    def shares_by_time(self) -> bool: ...
    @property
    def gpu(self) -> str: ...
    @property
    def needs_turn(self) -> bool: ...
    @property
    def must_take_turns(self) -> bool: ...
    def next_attempt_number(self) -> int: ...

    # For the edge:
    @property
    def seat(self) -> Any:
        """Its seat among the workers that take turns on a GPU (`gpu.gpu_turns.Seat`); None if there are none."""

    def send(self, frame: RunnerFrame, body: bytes = b"") -> None: ...
    def adopt(self, attempt: Any) -> None: ...
