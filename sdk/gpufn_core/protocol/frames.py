"""Frames between a runner and one worker, over the worker's unix socket.

    8 bytes, big endian: length of the header, length of the body · header (msgpack) · body (user bytes)

The runner treats frames from a worker as hostile: lengths are bounded, and unknown tags or attempts close the
connection. `attempt` is a number that the runner assigns to each Run on a connection. `call` is a number that the
worker assigns to each Call.
"""

from __future__ import annotations

import enum
import functools
import struct
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.worker import Cause, ParkedMemory
from gpufn_core.encoding.msgspec_errors import DECODE_ERRORS
from gpufn_core.errors import ErrorInfo, PayloadTooLarge, ProtocolMismatch
from gpufn_core.protocol import codec
from gpufn_core.protocol.limits import MESSAGE_BYTES
from gpufn_core.spec.priority import Priority

MAX_HEADER_BYTES = 1 << 20
F = TypeVar("F")

_LENGTHS = struct.Struct("!II")


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


# --- runner → worker -------------------------------------------------------------------------------------------------


class Run(Frame, tag=1, frozen=True, array_like=True, gc=False):
    """Run one attempt. `stream` requests Items; `credits` is the number of Items that may be sent before a Credit.

    `shared_body` is the file name of the input in the worker's folder of shared bodies, if the input is not the frame's
    body. `takes_shared_body` allows the result to be such a file. `deadline` is when the runner ends the attempt, in
    unix seconds. `trace` is the caller's traceparent. `delivery` is the subject that acknowledges the attempt's
    delivery, for the next runner; if empty, that runner cannot adopt the attempt. `is_live` requests LiveItems in
    addition to the result.
    """

    attempt: int
    invocation: str
    method: str
    content_type: str
    accept: str
    number: int = 1
    stream: bool = False
    credits: int = 0
    shared_body: str = ""
    takes_shared_body: bool = False
    deadline: float = 0.0
    trace: str = ""
    delivery: str = ""
    is_live: bool = False


class Cancel(Frame, tag=2, frozen=True, array_like=True, gc=False):
    attempt: int


class Credit(Frame, tag=3, frozen=True, array_like=True, gc=False):
    attempt: int
    items: int


class Drain(Frame, tag=4, frozen=True, array_like=True, gc=False):
    """Run the exit hooks and exit. The runner sends no further attempts. `cause` is None if the worker requested its
    end."""

    cause: Cause | None = None


class Park(Frame, tag=7, frozen=True, array_like=True, gc=False):
    """Release the GPU. The worker may use at most `host_bytes` of host memory for this. No attempt runs, and no Run
    comes before the answer: a Ready with `parked`, or a NotParked."""

    host_bytes: int
    cause: Cause | None = None


class Resume(Frame, tag=8, frozen=True, array_like=True, gc=False):
    """The GPU memory is available again. The answer is a Ready, or a StartFailed with the phase ``resume``."""

    cause: Cause | None = None


class Input(Frame, tag=9, frozen=True, array_like=True, gc=False):
    """Event `number` (from 0) for the input of an attempt, which has announced by an InputTaken that it takes any."""

    attempt: int
    number: int


class Trace(Frame, tag=10, frozen=True, array_like=True, gc=False):
    """Trace the allocations of the next `seconds`, or the work of the GPU. The answer is a Traced with the same
    number."""

    number: int
    seconds: float
    is_gpu: bool = False


class Answer(Frame, tag=5, frozen=True, array_like=True, gc=False):
    """The end of a Call: the outcome of a function's request to the platform.

    `shared_body` is the file name of the body in the worker's folder, if the body is not in the frame.
    """

    call: int
    kind: OutcomeKind
    error: ErrorInfo | None
    content_type: str
    shared_body: str = ""


class AnswerItem(Frame, tag=6, frozen=True, array_like=True, gc=False):
    """One item of a streaming Call."""

    call: int
    content_type: str


RunnerFrame = Run | Cancel | Credit | Drain | Park | Resume | Input | Trace | Answer | AnswerItem


