"""Validation of users' URLs."""

from __future__ import annotations

import pytest

from gpufn_core.encoding.urls import check_bus
from gpufn_core.errors import InvalidInput


@pytest.mark.parametrize(
    "url",
    [
        "nats://127.0.0.1:4222",
        "tls://gpufn:p%40ss@nats.example.org",
        "nats://[::1]:4222",
        "nats://u:p@a:1,nats://u:p@b:2, nats://u:p@c:3",
    ],
)
def test_a_bus_is_one_server_or_several(url: str) -> None:
    check_bus(url)


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("foo", "'foo'"),
        ("", "''"),
        ("127.0.0.1:4222", "'127.0.0.1:4222'"),
        ("http://h:4222", "'http://h:4222'"),
        ("ws://h", "'ws://h'"),
        ("nats://", "'nats://'"),
        ("nats://h:99999", "'nats://h:99999'"),
        ("nats://h:x", "'nats://h:x'"),
        ("nats://[::1", "'nats://[::1'"),
        ("nats://a b", "'nats://a b'"),
        ("nats://a,foo", "'foo'"),
        ("nats://a,", "''"),
    ],
)
def test_an_invalid_address_of_a_bus_is_named(url: str, wrong: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_bus(url)
    assert caught.value.message.startswith(f"{wrong} is not ")


def test_a_wrong_address_of_a_bus_does_not_reveal_its_password() -> None:
    with pytest.raises(InvalidInput) as caught:
        check_bus("nats://gpufn:s3cret@h:99999")
    assert "'nats://h:99999'" in caught.value.message
    assert "s3cret" not in caught.value.message
