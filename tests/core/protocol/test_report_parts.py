from __future__ import annotations

import msgspec

from gpufn_core.protocol.report_parts import PART_BYTES, Statuses, encode_parts
from gpufn_core.protocol.reports import ControllerReport, FunctionStatus, WorkerCounts

_decode = msgspec.msgpack.Decoder(ControllerReport).decode


def status(name: str, serving: int = 1, reason: str = "") -> FunctionStatus:
    return FunctionStatus(function=name, serving=serving, workers=WorkerCounts(), reason=reason)


def full(sequence: int, *statuses: FunctionStatus, epoch: int = 1) -> list[ControllerReport]:
    report = ControllerReport("c", epoch, 0.0, statuses, sequence=sequence)
    return [_decode(part) for part in encode_parts(report, 4096)]


MANY = [status(f"f-{number:03}", reason="no room " * 20) for number in range(100)]


def test_a_large_report_is_split_by_function_and_joined_again() -> None:
    parts = full(1, *MANY)
    assert len(parts) > 3
    known = Statuses()
    known.take(full(0, status("deleted"))[0])
    for part in parts:
        known.take(part)
    assert [known.get(each.function) for each in MANY] == MANY
    assert known.get("deleted") is None


def test_parts_are_bounded_unless_one_status_alone_is_larger() -> None:
    large = status("large", reason="x" * 10_000)
    report = ControllerReport("c", 1, 0.0, (*MANY[:50], large, *MANY[50:]))
    sizes = [len(part) for part in encode_parts(report, 4096)]
    assert sum(size > 4096 for size in sizes) == 1
    assert max(sizes) < 12_000
    assert len(encode_parts(report, PART_BYTES)) == 1


def test_a_lost_part_keeps_the_earlier_values_of_its_functions() -> None:
    known = Statuses()
    for part in full(1, *MANY):
        known.take(part)
    newer = [status(each.function, 2, each.reason) for each in MANY]
    _, *others = full(2, *newer)
    for part in others:
        known.take(part)
    assert (known.get("f-000"), known.get("f-099")) == (MANY[0], newer[99])
    for part in full(3, *newer[50:]):
        known.take(part)
    assert (known.get("f-000"), known.get("f-050")) == (None, newer[50])


def test_a_change_between_two_parts_counts() -> None:
    known = Statuses()
    first, *others = full(1, *MANY)
    known.take(first)
    known.take(ControllerReport("c", 1, 0.0, (status("new"),), partial=True))
    for part in others:
        known.take(part)
    assert known.get("new") == status("new")


def test_a_reader_of_an_older_version_treats_parts_as_changes() -> None:
    assert all(part.partial for part in full(1, *MANY))
