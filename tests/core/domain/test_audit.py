"""The hash chain of the audit log."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufn_core.domain.audit import START, AuditRecord, ChainCheck, check


def chain(count: int) -> list[AuditRecord]:
    records: list[AuditRecord] = []
    for seq in range(1, count + 1):
        previous = records[-1].hash if records else START
        records.append(
            AuditRecord(
                seq=seq, at=float(seq), principal="k1", action="POST /v1/keys", status=201, previous=previous,
                details={"b": "1", "a": "2"},
            )
        )  # fmt: skip
    return records


def test_a_chain_is_intact_from_any_record_on() -> None:
    records = chain(5)
    assert check(records) is None
    assert check(records[2:]) is None
    assert check([]) is None


@pytest.mark.parametrize(
    "change",
    [
        {"object": "g"}, {"at": 2.5}, {"principal": ""}, {"status": 200}, {"count": 2}, {"details": {"b": "1"}},
        {"previous": START}, {"seq": 9},
    ],
)  # fmt: skip
@pytest.mark.parametrize("index", [0, 2])
def test_a_changed_record_breaks_the_chain(change: dict[str, Any], index: int) -> None:
    records = chain(5)
    records[index] = msgspec.structs.replace(records[index], **change)
    if index == 0 and change == {"previous": START}:
        assert check(records) is None  # no change
    else:
        assert check(records) is not None


@given(st.integers(0, 4), st.integers(0, 4))
def test_removal_insertion_and_order_are_detected(one: int, other: int) -> None:
    records = chain(6)
    removed = records[:one] + records[one + 1 :]
    fault = check(removed)
    if one == 0:
        assert fault is None  # older records may be gone
    else:
        assert fault is not None
        assert fault.seq == one + 1
    swapped = list(records)
    swapped[one], swapped[other + 1] = swapped[other + 1], swapped[one]
    if one != other + 1:
        assert check(swapped) is not None


def test_the_bytes_must_be_canonical() -> None:
    (record,) = chain(1)
    checker = ChainCheck()
    checker.add(record, record.canonical().replace(b"{", b"{ ", 1))
    assert checker.fault is not None
    assert record.hash == msgspec.structs.replace(record, details={"a": "2", "b": "1"}).hash
