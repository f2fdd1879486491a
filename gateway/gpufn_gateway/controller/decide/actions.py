"""The result of a controller step: its actions and statuses; and its intermediate records."""

from __future__ import annotations

import msgspec

from gpufn_core.domain.devices.device import DeviceShare
from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.revision import CheckState, Revision, RevisionKey
from gpufn_core.domain.worker import Cause
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol.reports import FunctionStatus
from gpufn_gateway.controller.decide.scaling.policy import Demand, ScaleDecision, Workers
from gpufn_gateway.controller.decide.scaling.rollout import Role
from gpufn_gateway.controller.placement.node_choice import Placement
from gpufn_gateway.controller.placement.request import Requirements
from gpufn_gateway.controller.placement.start_time import StartTimes
from gpufn_gateway.controller.state.views import RevisionView


class Start(msgspec.Struct, frozen=True):
    """Start a worker. `others` are the places of a gang's ranks above 0."""

    function: str
    revision: int
    node: str
    share: DeviceShare
    reason: str
    others: tuple[Placement, ...] = ()


class Drain(msgspec.Struct, frozen=True):
    worker: str
    reason: str
    cause: Cause = Cause.IDLE


class Park(msgspec.Struct, frozen=True):
    """Park a worker. It may take `host_bytes` of host memory and is expected to take `expected_bytes`."""

    worker: str
    host_bytes: int
    expected_bytes: int
    reason: str
    cause: Cause = Cause.IDLE


class Resume(msgspec.Struct, frozen=True):
    """Resume a parked worker. Its share is leased to it again."""

    worker: str
    reason: str
    cause: Cause = Cause.CALLS


class Delete(msgspec.Struct, frozen=True):
    """Release the lease of a worker without hearing from its node."""

    worker: str
    reason: str


class MoveServing(msgspec.Struct, frozen=True):
    function: str
    revision: int
    reason: str


class MoveActive(msgspec.Struct, frozen=True):
    """Make the serving revision active again, because `revision` cannot start."""

    function: str
    revision: int
    reason: str


class EndCheck(msgspec.Struct, frozen=True):
    """End the check of a revision: it was checked, or cannot be. With `error` the revision becomes FAILED."""

    function: str
    revision: int
    state: CheckState
    reason: str = ""
    error: ErrorInfo | None = None


class EndQueued(msgspec.Struct, frozen=True):
    """End the queued calls of a revision that no runner holds."""

    function: str
    revision: int
    kind: OutcomeKind
    error: ErrorInfo


Action = Start | Resume | Park | Drain | Delete | MoveServing | MoveActive | EndCheck | EndQueued


class Plan(msgspec.Struct, frozen=True):
    """`failed` maps each function without a decision to the error."""

    actions: tuple[Action, ...] = ()
    statuses: dict[str, FunctionStatus] = {}
    failed: dict[str, Exception] = {}


class Need(msgspec.Struct):
    """A revision that lacks workers, on its way through placement."""

    key: RevisionKey
    revision: Revision
    requirements: Requirements
    starts: StartTimes | None
    view: RevisionView
    missing: int
    calls: int
    waits_for_first: bool
    reason: str
    is_failing: bool = False  # its last starts failed
    is_next: bool = False  # calls do not go to this revision yet
    is_check: bool = False  # only a deploy waits for it, and no other worker makes room for a check
    has_begun: bool = False  # a worker of it was started or resumed in this step
    has_no_room: bool = False
    no_room: str = ""  # why; empty until it is computed
    is_slot_limited: bool = False
    team_limit: str = ""  # why its team may hold no further worker


class RevisionDecision(msgspec.Struct):
    """`gives_way`: another revision of the split gets one of its workers, idle or not."""

    key: RevisionKey
    role: Role
    view: RevisionView
    decision: ScaleDecision
    demand: Demand | None
    revision: Revision | None
    workers: Workers
    need: Need | None = None
    gives_way: bool = False
