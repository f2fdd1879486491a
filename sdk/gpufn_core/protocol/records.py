"""Records stored in NATS, one frozen struct each: submitted calls, maps, schedules and API keys.

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

CLIENT_FILES_RETENTION_S = 7 * 86400.0


class AttemptRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of one attempt of a submitted invocation. `code` and `message` describe its error, shortened.
    `reason` is why it was started. `reason` and `node` are empty in records of older versions."""

    number: int
    outcome: OutcomeKind
    ended_at: float
    started_at: float | None = None
    worker: str = ""
    code: str = ""
    message: str = ""
    gpu_s: float = 0.0  # GPU seconds charged for it
    node: str = ""
    reason: StartReason | None = None


class BodyReference(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A body that is too large for its message: a blob in the NATS object store (`gpufn_platform.queue.large_bodies`).

    `owner` is the invocation's id, or a separate name for a call whose caller waits. `digest` is the sha256 of its
    `size` bytes. The message with the reference has the content type.
    """

    owner: str
    digest: str
    size: int


class Webhook(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Destination of the end of a submitted call. `owner` is the API key's id, or the platform; its secret signs the
    request. `form` names the protocol that writes the request; "" is the gpufn API."""

    PLATFORM: ClassVar = subjects.PLATFORM

    url: str
    owner: str = PLATFORM
    form: str = ""


class CallRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The stored state of a submitted invocation, packed with its result as body. The first end wins.

    `attempts` are the last attempts that ended. A queued invocation does not start before `not_before`. An ended record
    is kept for `keep_s`. `blob` is the digest of a result that is too large to be the body. `size` is the result's
    bytes.
    """

    id: str
    function: str
    revision: int
    method: str = ""
    state: InvocationState
    submitted_at: float
    queue_seq: int = 0  # position in ASYNC, while queued
    started_at: float | None = None
    ended_at: float | None = None
    attempt: int = 1
    error: ErrorInfo | None = None
    content_type: str = ""
    queue_s: float | None = None
    run_s: float | None = None
    gather_s: float = 0.0  # between queue_s and run_s: time in the worker until its batch ran
    gpu_s: float = 0.0  # GPU seconds charged for its attempts
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
    trace: str = ""  # as in its message
    owner: str = subjects.PLATFORM  # the id of the API key that made it


unpack_record: Unpacker[CallRecord] = Unpacker(CallRecord)


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted invocation that ended without a result, and why. Packed with its payload as body, or with the
    `reference` of a large payload. `size` is the payload's, in bytes.
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
    """The state of a map after a chunk: all items below `accepted` were accepted. A chunk's entry is stored right after
    its items, which start at `first`. `digest` is the digest of the chunk's body, to recognize a resent chunk.
    `is_tried_once`: no revision of the map's items has retries, so that an item with a record has ended.

    A closed or cancelled map accepts no further chunks. The entry that records a cancellation, or the map's end, does
    not belong to a chunk: its other fields are copied from the previous entry.
    """

    id: str
    function: str
    revision: int
    method: str
    submitted_at: float  # of the first item
    first: int
    accepted: int
    chunk: int  # number of the chunk, from 1
    digest: str = ""
    is_tried_once: bool = False
    is_closed: bool = False
    is_cancelled: bool = False
    is_ended: bool = False  # all of its items have ended


class ScheduleRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule and its progress: all runs due up to `done_until` were submitted, the last one as `invocation`.

    `declared` marks a schedule from the function's declaration. Its id is the function's name.
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
    """State that a call stored for its next attempt, packed with the value as body. `attempt` stored it at `at`."""

    content_type: str
    attempt: int
    at: float


unpack_checkpoint: Unpacker[Checkpoint] = Unpacker(Checkpoint)


class StartNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last start of user code for a submitted invocation, kept until that start has ended.

    It belongs to delivery number `delivered` of the message at `seq` of ASYNC. `interrupted` is why the attempt was
    stopped before its end, with details in `message`. `attempts` are the earlier ones.
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


class ClientFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a client of another platform has uploaded, for the arguments of later calls. `owner` is the API key's
    id, or the platform. Its bytes are at `reference` in ARGUMENT_FILES."""

    id: str
    owner: str
    name: str
    content_type: str
    size: int
    purpose: str = ""
    created_at: float
    expires_at: float
    reference: BodyReference


class ClientBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that a client of another platform has submitted as one file. `calls` is their list, in ARGUMENT_FILES.
    `completed` and `failed` are counted at its end. `output_file` and `error_file` are ids of files."""

    id: str
    owner: str
    endpoint: str
    input_file: str
    metadata: dict[str, str]
    created_at: float
    expires_at: float
    calls: BodyReference
    total: int
    completed: int = 0
    failed: int = 0
    is_cancelled: bool = False
    is_ended: bool = False
    output_file: str = ""
    error_file: str = ""


class KeyLimits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The limits of an API key; None means no limit. `rate` is in calls per second. `burst` is how many calls may
    arrive at once (default: the calls of one second). `concurrency` limits calls whose callers wait, `queued` submitted
    calls that have not ended. `run_s` and `gpu_s` are seconds per UTC day, as `gpufn_core.domain.usage` counts them.
    """

    rate: float | None = None
    burst: int | None = None
    concurrency: int | None = None
    queued: int | None = None
    run_s: float | None = None
    gpu_s: float | None = None


class ReplacedSecret(msgspec.Struct, frozen=True):
    """A secret that a rotation has replaced: its sha256, and until when it is still valid, in UNIX seconds."""

    sha256: str
    valid_until: float


class ApiKey(msgspec.Struct, frozen=True):
    """A stored API key: the sha256 of its secret, never the secret. `scopes` are ``admin``, ``deploy``, ``read``,
    ``hi``, ``pickle``, or ``invoke:``, ``read:`` or ``deploy:`` with a pattern of functions. `expires_at` is in UNIX
    seconds; None means never."""

    id: str
    sha256: str
    scopes: tuple[str, ...]
    created_at: float
    label: str = ""
    limits: KeyLimits = KeyLimits()
    expires_at: float | None = None
    replaced: ReplacedSecret | None = None
    team: str = ""  # its verbs hold for the functions of this team only


class NodeDrain(msgspec.Struct, frozen=True, kw_only=True):
    """A node that accepts no new workers since `since`, in unix seconds; `by` is the id of the key or user that drained
    it."""

    node: str
    since: float
    by: str = ""
