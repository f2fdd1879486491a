"""Refusals are recorded once per kind and minute."""

from __future__ import annotations

from gpufn_gateway.audit.refusals import MAX_KINDS, OTHERS, WINDOW_S, Refusals, Refused


def refused(address: str = "10.0.0.1") -> Refused:
    return Refused("", "", address, "POST /v1/functions/{fn}/invoke", 401, "unauthorized")


def test_the_first_is_recorded_and_the_rest_is_counted() -> None:
    refusals = Refusals()
    assert [refusals.add(refused(), now) for now in (0.0, 1.0, 2.0)] == [True, False, False]
    assert list(refusals.ended(WINDOW_S - 1)) == []
    assert list(refusals.ended(WINDOW_S)) == [(refused(), 2)]
    assert refusals.add(refused(), WINDOW_S) is True
    assert list(refusals.ended(2 * WINDOW_S)) == []  # one refusal, which was recorded


def test_many_kinds_become_one() -> None:
    refusals = Refusals()
    addresses = [f"10.0.{number >> 8}.{number & 255}" for number in range(MAX_KINDS + 500)]
    recorded = sum(refusals.add(refused(address), 0.0) for address in addresses)
    assert recorded == MAX_KINDS + 1
    assert list(refusals.ended(WINDOW_S)) == [(OTHERS, 499)]
