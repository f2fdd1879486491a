"""nftables rules of egress: a policy in, the text of a ruleset out. Pure.

One interface of the node leads to the workers: one end of a veth pair, or a bridge of Docker. Its table has the
interface's name. A packet from it may leave the node for any public address. These chains come before the chains of
Docker and of firewalls, which see the accepted packets: a `drop` or `reject` is final, an `accept` is not.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Services of clouds that provide a virtual machine with its credentials, at addresses that a policy may allow by
# accident.
METADATA: Final = (
    "169.254.169.254",  # AWS, Google, Azure, Oracle
    "169.254.170.2",  # containers of AWS
    "100.100.100.200",  # Alibaba
    "168.63.129.16",  # Azure's platform, a public address
    "fd00:ec2::254",  # AWS
)
REFUSED: Final = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
    *("192.0.0.0/24", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/3"),
    *("::/127", "::ffff:0:0/96", "64:ff9b:1::/48", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
    # Public prefixes in front of an IPv4 address: translation leads to private networks.
    *("64:ff9b::/96", "2002::/16", "2001::/32"),
)
_IPV4: Final = 4
_DNS: Final = "meta l4proto { tcp, udp } th dport 53"
_REJECT: Final = "goto refuse"
_REFUSE: Final = ("meta l4proto tcp reject with tcp reset", "reject with icmpx admin-prohibited")  # at once, not later


@dataclass(frozen=True)
class Policy:
    """The addresses that workers may reach in addition to the internet: the networks that the node's operator allows,
    and port 53 of its resolvers. The resolver `on_loopback` is reached by the workers' gateway."""

    allowed: tuple[Network, ...] = ()
    resolvers: tuple[ipaddress.IPv4Address, ...] = ()
    on_loopback: ipaddress.IPv4Address | None = None


def of_node(interface: str, policy: Policy, network: ipaddress.IPv4Interface | None = None) -> str:
    """Return the table for the node. `network` is the interface's own address; without it another program, such as
    Docker, translates the workers' addresses.

    >>> "10.0.0.0/8" in of_node("gpfw-1", Policy())
    True
    """
    chains = {
        "refuse": [*_REFUSE],
        "workers": _to_others(policy),
        "forward": [
            "type filter hook forward priority filter - 10; policy accept;",
            f'iifname "{interface}" jump workers',
            f'oifname "{interface}" ct state established,related accept',
            f'oifname "{interface}" iifname != "{interface}" drop',
        ],
        "input": [
            "type filter hook input priority filter - 10; policy accept;",
            f'iifname != "{interface}" accept',
            "ct state established,related accept",
            *_matching(map(str, policy.resolvers), f"{_DNS} accept"),
            *_matching([str(policy.on_loopback)] if network and policy.on_loopback else [], f"{_DNS} accept"),
            _REJECT,
        ],
    }
    if network is not None:
        chains["postrouting"] = [
            "type nat hook postrouting priority srcnat; policy accept;",
            f'ip saddr {network.network} oifname != "{interface}" masquerade',
        ]
        if policy.on_loopback is not None:
            chains["prerouting"] = [
                "type nat hook prerouting priority dstnat - 10; policy accept;",
                f'iifname "{interface}" ip daddr {network.ip} {_DNS} dnat ip to {policy.on_loopback}',
            ]
    return _table(interface, chains)


def of_namespace(name: str) -> str:
    """Return the table for the workers' namespace: they share its address, and must not reach each other."""
    chains = {
        "output": ["type filter hook output priority filter; policy accept;", "fib daddr type != unicast drop"],
        "input": ["type filter hook input priority filter; policy drop;", "ct state established,related accept"],
    }
    return _table(name, chains)


def routing(policy: Policy, gateway: ipaddress.IPv4Address, own: ipaddress.IPv4Address) -> list[str]:
    """Return the routing rules for the workers' namespace, as commands of `ip`. They repeat the table for the node:
    connections fail at once, with EACCES, and an administrator may flush the tables of the node. `own` is the workers'
    address: connections to it and to loopback would fail after minutes."""
    resolvers = (*policy.resolvers, gateway) if policy.on_loopback else policy.resolvers
    rules = [
        *(f"iif lo to {each} prohibit" for each in ("127.0.0.0/8", own)),
        "lookup local",
        *(f"to {each} ipproto {protocol} dport 53 lookup main" for each in resolvers for protocol in ("udp", "tcp")),
        *(f"to {each} prohibit" for each in METADATA if ":" not in each),
        *(f"to {each} lookup main" for each in policy.allowed if each.version == _IPV4),
        *(f"to {each} prohibit" for each in REFUSED if ":" not in each),
        "lookup main",
    ]
    return ["rule flush", *(f"rule add pref {place} {rule}" for place, rule in enumerate(rules, 1))]


def _to_others(policy: Policy) -> list[str]:
    """Return the rules for packets to other machines. The order matters: a resolver may be a metadata service too."""
    return [
        *_matching(map(str, policy.resolvers), f"{_DNS} accept"),
        *_matching(METADATA, _REJECT),
        *_matching(map(str, policy.allowed), "accept"),
        *_matching(REFUSED, _REJECT),
    ]


def _matching(addresses: Iterable[str], verdict: str) -> list[str]:
    """Return a rule per IP version for packets to these addresses."""
    chosen = tuple(addresses)
    versions = {"ip": [each for each in chosen if ":" not in each], "ip6": [each for each in chosen if ":" in each]}
    return [f"{version} daddr {{ {', '.join(each)} }} {verdict}" for version, each in versions.items() if each]


def _table(name: str, chains: dict[str, list[str]]) -> str:
    """Return a ruleset that replaces the table at once, also if there is none."""
    lines = [f"table inet {name}", f"delete table inet {name}", f"table inet {name} {{"]
    for chain, rules in chains.items():
        lines += [f"    chain {chain} {{", *(f"        {rule}" for rule in rules), "    }"]
    return "\n".join([*lines, "}", ""])
