"""One POST to a receiver on loopback: allowed addresses and limits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpufn_gateway.webhooks import sender as post
from gpufn_gateway.webhooks.address_policy import AddressPolicy
from gpufn_gateway.webhooks.sender import AddressRefused, ReceiverUnreachable, WebhookSender
from tests.gateway.webhooks.receiver import OK, receiving, redirect

LOOPBACK = ("127.0.0.0/8", "::1/128")


@contextlib.asynccontextmanager
async def posting(*allowed: str) -> AsyncIterator[WebhookSender]:
    made = WebhookSender(AddressPolicy(allowed))
    try:
        yield made
    finally:
        await made.close()


async def test_a_receiver_gets_the_body_and_the_headers_under_its_own_name() -> None:
    async with receiving() as receiver, posting(*LOOPBACK) as sender:
        assert await sender.send(receiver.url("/a?b=c", "localhost"), {"webhook-id": "1"}, b"{}") == 200
        request = receiver.requests.get_nowait()
        assert (request.path, request.body) == ("/a?b=c", b"{}")
        assert (request.headers["host"], request.headers["webhook-id"]) == (f"localhost:{receiver.port}", "1")


async def test_a_name_that_leads_inside_is_refused_when_it_is_connected_to() -> None:
    async with receiving() as receiver, posting() as sender:
        for host in ("localhost", "127.0.0.1"):
            with pytest.raises(AddressRefused, match=rf"{host}: .* loopback"):
                await sender.send(receiver.url(host=host), {}, b"{}")
        assert receiver.requests.empty()


def resolving(monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[str] | Exception]) -> None:
    """Fake the DNS."""

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        found = answers[host]
        if isinstance(found, Exception):
            raise found
        return [(0, 0, 0, "", (address, port)) for address in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)


async def test_the_next_of_several_addresses_is_tried_if_one_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with receiving() as receiver, posting("127.0.0.0/8") as sender:
        resolving(monkeypatch, {"two.test": ["10.0.0.1", "127.9.9.9", "127.0.0.1"]})
        assert await sender.send(receiver.url(host="two.test"), {}, b"{}") == 200
        assert receiver.requests.qsize() == 1


async def test_a_name_that_later_resolves_to_another_address_is_checked_for_each_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DNS rebinding: the address that was checked is the one that is connected to."""
    async with receiving() as receiver, receiving("127.0.0.2", receiver.port) as inside, posting("127.0.0.1") as sender:
        lookups: list[str] = []

        async def getaddrinfo(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
            lookups.append(host)
            return [(0, 0, 0, "", ("127.0.0.1" if len(lookups) == 1 else "127.0.0.2", port))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        receiver.answers = lambda _: OK.replace(b"content-length", b"connection: close\r\ncontent-length")
        url = receiver.url(host="rebinding.test")
        assert await sender.send(url, {}, b"{}") == 200
        with pytest.raises(AddressRefused, match=r"127\.0\.0\.2 .* loopback"):
            await sender.send(url, {}, b"{}")
        assert (lookups, receiver.requests.qsize(), inside.requests.qsize()) == (["rebinding.test"] * 2, 1, 0)


async def test_a_name_without_a_listening_address_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiving() as receiver, posting("127.0.0.0/8") as sender:
        resolving(monkeypatch, {"two.test": ["127.9.9.8", "127.9.9.9"], "none.test": [], "in.test": ["10.0.0.1"]})
        with pytest.raises(ReceiverUnreachable):
            await sender.send(receiver.url(host="two.test"), {}, b"{}")
        with pytest.raises(ReceiverUnreachable, match=r"none\.test"):
            await sender.send(receiver.url(host="none.test"), {}, b"{}")
        with pytest.raises(AddressRefused, match=r"in\.test: 10\.0\.0\.1 .* private"):
            await sender.send(receiver.url(host="in.test"), {}, b"{}")


async def test_a_name_that_the_dns_does_not_know_or_that_is_none_is_not_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with posting() as sender:
        resolving(monkeypatch, {"away.test": socket.gaierror(-3, "Temporary failure in name resolution")})
        with pytest.raises(ReceiverUnreachable, match="Temporary failure"):
            await sender.send("https://away.test/", {}, b"{}")
        monkeypatch.undo()
        for host in ("a..test", "a" * 64 + ".test"):
            with pytest.raises(ReceiverUnreachable, match=host[:40]):
                await sender.send(f"https://{host}/", {}, b"{}")


@pytest.mark.parametrize("to", ["http://[::1", "http://{}:99999/", "/caf\xe9", "//user@{}/", "/a b", "http://{}:x/"])
async def test_a_redirect_to_an_invalid_address_is_an_ordinary_response(to: str) -> None:
    async with receiving() as receiver, posting(*LOOPBACK) as sender:
        moved = redirect("LOCATION").replace(b"LOCATION", to.format(f"127.0.0.1:{receiver.port}").encode("latin-1"))
        receiver.answers = lambda _: moved
        assert await sender.send(receiver.url(), {}, b"{}") == 307
        assert receiver.requests.qsize() == 1


async def test_a_redirect_to_the_same_host_is_followed_and_keeps_the_body() -> None:
    async with receiving() as receiver, posting(*LOOPBACK) as sender:
        receiver.answers = lambda request: OK if request.path == "/new" else redirect("/new", 308)
        assert await sender.send(receiver.url("/old"), {}, b"told") == 200
        assert [receiver.requests.get_nowait()[::2] for _ in range(2)] == [("/old", b"told"), ("/new", b"told")]


async def test_a_redirect_to_another_host_is_not_followed() -> None:
    async with receiving() as receiver, receiving() as other, posting(*LOOPBACK) as sender:
        receiver.answers = lambda _: redirect(other.url())
        assert await sender.send(receiver.url(), {}, b"{}") == 307
        receiver.answers = lambda _: redirect(receiver.url(host="localhost"))
        assert await sender.send(receiver.url(), {}, b"{}") == 307
        assert (receiver.requests.qsize(), other.requests.qsize()) == (2, 0)


@pytest.mark.parametrize("status", [301, 302, 303])
async def test_a_redirect_that_would_drop_the_body_is_not_followed(status: int) -> None:
    async with receiving() as receiver, posting(*LOOPBACK) as sender:
        receiver.answers = lambda _: redirect("/new", status)
        assert await sender.send(receiver.url(), {}, b"{}") == status
        assert receiver.requests.qsize() == 1


async def test_redirects_in_a_circle_end() -> None:
    async with receiving() as receiver, posting(*LOOPBACK) as sender:
        receiver.answers = lambda _: redirect("/again")
        assert await sender.send(receiver.url(), {}, b"{}") == 307
        assert receiver.requests.qsize() == 3


async def test_an_endless_answer_is_not_read_to_its_end() -> None:
    async with receiving() as receiver, posting(*LOOPBACK) as sender:
        receiver.answers = lambda _: b"HTTP/1.1 200 OK\r\ncontent-length: 9999999999\r\n\r\n" + bytes(1 << 20)
        assert await sender.send(receiver.url(), {}, b"{}") == 200


async def test_a_receiver_that_does_not_answer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post, "_TIMEOUT_S", 0.05)
    async with receiving() as receiver, posting(*LOOPBACK) as sender:
        receiver.answers = lambda _: None
        with pytest.raises(ReceiverUnreachable, match="no answer within"):
            await sender.send(receiver.url(), {}, b"{}")


@pytest.mark.parametrize(
    ("answer", "host"), [(b"what?\r\n\r\n", "127.0.0.1"), (OK, "name.that.does.not.exist.invalid")]
)
async def test_a_receiver_that_does_not_speak_http_or_exist_is_not_reached(answer: bytes, host: str) -> None:
    async with receiving() as receiver, posting(*LOOPBACK) as sender:
        receiver.answers = lambda _: answer
        with pytest.raises(ReceiverUnreachable):
            await sender.send(receiver.url(host=host), {}, b"{}")


async def test_a_port_without_a_listener_is_not_reached() -> None:
    async with receiving() as receiver:
        gone = receiver.url()
    async with posting(*LOOPBACK) as sender:
        with pytest.raises(ReceiverUnreachable):
            await sender.send(gone, {}, b"{}")
