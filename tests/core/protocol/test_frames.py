"""Round trips of frames, however the stream is split, and bytes that are no frames."""

from __future__ import annotations

import contextlib
import itertools
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.errors import ErrorInfo, PayloadTooLarge, ProtocolMismatch
from gpufn_core.protocol import codec, fast_path, frames
from gpufn_core.protocol.frames import MAX_HEADER_BYTES, FrameReader, Item, WorkerFrame
from gpufn_core.protocol.limits import MESSAGE_BYTES
from gpufn_core.spec.priority import Priority

# The frames that each end of a socket reads. A worker may be hostile, because its user code can write to the socket.
KINDS = (WorkerFrame, frames.RunnerFrame, fast_path.GatewayFrame, fast_path.RunnerFrame)
_DEEP = 100_000
_SIZES = st.sampled_from([0, 1, 100, 5000, 70_000])


@given(st.lists(_SIZES, max_size=6), st.lists(st.integers(0, 400_000), max_size=8))
def test_frames_are_complete_at_any_cut_of_the_stream(sizes: list[int], cuts: list[int]) -> None:
    sent = [(Item(number, "text/plain"), bytes([number]) * size) for number, size in enumerate(sizes)]
    stream = b"".join(frames.encode(*each) for each in sent)
    reader: FrameReader[WorkerFrame] = FrameReader(WorkerFrame)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    assert [each for at, to in itertools.pairwise(places) for each in reader.feed(stream[at:to])] == sent


def test_byte_by_byte_as_well() -> None:
    sent = [(Item(1, "a"), b""), (Item(2, "b"), b"xyz")]
    reader: FrameReader[WorkerFrame] = FrameReader(WorkerFrame)
    stream = b"".join(frames.encode(*each) for each in sent)
    assert [each for byte in stream for each in reader.feed(bytes([byte]))] == sent


def test_a_frame_in_small_pieces_uses_no_more_memory_than_its_length() -> None:
    """A worker chooses how the stream is split."""
    data = frames.encode(Item(1, "a"), bytes(200_000))
    reader: FrameReader[WorkerFrame] = FrameReader(WorkerFrame)
    tracemalloc.start()
    try:
        assert [each for at in range(0, len(data) - 2, 2) for each in reader.feed(data[at : at + 2])] == []
        assert tracemalloc.get_traced_memory()[0] < 2 * len(data)
    finally:
        tracemalloc.stop()


def test_a_frame_above_the_limit_is_refused_by_sender_and_reader() -> None:
    with pytest.raises(PayloadTooLarge):
        frames.encode(Item(1, "a"), bytes(MESSAGE_BYTES + 1))
    with pytest.raises(PayloadTooLarge):
        frames.encode(Item(1, "a" * MAX_HEADER_BYTES))
    with pytest.raises(ProtocolMismatch, match=f"1 \\+ {MESSAGE_BYTES + 1} bytes"):
        list(FrameReader[WorkerFrame](WorkerFrame).feed(struct.pack("!II", 1, MESSAGE_BYTES + 1)))


def test_complete_frames_before_a_protocol_error_are_read() -> None:
    reader: FrameReader[WorkerFrame] = FrameReader(WorkerFrame)
    read = reader.feed(frames.encode(Item(1, "a"), b"x") + struct.pack("!II", 1, 0) + b"\xc1")
    assert next(read) == (Item(1, "a"), b"x")
    with pytest.raises(ProtocolMismatch, match="decoded"):
        next(read)


def read(kind: Any, header: bytes, *, as_frame: bool) -> None:
    """Decode a header as a frame or as a message. Raises ProtocolMismatch."""
    if as_frame:
        list(FrameReader[Any](kind).feed(struct.pack("!II", len(header), 0) + header))
    else:
        codec.Unpacker[Any](kind)(len(header).to_bytes(4, "big") + header)


@pytest.mark.parametrize("as_frame", [True, False])
@pytest.mark.parametrize(
    "header",
    [
        b"\x93\x0e\x01\xa2\xff\xfe",  # a text that is not UTF-8
        b"\x94\x0e\x01\xa1a" + b"\x91" * _DEEP + b"\xc0",  # a field of a newer version, nested deeply
        b"\xdd\xff\xff\xff\xff\x0e",  # an array of 4 billion elements
        b"",
    ],
)
def test_bytes_that_msgspec_refuses_in_different_ways_break_the_protocol(header: bytes, as_frame: bool) -> None:
    """Bug: the first two raised UnicodeDecodeError and RecursionError, which no end of a socket caught."""
    with pytest.raises(ProtocolMismatch):
        read(WorkerFrame, header, as_frame=as_frame)


_VALID = st.sampled_from(
    [
        frames.encode(frames.Hello(1, "w", unfinished=(frames.Unfinished(1, "i", "d", 0.5),)))[8:],
        frames.encode(frames.Result(1, OutcomeKind.RAISED, ErrorInfo("function_raised", "a"), "text/plain", 0.5))[8:],
        frames.encode(frames.Run(1, "i", "", "a", "b"))[8:],
        frames.encode(frames.Call(1, frames.Verb.CALL, "f", priority=Priority.HI))[8:],
        frames.encode(fast_path.Withdraw("i"))[8:],
        frames.encode(fast_path.Limit("f", 1, 1.0, 3))[8:],
    ]
)


@given(
    st.sampled_from(KINDS),
    st.one_of(st.binary(max_size=64), _VALID),
    st.lists(st.tuples(st.integers(0, 80), st.binary(min_size=1, max_size=3)), max_size=3),
    st.booleans(),
)
def test_whatever_the_bytes_are_they_make_frames_or_break_the_protocol(
    kind: Any, header: bytes, changes: list[tuple[int, bytes]], as_frame: bool
) -> None:
    for place, change in changes:
        header = header[:place] + change + header[place + len(change) :]
    with contextlib.suppress(ProtocolMismatch):
        read(kind, header, as_frame=as_frame)


@given(st.sampled_from(KINDS), st.lists(st.binary(max_size=40), max_size=5))
def test_whatever_arrives_on_a_socket_makes_frames_or_breaks_the_protocol(kind: Any, parts: list[bytes]) -> None:
    reader = FrameReader[Any](kind)
    with contextlib.suppress(ProtocolMismatch):
        for part in parts:
            list(reader.feed(part))