# --- worker → runner -------------------------------------------------------------------------------------------------


class Unfinished(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An attempt that an earlier runner started `ran_s` ago and whose Result it did not receive. `delivery` and
    `number` are copied from its Run."""

    attempt: int
    invocation: str
    delivery: str
    ran_s: float
    number: int = 1


class Hello(Frame, tag=10, frozen=True, array_like=True, gc=False):
    """The first frame of a connection. A worker that reconnects to a new runner `was_ready` and may still run attempts
    of the old one. Each of the `unfinished` attempts ends with a Result, as if this runner had started it: the runner
    adopts or cancels them. In addition, `running` other attempts end without a Result, each with a Freed."""

    protocol: int
    worker: str
    was_ready: bool = False
    running: int = 0
    unfinished: tuple[Unfinished, ...] = ()


class Ready(Frame, tag=11, frozen=True, array_like=True, gc=False):
    """The worker is loaded and warm, or parked. `modules` are its loaded third-party modules, for the next template
    process."""

    load_s: float
    warm_s: float
    modules: tuple[str, ...] = ()
    parked: ParkedMemory | None = None


class StartFailed(Frame, tag=12, frozen=True, array_like=True, gc=False):
    """The worker cannot start, or be resumed. The runner reports it, then hangs up, and the worker exits."""

    phase: str
    error: ErrorInfo


class Result(Frame, tag=13, frozen=True, array_like=True, gc=False):
    """The end of an attempt. The slot is free when this is sent. `shared_body` is the file name of the result in the
    worker's folder of large bodies, if the result is not the frame's body. `run_s` is the attempt's run time.
    `charged_s` is its part of the run time if it ran in a batch with others, None if it ran alone."""

    attempt: int
    kind: OutcomeKind
    error: ErrorInfo | None
    content_type: str
    run_s: float
    shared_body: str = ""
    charged_s: float | None = None


class Item(Frame, tag=14, frozen=True, array_like=True, gc=False):
    """One item of a streaming Attempt; costs one credit."""

    attempt: int
    content_type: str


class Log(Frame, tag=15, frozen=True, array_like=True, gc=False):
    """Text that the function printed or logged. Attempt 0 is the worker itself. The body is UTF-8."""

    attempt: int
    stream: str


class Verb(enum.StrEnum):
    """Requests of a function to the platform, named as in the HTTP API."""

    CALL = "call"  # call a function and return its result
    STREAM = "stream"  # call a function and return its items
    SUBMIT = "submit"  # submit a call and return the invocation's id
    STATUS = "status"  # of an invocation
    RESULT = "result"
    CANCEL = "cancel"
    CHECKPOINT = "checkpoint"  # store the body for the attempt's own invocation
    RESTORE = "restore"  # return the last checkpoint
    DATA = "data"  # an operation on a volume, a dict, a queue or a stored value (`gpufn_core.protocol.data`)


class Call(Frame, tag=16, frozen=True, array_like=True, gc=False):
    """A function's request to the platform. `target` is a function or an invocation's id.

    `shared_body` is the file name of the body in the worker's folder, if the body is not in the frame.
    """

    call: int
    verb: str  # a Verb; the runner refuses an unknown one and keeps the worker
    target: str
    method: str = ""
    content_type: str = ""
    accept: str = ""
    timeout_s: float | None = None
    parent: int = 0  # the attempt that makes the request
    priority: Priority | None = None  # the requested class, if any
    shared_body: str = ""


class CloseCall(Frame, tag=17, frozen=True, array_like=True, gc=False):
    """The function does not want the rest of a Call (it left the loop over a stream, or stopped waiting)."""

    call: int


class CallCredit(Frame, tag=18, frozen=True, array_like=True, gc=False):
    """`items` more items of a streaming Call were read. STREAM_WINDOW items may be sent before the first credit."""

    call: int
    items: int


class Freed(Frame, tag=19, frozen=True, array_like=True, gc=False):
    """An attempt of an earlier connection has ended; its slot is free."""


class Draining(Frame, tag=20, frozen=True, array_like=True, gc=False):
    """The worker received a signal to stop. It finishes its attempts, and exits at the runner's Drain."""


class Progress(Frame, tag=21, frozen=True, array_like=True, gc=False):
    """Progress of an attempt: a fraction from 0 to 1 and a message."""

    attempt: int
    fraction: float
    message: str


class NotParked(Frame, tag=22, frozen=True, array_like=True, gc=False):
    """The worker could not park and must be stopped. `needs_bytes` of host memory would have sufficed; 0 if the failure
    had another cause."""

    error: ErrorInfo
    needs_bytes: int = 0


class InputTaken(Frame, tag=23, frozen=True, array_like=True, gc=False):
    """An attempt has taken `taken` bytes of its input in total (`web_session.size_of`). `waits`: it has taken all that
    it received, and needs more."""

    attempt: int
    taken: int
    waits: bool = False


class LiveItem(Frame, tag=24, frozen=True, array_like=True, gc=False):
    """Item `number` (from 0) of a generator, as a preview: the Result has it too."""

    attempt: int
    number: int
    content_type: str


class Traced(Frame, tag=25, frozen=True, array_like=True, gc=False):
    """The end of a Trace. The body has folded stacks, whose numbers are bytes, or the trace of the GPU. With an `error`
    there is none."""

    number: int
    error: ErrorInfo | None = None


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
    | InputTaken
    | LiveItem
    | Traced
)


