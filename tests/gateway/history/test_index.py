"""A gateway's copy of the history: rebuilt from messages, each of which counts once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufn_core.protocol import subjects
from gpufn_gateway.history.blocks import (
    HOUR,
    MINUTE,
    SECONDS_10,
    Event,
    EventKind,
    encode_blocks,
    encode_event,
    subject_of,
)
from gpufn_gateway.history.fields import Field, Points
from gpufn_gateway.history.index import Index
from gpufn_platform.bus.storage.ordered_reader import StoredMessage

_NOW = 1_795_000_000 // HOUR * HOUR
_seq = itertools.count(1)


def message(resolution: int, slot: int, points: Points) -> StoredMessage:
    (payload,) = encode_blocks(resolution, slot, "gw", points)
    return StoredMessage(subject_of(resolution), next(_seq), payload, {}, 0.0)


def calls(count: int) -> Points:
    return {"function:f": {Field.CALLS: count}}


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    index = Index(tmp_path)
    index.open("stream")
    yield index
    index.close()


def stored(index: Index, resolution: int) -> list[int]:
    found = index.read(resolution, (_NOW - 86_400) // resolution, (_NOW + 86_400) // resolution, ["function:f"])
    return [points["function:f"][Field.CALLS] for _, points in sorted(found.items())]


def test_ten_seconds_add_up_to_minutes_and_hours_and_a_message_counts_once(index: Index, tmp_path: Path) -> None:
    messages = [message(SECONDS_10, _NOW // 10 + number, calls(1)) for number in range(7)]
    index.apply(messages[:4])
    index.apply(messages)  # some of them again
    index.close()  # and after a restart
    index.open("stream")
    index.apply(messages)
    assert [stored(index, each) for each in (SECONDS_10, MINUTE, HOUR)] == [[1] * 7, [6, 1], [7]]
    assert set(index.unpublished(_NOW + 2 * HOUR)) == {
        (MINUTE, _NOW // 60),
        (MINUTE, _NOW // 60 + 1),
        (HOUR, _NOW // HOUR),
    }


def test_a_new_copy_reads_removed_seconds_from_minutes(index: Index) -> None:
    index.apply([message(SECONDS_10, _NOW // 10 + 5, calls(1)), message(MINUTE, _NOW // 60, calls(6))])
    assert (stored(index, MINUTE), index.unpublished(_NOW + 60)) == ([6], [])


def test_seconds_after_the_clock_was_set_back_are_added(index: Index) -> None:
    for _ in range(2):
        index.apply([message(SECONDS_10, _NOW // 10, calls(3))])
    assert (stored(index, SECONDS_10), stored(index, MINUTE)) == ([6], [6])


def test_a_minute_in_which_a_second_revision_began_has_both(index: Index) -> None:
    alone: Points = {"function:f": {Field.CALLS: 5, Field.REVISION: 1}}
    both: Points = {"function:f": {Field.CALLS: 3}, "function:f@1": {Field.CALLS: 1}, "function:f@2": {Field.CALLS: 2}}
    index.apply([message(SECONDS_10, _NOW // 10, alone), message(SECONDS_10, _NOW // 10 + 1, both)])
    points = index.points_at(MINUTE, _NOW // MINUTE)
    assert {name: point[Field.CALLS] for name, point in points.items()} == {
        "function:f": 8,
        "function:f@1": 6,
        "function:f@2": 2,
    }


def test_a_garbage_message_is_skipped(index: Index) -> None:
    broken = [
        StoredMessage(subject_of(SECONDS_10), next(_seq), data, {}, 0.0) for data in (b"", b"x" * 99, b"\x78\x9c\x03")
    ]
    index.apply([*broken, message(SECONDS_10, _NOW // 10, calls(1))])
    assert stored(index, SECONDS_10) == [1]


@pytest.mark.parametrize("damage", [b"garbage", b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_damaged_file_is_moved_aside_and_the_copy_starts_empty(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "0.db").write_bytes(damage)
    index = Index(tmp_path)
    index.open("stream")
    assert (index.seq, (tmp_path / "0.db.damaged").read_bytes()) == (0, damage)
    index.close()


def test_a_copy_of_another_stream_is_emptied(index: Index) -> None:
    index.apply([message(SECONDS_10, _NOW // 10, calls(1))])
    index.open("another")
    assert (stored(index, HOUR), index.seq) == ([], 0)


def test_gateways_of_one_home_have_a_file_each(index: Index, tmp_path: Path) -> None:
    other = Index(tmp_path)
    other.open("stream")
    assert {path.name for path in tmp_path.glob("*.db")} == {"0.db", "1.db"}
    other.close()


def test_points_are_pruned_by_age_and_by_size_and_so_are_their_subjects(tmp_path: Path) -> None:
    index = Index(tmp_path, {SECONDS_10: 1 << 20, MINUTE: 1_000, HOUR: 1 << 20})
    index.open("stream")
    for age_s in (3 * HOUR, 2 * HOUR + 60, 60):
        index.apply([message(SECONDS_10, (_NOW - age_s) // 10, {f"function:f-{age_s}": {Field.CALLS: 1}})])
    index.apply([message(MINUTE, _NOW // MINUTE - number, calls(1)) for number in range(1, 200)])
    index.prune(_NOW)
    assert index.first_slot(SECONDS_10) == (_NOW - 60) // 10
    assert 10 < len(stored(index, MINUTE)) < 60
    assert stored(index, MINUTE)[-1] == 1  # the newest stay
    index.prune(_NOW + 40 * 86_400)
    assert index.names("") == []
    index.close()


def test_events_are_paged_by_their_number(index: Index) -> None:
    for number in range(5):
        event = Event(float(number), EventKind.FAULT, "node:a", str(number))
        index.apply([StoredMessage(subjects.HISTORY_EVENTS, next(_seq), encode_event(event), {}, 0.0)])
    first = index.events(1 << 53, 3)
    rest = index.events(first[-1][0], 3)
    assert [event.text for _, event in (*first, *rest)] == ["4", "3", "2", "1", "0"]
