"""Address policy of webhooks: the public internet, and networks that the operator allows.

Users choose where the gateway connects to, and the gateway is inside the network. Without this policy any user could
reach internal addresses, such as a cloud's metadata service or the bus itself. Names are checked by the addresses that
they resolve to at connect time (`sender`), so that a later DNS change has no effect.
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

_NUMBER = re.compile(r"0x[0-9a-f]*|[0-9]+")  # a host ending with it is no name: 2130706433 and 0x7f.1 are 127.0.0.1
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_SPECIAL: tuple[Network, ...] = (  # networks that `is_global` does not exclude in every Python
    ipaddress.IPv4Network("192.0.0.0/24"),  # IETF protocol assignments
    ipaddress.IPv4Network("168.63.129.16/32"),  # the platform of Azure, for its virtual machines only
    ipaddress.IPv6Network("3fff::/20"),  # documentation
    ipaddress.IPv6Network("fec0::/10"),  # site-local: deprecated, but still routed internally
)


class AddressPolicy:
    """`allowed` are networks beyond the internet, such as 10.0.0.0/8. Raises ValueError for an invalid network."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed: tuple[Network, ...] = tuple(ipaddress.ip_network(each) for each in allowed)

    def refusal(self, address: str) -> str | None:
        """Return why a webhook may not go to this IP address; None if it may."""
        ip = _inner(ipaddress.ip_address(address.partition("%")[0]))
        if any(ip in network for network in self._allowed if network.version == ip.version):
            return None
        if ip.is_global and not (ip.is_multicast or ip.is_reserved or any(ip in network for network in _SPECIAL)):
            return None
        return f"{ip} is {_kind(ip)} address; GPUFN_WEBHOOK_NETWORKS can allow it"

    def check(self, url: str) -> None:
        """Raises InvalidInput for a URL that is invalid without a DNS lookup."""
        check_webhook(url)
        host = urlsplit(url).hostname or ""
        if host == "localhost" or host.endswith(".localhost"):
            host = "127.0.0.1"
        try:
            reason = self.refusal(host)
        except ValueError:
            if _NUMBER.fullmatch(host.rpartition(".")[2]):
                raise InvalidInput(
                    f"no webhook is sent to {host}: write the address as 192.0.2.1", field="webhook"
                ) from None
            return  # a name
        if reason is not None:
            raise InvalidInput(f"no webhook is sent to {urlsplit(url).hostname}: {reason}", field="webhook")


def webhook_of(header: bytes | None, owner: str, addresses: AddressPolicy, form: str = "") -> Webhook | None:
    """Return the webhook of a request; `owner` owns the calls. Raises InvalidInput."""
    if header is None:
        return None
    url = header.decode("latin-1")
    addresses.check(url)
    return Webhook(url, owner, form)


def _inner(ip: Address) -> Address:
    """Return the IPv4 address that an IPv6 address embeds, if any, because packets go there."""
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
