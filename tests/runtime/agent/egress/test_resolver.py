from __future__ import annotations

from ipaddress import IPv4Address

import pytest

from gpufn_runtime.agent.egress.resolver import read, resolv_conf

GATEWAY = IPv4Address("169.254.9.1")
PRIVATE, LOCAL = "nameserver 10.0.0.2\n", "nameserver 127.0.0.1\n"
STUB = "nameserver 127.0.0.53\noptions edns0 trust-ad\nsearch example.org\n"


@pytest.mark.parametrize(
    ("text", "upstreams", "servers", "on_loopback"),
    [
        (PRIVATE, "", ["10.0.0.2"], None),
        (STUB, PRIVATE, ["10.0.0.2"], None),
        (STUB, "", [], "127.0.0.53"),
        (LOCAL, PRIVATE, [], "127.0.0.1"),
        (LOCAL + PRIVATE, "", ["10.0.0.2"], None),
        ("", "", [], "127.0.0.1"),  # the C library's default
        ("nameserver 2001:db8::1\n" + PRIVATE, "", ["10.0.0.2"], None),
        ("nameserver fe80::1%eth0\n", "", [], None),
        ("nameserver\nnameserver x; y\n# nameserver 1.1.1.1\n" + PRIVATE, "", ["10.0.0.2"], None),
        ("".join(f"nameserver 10.0.0.{n}\n" for n in range(5)), "", ["10.0.0.0", "10.0.0.1", "10.0.0.2"], None),
    ],
)
def test_which_resolvers_a_worker_uses(text: str, upstreams: str, servers: list[str], on_loopback: str | None) -> None:
    dns = read(text, upstreams)
    assert ([str(each) for each in dns.servers], dns.on_loopback and str(dns.on_loopback)) == (servers, on_loopback)


@pytest.mark.parametrize(("upstreams", "first"), [(PRIVATE, "nameserver 10.0.0.2"), ("", f"nameserver {GATEWAY}")])
def test_the_workers_file_names_them_and_keeps_the_other_lines(upstreams: str, first: str) -> None:
    lines = resolv_conf(read(STUB, upstreams), GATEWAY).splitlines()
    assert lines == [first, "options edns0 trust-ad", "search example.org"]
