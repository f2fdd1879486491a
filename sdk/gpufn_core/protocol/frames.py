"""Frames between a Runner and one Worker, over the worker's unix socket.

    8 bytes, big endian: length of the header, length of the body · header (msgpack) · body (user bytes)

The runner treats what comes from a worker as hostile: lengths are bounded, unknown tags and attempts end the link.
`attempt` is a number that the runner gives to each Run on a link; `call` one that the worker gives to each Call.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.worker import ParkedMemory
from gpufn_core.errors import ErrorInfo, PayloadTooLarge, ProtocolMismatch
from gpufn_core.protocol.limits import MESSAGE_BYTES
from gpufn_core.spec.priority import Priority

MAX_HEADER_BYTES = 1 << 20
STREAM_WINDOW = 64  # items that may be under way between a generator and the reader of its stream
F = TypeVar("F")

_LENGTHS = struct.Struct("!II")


class _Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


# --- runner → worker -------------------------------------------------------------------------------------------------


class Run(_Frame, tag=1, frozen=True, array_like=True, gc=False):
    """Run one Attempt. `stream` asks for Items; `credits` is how many may be sent before a Credit.

    `parcel` is the input's name in the worker's folder of parcels, when it is not the body; `takes_parcel` allows the
    result to be one. `deadline` is when the runner ends it, in unix seconds; `trace` its caller's traceparent.
    `delivery` is where it is settled, for the runner after this one; empty, and that one cannot adopt it.
    """

    attempt: int
    invocation: str
    method: str
    content_type: str
    accept: str
    number: int = 1
    stream: bool = False
    credits: int = 0
    parcel: str = ""
    takes_parcel: bool = False
    deadline: float = 0.0
    trace: str = ""
    delivery: str = ""


class Cancel(_Frame, tag=2, frozen=True, array_like=True, gc=False):
    attempt: int


class Credit(_Frame, tag=3, frozen=True, array_like=True, gc=False):
    attempt: int
    items: int


class Drain(_Frame, tag=4, frozen=True, array_like=True, gc=False):
    """Nothing more will come: run the exit hooks and end."""


class Park(_Frame, tag=7, frozen=True, array_like=True, gc=False):
    """Give the GPU up. At most `host_bytes` of the host's memory may be taken for it. No attempt runs, and no Run comes
    before the answer: a Ready that is `parked`, or a NotParked."""

    host_bytes: int


class Resume(_Frame, tag=8, frozen=True, array_like=True, gc=False):
    """The GPU's memory is there again. The answer is a Ready, or a StartFailed of the phase ``resume``."""


class Answer(_Frame, tag=5, frozen=True, array_like=True, gc=False):
    """The end of a Call: the outcome of what the function asked the platform for. `parcel` is the body's name in the
    worker's folder of parcels, when it is not the frame's."""

    call: int
    kind: OutcomeKind
    error: ErrorInfo | None
    content_type: str
    parcel: str = ""


class AnswerItem(_Frame, tag=6, frozen=True, array_like=True, gc=False):
    """One item of a streaming Call."""

    call: int
    content_type: str


RunnerFrame = Run | Cancel | Credit | Drain | Park | Resume | Answer | AnswerItem


# --- worker → runner -------------------------------------------------------------------------------------------------