def encode(frame: msgspec.Struct, body: bytes = b"") -> bytes:
    """Encode a frame. Raises PayloadTooLarge for a frame that the receiver would reject."""
    header = codec.encode(frame)
    header_size, body_size = len(header), len(body)
    if header_size > MAX_HEADER_BYTES:
        raise PayloadTooLarge(f"the header of a frame is {header_size} bytes, more than the {MAX_HEADER_BYTES} allowed")
    if body_size > MESSAGE_BYTES:
        raise PayloadTooLarge(f"the body of a frame is {body_size} bytes, more than the {MESSAGE_BYTES} allowed")
    return b"".join((_LENGTHS.pack(header_size, body_size), header, body))


@functools.cache
def _decoder(frame_type: Any) -> Callable[[bytes | memoryview], Any]:
    """Return the decoder. It takes 50 µs to make, and each connection needs one."""
    return msgspec.msgpack.Decoder(frame_type).decode


class FrameReader(Generic[F]):
    """Incremental parser of frames. Feed it received bytes; it yields complete frames.

    Raises ProtocolMismatch for bytes that cannot be a frame. The connection must be closed then.
    """

    def __init__(self, frame_type: Any) -> None:
        self._decode: Callable[[bytes | memoryview], F] = _decoder(frame_type)
        self._partial = bytearray()  # an incomplete frame
        self._needed = 0  # size at which `_partial` has to be parsed again

    def feed(self, data: bytes) -> Iterator[tuple[F, bytes]]:
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:
                return
            data = bytes(self._partial)
            self._partial.clear()
        start, size, needed = 0, len(data), _LENGTHS.size
        try:
            while size - start >= needed:
                header_bytes, body_bytes = _LENGTHS.unpack_from(data, start)
                if header_bytes > MAX_HEADER_BYTES or body_bytes > MESSAGE_BYTES:
                    raise ProtocolMismatch(f"a frame has a length of {header_bytes} + {body_bytes} bytes")
                header_at = start + _LENGTHS.size
                body_at = header_at + header_bytes
                end = body_at + body_bytes
                if size < end:
                    needed = end - start
                    break
                try:
                    frame = self._decode(data[header_at:body_at])
                except DECODE_ERRORS as error:
                    raise ProtocolMismatch(f"a frame could not be decoded: {error}") from error
                body = data[body_at:end]
                start = end
                yield frame, body
        finally:
            if start < size:
                self._partial += data[start:]
                self._needed = needed
