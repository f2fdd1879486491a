"""What the bus keeps: of submitted calls, maps and schedules, and of API keys; one frozen struct each.

Times are unix seconds; durations are seconds.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from gpufn_core.domain.invocation import InvocationState, OutcomeKind, StartReason
from gpufn_core.domain.worker import ColdStart
from gpufn_core.errors import ErrorInfo
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import Unpacker
from gpufn_core.spec.function_spec import RETENTION_S
from gpufn_core.spec.priority import Priority
from gpufn_core.spec.schedule import Schedule


class AttemptRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one Attempt of a submitted Invocation ended, and where. `code` and `message` are its error's, shortened.
    `reason` says why it was started; both it and `node` are empty in records of older versions."""

    number: int
    outcome: OutcomeKind
    ended_at: float
    started_at: float | None = None
    worker: str = ""
    code: str = ""
    message: str = ""
    gpu_s: float = 0.0  # GPU seconds that it is charged
    node: str = ""
    reason: StartReason | None = None


class BodyReference(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A body that is too large for its message: a blob in the bus's object store (`gpufn_platform.queue.large_bodies`).

    `owner` is the invocation's id, or a name of its own for a call that somebody waits for. `digest` is the sha256 of
    its `size` bytes; the message that has the reference has the content type.
    """

    owner: str
    digest: str
    size: int


class Webhook(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where the end of a submitted call is told. `owner`'s secret signs it: an API key's id, or the platform."""

    PLATFORM: ClassVar = subjects.PLATFORM

    url: str
    owner: str = PLATFORM


class CallRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is kept of a submitted Invocation; packed with its result as body. The first end wins.

    `attempts` are the last ones that ended. A queued one is not taken before `not_before`; an ended one is kept for
    `keep_s`. `blob` is the Digest of a result that is too large to be the body, `size` the bytes of either.
    """

    id: str
    function: str
    revision: int
    method: str = ""
    state: InvocationState
    submitted_at: float
    queue_seq: int = 0  # place in ASYNC, while queued
    started_at: float | None = None
    ended_at: float | None = None
    attempt: int = 1
    error: ErrorInfo | None = None
    content_type: str = ""
    queue_s: float | None = None
    run_s: float | None = None
    gather_s: float = 0.0  # between these: in its worker, until its batch ran
    gpu_s: float = 0.0  # that its attempts are charged
    cold_start: ColdStart | None = None
    worker: str = ""
    digest: str = ""
    attempts: tuple[AttemptRecord, ...] = ()
    not_before: float = 0.0
    keep_s: float = RETENTION_S
    blob: str = ""
    size: int = 0
    webhook: Webhook | None = None
    priority: Priority = Priority.NORMAL
    parent: str = ""  # the invocation that made this one
    trace: str = ""  # W3C traceparent


unpack_record: Unpacker[CallRecord] = Unpacker(CallRecord)


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted Invocation that ended without a result, and why; packed with its payload as body, or with the
    `reference` of a large one. `size` is the payload's, in bytes.
    """

    id: str
    function: str
    revision: int
    method: str
    content_type: str
    accept: str
    state: InvocationState
    submitted_at: float
    died_at: float
    error: ErrorInfo | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    size: int = 0
    priority: Priority = Priority.NORMAL
    webhook: Webhook | None = None
    reference: BodyReference | None = None


unpack_letter: Unpacker[DeadLetter] = Unpacker(DeadLetter)


class MapEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What was accepted of a Map until then: its items below `accepted`. Each Chunk's entry is stored right behind its
    items, those from `first` on; `digest` is of its body, so that it is known when it comes again. `is_tried_once`: no
    revision that its items are of has retries, so that an item with a record has ended.

    Nothing more is accepted of a map that is closed or cancelled. An entry that says that it was cancelled, or has
    ended, is no Chunk's: the rest of it is the one before.
    """

    id: str
    function: str
    revision: int
    method: str
    submitted_at: float  # its first item
    first: int
    accepted: int
    chunk: int  # counts them, from 1
    digest: str = ""
    is_tried_once: bool = False
    is_closed: bool = False
    is_cancelled: bool = False
    is_ended: bool = False  # all its items have


class ScheduleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A Schedule and how far it is: what is due until `done_until` has been submitted, the last as `invocation`.

    A function's own is `declared`, and its id is the function's name.
    """

    id: str
    function: str
    schedule: Schedule
    declared: bool = False
    paused: bool = False
    done_until: float
    created_at: float
    invocation: str = ""


class Checkpoint(msgspec.Struct, frozen=True):
    """What a call left for its next attempt; packed with the value as body. `attempt` made it, at `at`."""

    content_type: str
    attempt: int
    at: float


unpack_checkpoint: Unpacker[Checkpoint] = Unpacker(Checkpoint)


class StartNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last start of user code for a submitted Invocation, kept while that start has no end.

    It belongs to the message at `seq` of ASYNC, in its hand-over `delivered`. `interrupted` says why the attempt was
    stopped before its end, and `message` says more; `attempts` are those before it.
    """

    seq: int
    delivered: int
    attempt: int
    reason: StartReason
    node: str
    worker: str
    started_at: float
    attempts: tuple[AttemptRecord, ...] = ()
    interrupted: StartReason | None = None
    ended_at: float = 0.0
    message: str = ""


class KeyLimits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What an API key may use; None is no limit. `rate` is in calls per second, of which `burst` may come at once
    (else as many as in a second); `concurrency` is of calls that are waited for, `queued` of submitted ones that have
    not ended. `run_s` and `gpu_s` are seconds per day of UTC, as `gpufn_core.domain.metering` counts them.
    """

    rate: float | None = None
    burst: int | None = None
    concurrency: int | None = None
    queued: int | None = None
    run_s: float | None = None
    gpu_s: float | None = None


class ApiKey(msgspec.Struct, frozen=True):
    """A key as stored: the sha256 of its secret, never the secret. `scopes` are ``invoke:<function>``, ``invoke:*``,
    ``hi``, ``deploy``, ``read`` or ``admin``."""

    id: str
    sha256: str
    scopes: tuple[str, ...]
    created_at: float
    label: str = ""
    limits: KeyLimits = KeyLimits()