class Unfinished(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An attempt that an earlier runner began, `ran_s` ago, and whose Result it did not get. `delivery` and `number`
    as in Run."""

    attempt: int
    invocation: str
    delivery: str
    ran_s: float
    number: int = 1


class Hello(_Frame, tag=10, frozen=True, array_like=True, gc=False):
    """The first frame of a connection. A worker that comes back to a new runner `was_ready`, and still has attempts of
    the old one. Each of those that are `unfinished` ends with a Result, as if this runner had begun it: it adopts them,
    or has them cancelled. Beside them `running` more end unheard, each with a Freed."""

    protocol: int
    worker: str
    was_ready: bool = False
    running: int = 0
    unfinished: tuple[Unfinished, ...] = ()


class Ready(_Frame, tag=11, frozen=True, array_like=True, gc=False):
    """Loaded and warm, or parked. `modules` are the third-party modules in memory, for the next standby."""

    load_s: float
    warm_s: float
    modules: tuple[str, ...] = ()
    parked: ParkedMemory | None = None


class StartFailed(_Frame, tag=12, frozen=True, array_like=True, gc=False):
    phase: str
    error: ErrorInfo


class Result(_Frame, tag=13, frozen=True, array_like=True, gc=False):
    """The end of an Attempt; the slot is free when this is sent. `parcel` is the result's name in the worker's folder
    of parcels, when it is not the body. `run_s` is how long it ran; `charged_s` its part of that when it ran together
    with others in a batch, None when it ran by itself."""

    attempt: int
    kind: OutcomeKind
    error: ErrorInfo | None
    content_type: str
    run_s: float
    parcel: str = ""
    charged_s: float | None = None


class Item(_Frame, tag=14, frozen=True, array_like=True, gc=False):
    """One item of a streaming Attempt; costs one credit."""

    attempt: int
    content_type: str


class Log(_Frame, tag=15, frozen=True, array_like=True, gc=False):
    """Text that the function printed or logged; attempt 0 is the worker itself. The body is UTF-8."""

    attempt: int
    stream: str


class Verb(enum.StrEnum):
    """What a function can ask the platform for, in the words of its HTTP interface."""

    CALL = "call"  # a function, for its result
    STREAM = "stream"  # a function, for its items
    SUBMIT = "submit"  # a function, for the id of the invocation
    STATUS = "status"  # of an invocation
    RESULT = "result"
    CANCEL = "cancel"
    CHECKPOINT = "checkpoint"  # keep the body, for the attempt's own invocation
    RESTORE = "restore"  # what was kept last


class Call(_Frame, tag=16, frozen=True, array_like=True, gc=False):
    """The function asks the platform for something: `target` is a function, or an invocation's id. `parcel` is the
    body's name in the worker's folder of parcels, when it is not the frame's."""

    call: int
    verb: str  # a Verb; one that is not known is refused, and its worker lives on
    target: str
    method: str = ""
    content_type: str = ""
    accept: str = ""
    timeout_s: float | None = None
    parent: int = 0  # the attempt that asks
    priority: Priority | None = None  # as asked for
    parcel: str = ""


class CloseCall(_Frame, tag=17, frozen=True, array_like=True, gc=False):
    """The function does not want the rest of a Call (it left the loop over a stream, or gave up waiting)."""

    call: int


class CallCredit(_Frame, tag=18, frozen=True, array_like=True, gc=False):
    """So many items of a streaming Call were read; STREAM_WINDOW may come without."""

    call: int
    items: int


class Freed(_Frame, tag=19, frozen=True, array_like=True, gc=False):
    """An attempt that ran for an earlier connection has ended; its slot is free."""


class Draining(_Frame, tag=20, frozen=True, array_like=True, gc=False):
    """Somebody told the worker to end. It still runs what is on its way, and ends at the runner's Drain."""


class Progress(_Frame, tag=21, frozen=True, array_like=True, gc=False):
    """How far an Attempt is, 0 to 1, and in words."""

    attempt: int
    fraction: float
    message: str


class NotParked(_Frame, tag=22, frozen=True, array_like=True, gc=False):
    """It could not be parked, and is to end. `needs_bytes` of the host's memory would have done; 0 when memory was not
    what it lacked."""

    error: ErrorInfo
    needs_bytes: int = 0


WorkerFrame = (
    Hello
    | Ready
    | StartFailed
    | Result
    | Item
    | Log
    | Call
    | CloseCall
    | CallCredit
    | Freed
    | Draining
    | Progress
    | NotParked
)

_encode = msgspec.msgpack.Encoder().encode


def encode(frame: msgspec.Struct, body: bytes = b"") -> bytes:
    """Raises PayloadTooLarge: whoever got more would hang up."""
    header = _encode(frame)
    if len(header) > MAX_HEADER_BYTES:
        raise PayloadTooLarge(f"{len(header)} bytes are more than the {MAX_HEADER_BYTES} that fit a frame's header")
    if len(body) > MESSAGE_BYTES:
        raise PayloadTooLarge(f"{len(body)} bytes are more than the {MESSAGE_BYTES} that fit one frame")
    return b"".join((_LENGTHS.pack(len(header), len(body)), header, body))


class FrameReader(Generic[F]):
    """Cuts a byte stream into frames. Feed it what arrives; it yields what is whole.

    Raises ProtocolMismatch for what cannot be a frame: the link is then of no use.
    """

    def __init__(self, frame_type: Any) -> None:
        self._decode: Callable[[bytes | memoryview], F] = msgspec.msgpack.Decoder(frame_type).decode
        self._begun = bytearray()  # what is not a whole frame yet
        self._needs = 0  # so many bytes, to read on

    def feed(self, data: bytes) -> Iterator[tuple[F, bytes]]:
        if self._begun:
            self._begun += data
            if len(self._begun) < self._needs:
                return
            data = bytes(self._begun)
            self._begun.clear()
        start, needs = 0, _LENGTHS.size
        try:
            while len(data) - start >= needs:
                header_bytes, body_bytes = _LENGTHS.unpack_from(data, start)
                if header_bytes > MAX_HEADER_BYTES or body_bytes > MESSAGE_BYTES:
                    raise ProtocolMismatch(f"a frame claims {header_bytes} + {body_bytes} bytes")
                header_at = start + _LENGTHS.size
                body_at = header_at + header_bytes
                end = body_at + body_bytes
                if len(data) < end:
                    needs = end - start
                    break
                try:
                    frame = self._decode(data[header_at:body_at])
                except msgspec.DecodeError as error:
                    raise ProtocolMismatch(f"a frame could not be read: {error}") from error
                body = data[body_at:end]
                start = end
                yield frame, body
        finally:
            if start < len(data):
                self._begun += data[start:]
                self._needs = needs
