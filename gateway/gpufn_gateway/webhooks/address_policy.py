"""Which addresses a webhook may go to: the internet's, and what the operator allows.

A user of the platform chooses where the gateway connects to, and the gateway stands inside: without this it would be
everybody's way to what only insiders can reach, such as a cloud's metadata or the bus itself. Names are judged by what
they resolve to at the moment of the connection (`post`), so that a name which changes its mind gains nothing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from gpufn_core.encoding.urls import check_webhook
from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.records import Webhook

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NUMBER = re.compile(r"0x[0-9a-f]*|[0-9]+")  # what ends with it is no name: 2130706433 and 0x7f.1 are 127.0.0.1
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_SPECIAL: tuple[Network, ...] = (  # what `is_global` does not know in every Python
    ipaddress.IPv4Network("192.0.0.0/24"),  # of protocols
    ipaddress.IPv6Network("3fff::/20"),  # of documentation
    ipaddress.IPv6Network("fec0::/10"),  # site-local: deprecated, and routed inside all the same
)


class Addresses:
    """`allowed`: networks beyond the internet, such as 10.0.0.0/8. Raises ValueError for what is no network."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed: tuple[Network, ...] = tuple(ipaddress.ip_network(each) for each in allowed)

    def refusal(self, address: str) -> str | None:
        """Why a webhook may not go to this IP address; None when it may."""
        ip = _inner(ipaddress.ip_address(address.partition("%")[0]))
        if any(ip in network for network in self._allowed if network.version == ip.version):
            return None
        if ip.is_global and not (ip.is_multicast or ip.is_reserved or any(ip in network for network in _SPECIAL)):
            return None
        return f"{ip} is {_kind(ip)} address; GPUFN_WEBHOOK_NETWORKS can allow it"

    def check(self, url: str) -> None:
        """Raises InvalidInput for what can be seen without asking the DNS."""
        check_webhook(url)
        host = urlsplit(url).hostname or ""
        if host == "localhost" or host.endswith(".localhost"):
            host = "127.0.0.1"
        try:
            why = self.refusal(host)
        except ValueError:
            if _NUMBER.fullmatch(host.rpartition(".")[2]):
                raise InvalidInput(
                    f"no webhook is sent to {host}: write the address as 192.0.2.1", field="webhook"
                ) from None
            return  # a name
        if why is not None:
            raise InvalidInput(f"no webhook is sent to {urlsplit(url).hostname}: {why}", field="webhook")


def webhook_of(header: bytes | None, owner: str, addresses: Addresses) -> Webhook | None:
    """Where a request asks for the end of its calls to be told; `owner` is whose they are. Raises InvalidInput."""
    if header is None:
        return None
    url = header.decode("latin-1")
    addresses.check(url)
    return Webhook(url, owner)


def _inner(ip: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for, if it does: packets go there."""
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _NAT64:
            return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        return ip.ipv4_mapped or ip.sixtofour or ip
    return ip


def _kind(ip: Address) -> str:
    if ip.is_loopback:
        return "a loopback"
    if ip.is_link_local:
        return "a link-local"
    if ip.is_multicast:
        return "a multicast"
    is_site_local = isinstance(ip, ipaddress.IPv6Address) and ip.is_site_local
    return "a private" if ip.is_private or is_site_local else "a reserved"
