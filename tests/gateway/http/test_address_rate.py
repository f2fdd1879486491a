"""The bound on the requests per second of one address."""

from __future__ import annotations

from typing import Any

from gpufn_gateway.auth.access import new_key
from gpufn_gateway.http.connection import address_rate
from gpufn_gateway.http.connection.address_rate import AddressRate
from tests.gateway.conftest import Gateway, ManualClock


def test_each_address_has_a_rate_of_its_own() -> None:
    limit = AddressRate(2.0)
    assert [limit.wait_s("192.0.2.1", 0.0) for _ in range(3)] == [0.0, 0.0, 0.5]
    assert limit.wait_s("192.0.2.2", 0.0) == 0.0
    assert [limit.wait_s(f"2001:db8::{number}", 0.0) > 0 for number in range(1, 4)] == [False, False, True]
    assert limit.wait_s("192.0.2.1", 0.5) == 0.0


def test_the_longest_silent_address_is_forgotten(monkeypatch: Any) -> None:
    monkeypatch.setattr(address_rate, "MAX_ADDRESSES", 2)
    limit = AddressRate(1.0)
    for address in ("192.0.2.1", "192.0.2.2", "192.0.2.1", "192.0.2.3"):
        limit.wait_s(address, 0.0)
    assert limit.wait_s("192.0.2.1", 0.0) > 0
    assert limit.wait_s("192.0.2.2", 0.0) == 0.0


async def test_requests_beyond_the_rate_are_refused_before_their_key_is_read(
    clock: ManualClock, make: Any, problem: Any
) -> None:
    gateway = Gateway(clock, address_rate=AddressRate(2.0))
    gateway.deploy(make.spec("embed"))
    gateway.access.put(new_key("k", ("admin",), 0.0)[0])
    answers = [await gateway.post("/v1/functions/embed/invoke", b"{}") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [401, 401, 429]
    assert problem(answers[2]) == (429, "rate_limited")
    assert int(answers[2].headers["retry-after"]) == 1
