"""What a step of the controller comes to: actions and statuses; and what it holds on the way there."""

from __future__ import annotations

import msgspec

from gpufn_core.domain.device import DeviceShare
from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.revision import CheckState, Revision, RevisionKey
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.reports import FunctionStatus
from gpufn_gateway.controller.decide.policy import Demand, ScaleDecision
from gpufn_gateway.controller.decide.rollout import Role
from gpufn_gateway.controller.placement.request import Wanted
from gpufn_gateway.controller.state.views import RevisionView


class Start(msgspec.Struct, frozen=True):
    function: str
    revision: int
    node: str
    share: DeviceShare
    reason: str


class Drain(msgspec.Struct, frozen=True):
    worker: str
    reason: str


class Park(msgspec.Struct, frozen=True):
    """`host_bytes` are its to take, and it is expected to take `expected_bytes`."""

    worker: str
    host_bytes: int
    expected_bytes: int
    reason: str


class Resume(msgspec.Struct, frozen=True):
    """Its share is leased to it again."""

    worker: str
    reason: str


class Delete(msgspec.Struct, frozen=True):
    """Give the lease up without hearing from the node."""

    worker: str
    reason: str


class MoveServing(msgspec.Struct, frozen=True):
    function: str
    revision: int
    reason: str


class MoveActive(msgspec.Struct, frozen=True):
    """Back to the revision that serves: `revision` cannot."""

    function: str
    revision: int
    reason: str


class EndCheck(msgspec.Struct, frozen=True):
    """A revision that was to be checked is, or cannot be. With `error` it is FAILED."""

    function: str
    revision: int
    state: CheckState
    reason: str = ""
    error: ErrorInfo | None = None


class EndQueued(msgspec.Struct, frozen=True):
    """End the calls that no runner holds."""

    function: str
    revision: int
    kind: OutcomeKind
    error: ErrorInfo


Action = Start | Resume | Park | Drain | Delete | MoveServing | MoveActive | EndCheck | EndQueued


class Plan(msgspec.Struct, frozen=True):
    """`failed`: functions that nothing could be decided for, and why."""

    actions: tuple[Action, ...] = ()
    statuses: dict[str, FunctionStatus] = {}
    failed: dict[str, Exception] = {}


class Need(msgspec.Struct):
    """A revision that lacks workers, on its way through placement."""

    key: RevisionKey
    revision: Revision
    wanted: Wanted
    view: RevisionView
    missing: int
    calls: int
    waits_for_first: bool
    reason: str
    is_failing: bool = False  # its last starts failed
    is_next: bool = False  # calls do not go there yet
    is_check: bool = False  # nothing waits for it but a deploy, and nobody makes room for that
    has_begun: bool = False  # in this step: it has a worker on its way
    has_no_room: bool = False
    no_room: str = ""  # why; empty while it has not been worked out
    is_slot_limited: bool = False


class Decided(msgspec.Struct):
    key: RevisionKey
    role: Role
    view: RevisionView
    decision: ScaleDecision
    demand: Demand | None
    revision: Revision | None
    need: Need | None = None
