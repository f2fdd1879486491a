from __future__ import annotations

import pytest

from gpufn_core.errors import InvalidInput
from gpufn_gateway.webhooks.address_policy import AddressPolicy


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("127.0.0.1", "a loopback"),
        ("127.9.9.9", "a loopback"),
        ("0.0.0.0", "a private"),
        ("10.1.2.3", "a private"),
        ("172.16.0.1", "a private"),
        ("192.168.1.1", "a private"),
        ("100.64.0.1", "a reserved"),
        ("169.254.169.254", "a link-local"),
        ("224.0.0.1", "a multicast"),
        ("255.255.255.255", "a private"),
        ("::1", "a loopback"),
        ("::", "a private"),
        ("fe80::1%eth0", "a link-local"),
        ("fd00::1", "a private"),
        ("ff02::1", "a multicast"),
        ("fec0::1", "a private"),  # site-local: replaced by fd00::/8, but networks still route it
        ("feff:1::1", "a private"),
        ("2001:db8::1", "a private"),
        ("::10.0.0.1", "a reserved"),
        ("::ffff:0:10.0.0.1", "a reserved"),
        ("2001:0:a00:1::", "a private"),  # Teredo of 10.0.0.1
        ("198.18.0.1", "a private"),
        ("::ffff:127.0.0.1", "a loopback"),
        ("::ffff:10.0.0.1", "a private"),
        ("2002:7f00:1::", "a loopback"),  # 6to4 of 127.0.0.1
        ("64:ff9b::a9fe:a9fe", "a link-local"),  # NAT64 of 169.254.169.254
    ],
)
def test_addresses_outside_the_internet_are_refused(address: str, kind: str) -> None:
    refusal = AddressPolicy().refusal(address)
    assert refusal is not None
    assert f"is {kind} address" in refusal


@pytest.mark.parametrize("address", ["3fff:1::1", "192.0.0.8", "64:ff9b:1::a00:1"])  # the last: local NAT64 prefix
def test_addresses_that_pythons_classify_differently_are_always_refused(address: str) -> None:
    assert AddressPolicy().refusal(address) is not None


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_the_internet_is_allowed(address: str) -> None:
    assert AddressPolicy().refusal(address) is None


@pytest.mark.parametrize(
    ("address", "is_allowed"),
    [
        ("10.0.0.1", True),
        ("11.0.0.1", True),
        ("192.168.0.1", False),
        ("::ffff:10.0.0.1", True),
        ("fd12::1", True),
        ("fd13::1", False),
    ],
)
def test_the_operator_allows_networks(address: str, is_allowed: bool) -> None:
    assert (AddressPolicy(["10.0.0.0/8", "fd12::/16"]).refusal(address) is None) is is_allowed


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:80/x", "no webhook is sent to 127.0.0.1: 127.0.0.1 is a loopback address"),
        ("http://2130706433/x", "no webhook is sent to 2130706433: write the address as 192.0.2.1"),
        ("http://0x7F.1/x", "no webhook is sent to 0x7f.1"),
        ("http://localhost/x", "no webhook is sent to localhost: 127.0.0.1 is a loopback address"),
        ("http://a.localhost/x", "no webhook is sent to a.localhost"),
        ("http://[::1]/x", "no webhook is sent to ::1"),
        ("http://169.254.169.254/latest/meta-data", "is a link-local address; GPUFN_WEBHOOK_NETWORKS can allow it"),
        ("ftp://example.org", "a webhook goes to https://"),
        ("https://", "a webhook goes to https://"),
        ("https://user:pass@example.org", "no user and no password"),
        ("https://example.org:99999/", "a webhook goes to https://"),
        ("https://exa mple.org/", "a webhook goes to https://"),
        ("https://example.org/\r\nx: y", "a webhook goes to https://"),
        ("https://example.org/" + "x" * 3000, "at most 2048 characters"),
    ],
)
def test_an_address_that_cannot_be_is_refused_at_once(url: str, said: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        AddressPolicy().check(url)
    assert said in raised.value.message
    assert raised.value.field == "webhook"


def test_a_name_is_judged_when_it_is_connected_to() -> None:
    AddressPolicy().check("https://hooks.example.org:8443/a?b=c")
