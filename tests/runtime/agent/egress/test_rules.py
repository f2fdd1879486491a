"""The rules of egress, by a small interpreter of what the rules of a chain say about a destination."""

from __future__ import annotations

import ipaddress
import re

import pytest

from gpufn_runtime.agent.egress import rules
from gpufn_runtime.agent.egress.rules import Policy

NETWORK = ipaddress.IPv4Interface("169.254.9.1/30")
POLICY = Policy(
    allowed=(ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("fd12::/32"), ipaddress.ip_network("0.0.0.0/0")),
    resolvers=(ipaddress.IPv4Address("10.9.9.53"), ipaddress.IPv4Address("169.254.169.254")),
)
STRICT = Policy()


def verdict(policy: Policy, address: str, port: int = 443) -> str:
    """Return what the chain for other machines says about a packet."""
    text = rules.of_node("gpfw-1", policy, NETWORK)
    chain = text.partition("chain workers {")[2].partition("}\n    chain")[0]
    ip = ipaddress.ip_address(address)
    for line in chain.splitlines():
        rule = re.fullmatch(r"\s*(ip|ip6) daddr \{ (.*?) \} (.*)", line)
        if rule is None or (rule[1] == "ip") != (ip.version == 4):
            continue
        if "th dport 53" in rule[3] and port != 53:
            continue
        if any(ip in ipaddress.ip_network(each) for each in rule[2].split(", ")):
            return rule[3].split()[-1]
    return "accept"


@pytest.mark.parametrize(
    ("policy", "address", "port", "outcome"),
    [
        (STRICT, "93.184.216.34", 443, "accept"),
        (STRICT, "2606:4700::1", 443, "accept"),
        *((STRICT, address, 443, "refuse") for address in ("0.1.2.3", "10.0.0.1", "100.64.0.1", "127.0.0.1")),
        *((STRICT, address, 443, "refuse") for address in ("169.254.169.254", "168.63.129.16", "172.31.255.255")),
        *((STRICT, address, 443, "refuse") for address in ("192.168.0.1", "224.0.0.251", "255.255.255.255")),
        *((STRICT, address, 443, "refuse") for address in ("::1", "fe80::1", "fd00:ec2::254", "fc00::1", "ff02::1")),
        *((STRICT, address, 443, "refuse") for address in ("::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::")),
        (POLICY, "10.1.2.3", 443, "accept"),
        (POLICY, "fd12::1", 443, "accept"),
        (POLICY, "fd13::1", 443, "refuse"),
        (POLICY, "10.9.9.53", 53, "accept"),
        (POLICY, "169.254.169.254", 53, "accept"),
        (POLICY, "169.254.169.254", 80, "refuse"),  # whatever is allowed
        (POLICY, "168.63.129.16", 80, "refuse"),
    ],
)
def test_a_policy_decides_by_address(policy: Policy, address: str, port: int, outcome: str) -> None:
    assert verdict(policy, address, port) == outcome


def test_without_an_address_of_its_own_an_interface_has_no_translation() -> None:
    for text in (rules.of_node("gpfd-1", POLICY), rules.of_node("gpfd-1", Policy(on_loopback=NETWORK.ip))):
        assert "nat" not in text.split()
        assert "gpfd-1" in text
