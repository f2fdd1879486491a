"""DNS of workers in the egress namespace, which has no loopback interface. Pure.

The node's resolv.conf names its resolvers. systemd-resolved listens on a loopback address and lists its own resolvers
in another file: workers use those. Any other resolver on a loopback address is reached by the workers' gateway.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final

RESOLV_CONF: Final = "/etc/resolv.conf"
UPSTREAMS: Final = "/run/systemd/resolve/resolv.conf"
_MOST_SERVERS: Final = 3  # the C library reads no more
_STUB: Final = ipaddress.IPv4Address("127.0.0.53")
_DEFAULT: Final = ipaddress.IPv4Address("127.0.0.1")  # the C library's default, if no resolver is named


@dataclass(frozen=True)
class Dns:
    """IPv4 resolvers, the one on a loopback address, and the lines of resolv.conf about something else."""

    servers: tuple[ipaddress.IPv4Address, ...]
    on_loopback: ipaddress.IPv4Address | None = None
    other_lines: tuple[str, ...] = ()


def read(text: str, upstreams: str = "") -> Dns:
    """Return the meaning of the resolv.conf `text`; `upstreams` is systemd-resolved's file.

    >>> read("nameserver 127.0.0.53", "nameserver 10.0.0.2").servers
    (IPv4Address('10.0.0.2'),)
    """
    named, other_lines = _parse(text)
    if _STUB in named and (behind := _parse(upstreams)[0]):
        named = behind
    servers = tuple(each for each in named if isinstance(each, ipaddress.IPv4Address) and not each.is_loopback)
    if servers:
        return Dns(servers[:_MOST_SERVERS], None, other_lines)
    local = [each for each in named if isinstance(each, ipaddress.IPv4Address)]
    if named and not local:
        return Dns((), None, other_lines)
    return Dns((), local[0] if local else _DEFAULT, other_lines)


def resolv_conf(dns: Dns, gateway: ipaddress.IPv4Address) -> str:
    """Return the workers' resolv.conf."""
    servers = dns.servers or (gateway,)
    return "".join(f"{line}\n" for line in (*(f"nameserver {each}" for each in servers), *dns.other_lines))


def _parse(text: str) -> tuple[list[ipaddress.IPv4Address | ipaddress.IPv6Address], tuple[str, ...]]:
    servers, others = [], []
    for line in text.splitlines():
        words = line.split()
        if not words or words[0][0] in "#;":
            continue
        if words[0] != "nameserver":
            others.append(line)
            continue
        try:
            servers.append(ipaddress.ip_address(words[1].partition("%")[0]))
        except (IndexError, ValueError):
            continue
    return servers, tuple(others)
