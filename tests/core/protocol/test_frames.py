"""Round trips of frames, however the stream is split."""

from __future__ import annotations

import itertools
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufn_core.errors import PayloadTooLarge, ProtocolMismatch
from gpufn_core.protocol import frames
from gpufn_core.protocol.frames import MAX_HEADER_BYTES, FrameReader, Item, WorkerFrame
from gpufn_core.protocol.limits import MESSAGE_BYTES

_SIZES = st.sampled_from([0, 1, 100, 5000, 70_000])


@given(st.lists(_SIZES, max_size=6), st.lists(st.integers(0, 400_000), max_size=8))
def test_frames_come_out_whole_wherever_the_stream_is_cut(sizes: list[int], cuts: list[int]) -> None:
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


def test_a_frame_that_comes_in_small_pieces_takes_no_more_memory_than_it_is_long() -> None:
    """A worker chooses how the stream is split."""
    data = frames.encode(Item(1, "a"), bytes(200_000))
    reader: FrameReader[WorkerFrame] = FrameReader(WorkerFrame)
    tracemalloc.start()
    try:
        assert [each for at in range(0, len(data) - 2, 2) for each in reader.feed(data[at : at + 2])] == []
        assert tracemalloc.get_traced_memory()[0] < 2 * len(data)
    finally:
        tracemalloc.stop()


def test_what_is_larger_than_a_frame_is_refused_by_who_sends_it_and_by_who_reads_it() -> None:
    with pytest.raises(PayloadTooLarge):
        frames.encode(Item(1, "a"), bytes(MESSAGE_BYTES + 1))
    with pytest.raises(PayloadTooLarge):
        frames.encode(Item(1, "a" * MAX_HEADER_BYTES))
    with pytest.raises(ProtocolMismatch, match=f"1 \\+ {MESSAGE_BYTES + 1} bytes"):
        list(FrameReader[WorkerFrame](WorkerFrame).feed(struct.pack("!II", 1, MESSAGE_BYTES + 1)))


def test_what_came_whole_before_a_break_in_the_protocol_is_read() -> None:
    reader: FrameReader[WorkerFrame] = FrameReader(WorkerFrame)
    read = reader.feed(frames.encode(Item(1, "a"), b"x") + struct.pack("!II", 1, 0) + b"\xc1")
    assert next(read) == (Item(1, "a"), b"x")
    with pytest.raises(ProtocolMismatch, match="decoded"):
        next(read)
