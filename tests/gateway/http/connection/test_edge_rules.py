"""The rules at the HTTP edge, as tables."""

from __future__ import annotations

import pytest

from gpufn_core.encoding.urls import is_loopback
from gpufn_gateway.http import host_field
from gpufn_gateway.http.connection import head_rules
from gpufn_gateway.http.connection.connection_limit import ConnectionLimit, network
from gpufn_gateway.http.connection.minimum_rate import BodyPace, Discarding


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (b"localhost", ("localhost", None)),
        (b"LocalHost:8090", ("localhost", 8090)),
        (b"localhost:", ("localhost", None)),
        (b"", ("", None)),
        (b"my_gateway.svc-1.example:80", ("my_gateway.svc-1.example", 80)),
        (b"a%20b", ("a%20b", None)),
        (b"127.0.0.1:65535", ("127.0.0.1", 65535)),
        (b"[::1]", ("::1", None)),
        (b"[0:0::1]:80", ("::1", 80)),
        (b"[::ffff:127.0.0.1]", ("::ffff:7f00:1", None)),
        (b"[::1].evil.com", None),
        (b"[::1]evil", None),
        (b"[::1", None),
        (b"::1", None),
        (b"[::1%25lo]", None),
        (b"[localhost]", None),
        (b"[127.0.0.1]", None),
        (b"localhost:80:evil", None),
        (b"localhost:evil", None),
        (b"localhost:-1", None),
        (b"localhost:65536", None),
        ("localhost:\u0668".encode(), None),
        (b"user@localhost", None),
        (b"localhost/evil", None),
        (b"localhost evil", None),
        (b"localhost, evil", None),
        (b"localhost\n", None),
        (b"a%2", None),
        (b"a" * 301, None),
    ],
)
def test_a_host_field_is_a_host_and_an_optional_port(field: bytes, expected: tuple[str, int | None] | None) -> None:
    assert host_field.parse(field) == expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:7f00:1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("::ffff:192.0.2.1", False),
        ("example.org", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.nip.io", False),
        ("127.1", False),
        ("", False),
    ],
)
def test_loopback_addresses_are_compared_by_value(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("version", "target", "lines", "said"),
    [
        ("1.1", b"/", [(b"host", b"x")], None),
        ("1.1", b"*", [(b"host", b"x")], None),
        ("1.0", b"/", [], None),
        ("1.1", b"/", [(b"host", b"")], None),
        ("1.1", b"/", [(b"host", b"x"), (b"accept", b"a"), (b"accept", b"b")], None),
        ("1.1", b"/", [(b"host", b"x"), (b"transfer-encoding", b"Chunked")], None),
        ("1.1", b"http://X:1/a", [(b"host", b"x:1")], None),
        ("1.1", b"/?u=http://y/", [(b"host", b"x")], None),
        ("0.9", b"/", [], "HTTP/0.9 is not supported"),
        ("2.0", b"/", [(b"host", b"x")], "HTTP/2.0 is not supported"),
        ("1.1", b"/", [], "no Host field"),
        ("1.1", b"/", [(b"host", b"x"), (b"host", b"x")], "several Host fields"),
        ("1.0", b"/", [(b"host", b"x"), (b"host", b"y")], "several Host fields"),
        ("1.1", b"/", [(b"host", b"x"), (b"origin", b"a"), (b"origin", b"b")], "several Origin fields"),
        ("1.1", b"/", [(b"host", b"x"), *[(b"authorization", b"a")] * 2], "several Authorization fields"),
        ("1.1", b"/", [(b"host", b"x y")], "The Host field is not"),
        ("1.1", b"/", [(b"host", b"x"), (b"transfer-encoding", b"gzip, chunked")], "Transfer-Encoding"),
        ("1.0", b"/", [(b"transfer-encoding", b"chunked")], "Transfer-Encoding"),
        ("1.1", b"http://y/a", [(b"host", b"x")], "differs from the Host field"),
        ("1.1", b"http://x@y/a", [(b"host", b"x")], "differs from the Host field"),
    ],
)
def test_a_head_follows_the_rules(
    version: str, target: bytes, lines: list[tuple[bytes, bytes]], said: str | None
) -> None:
    fault = head_rules.find_violation(version, target, lines, dict(lines))
    assert fault is None if said is None else said in (fault or "")


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        # (request, bytes received, seconds, is reading paused)
        ([(1, 0, 0, False), (1, 0, 10, False), (1, 0, 11, False)], True),
        ([(1, 0, 0, False), *[(1, second // 3, second, False) for second in range(1, 12)]], True),
        ([(1, 0, 0, False), *[(1, 1100 * second, second, False) for second in range(1, 60)]], False),
        ([(1, 0, 0, False), (1, 10 << 10, 9, False), (1, 10 << 10, 19, False)], False),
        ([(1, 0, 0, False), (1, 10 << 10, 9, False), (1, 10 << 10, 20, False)], True),
        ([(1, 0, 0, False), (1, 1, 9, True), (1, 1, 60, True), (1, 1, 70, False)], False),
        ([(1, 0, 0, False), (1, 1, 9, True), (1, 1, 60, True), (1, 1, 71, False)], True),
        ([(1, 0, 0, False), (2, 9, 11, False), (3, 18, 22, False)], False),
    ],
)
def test_a_body_arrives_at_a_kibibyte_per_second(looks: list[tuple[int, int, float, bool]], expected: bool) -> None:
    pace = BodyPace()
    seen = [pace.is_too_slow(request, received, now, is_paused=paused) for request, received, now, paused in looks]
    assert seen == [False] * (len(looks) - 1) + [expected]


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([(1, 0, 0.0), (1, 256 << 20, 30.0)], False),
        ([(1, 0, 0.0), (1, (256 << 20) + 1, 1.0)], True),
        ([(1, 0, 0.0), (1, 1, 30.1)], True),
        ([(1, 0, 0.0), (2, 300 << 20, 40.0)], False),
    ],
)
def test_a_refused_upload_is_read_for_a_while(looks: list[tuple[int, int, float]], expected: bool) -> None:
    discarding = Discarding()
    assert [discarding.is_over(*look) for look in looks][-1] is expected


def test_connections_are_counted_by_address() -> None:
    limit = ConnectionLimit(2)
    assert [limit.add(each) for each in ("a", "a", "a", "b")] == [True, True, False, True]
    limit.remove("a")
    assert limit.add("a")
    for each in ("a", "a", "b"):
        limit.remove(each)
    assert limit._open == {}


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::"),
        ("2001:db8:0:0:ffff::9", "2001:db8::"),
        ("2001:db8:0:1::1", "2001:db8:0:1::"),
        ("fe80::1%eth0", "fe80::"),
        ("", ""),
    ],
)
def test_the_addresses_of_one_ipv6_network_count_as_one(address: str, expected: str) -> None:
    assert network(address) == expected
