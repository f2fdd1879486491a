"""The NATS text protocol: encode commands, parse headers. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

PING = b"PING\r\n"
PONG = b"PONG\r\n"


class Message(msgspec.Struct, frozen=True, gc=False):
    """A received message.

    `status` is set only on notices of the server (100 heartbeat, 404, 408, 409, 503 no responders).
    """

    subject: str
    reply: str
    payload: bytes
    headers: dict[str, str] | None = None
    status: int = 0
    description: str = ""


def pub(subject: str, reply: str, payload: bytes, headers: Mapping[str, str] | None) -> bytes:
    """Encode a PUB or HPUB command.

    Raises ValueError for a subject or header that could inject a second command.
    """
    target = f"{subject} {reply}" if reply else subject
    # One space separates subject and reply; any other white space came with a subject.
    if not subject or not target.isprintable() or target.count(" ") != bool(reply):
        raise ValueError(f"not a subject: {subject!r}, reply {reply!r}")
    if not headers:
        return b"PUB %b %d\r\n%b\r\n" % (target.encode(), len(payload), payload)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError(f"a header contains a line break: {headers!r}")
    block = f"NATS/1.0\r\n{lines}\r\n".encode()
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (target.encode(), len(block), len(block) + len(payload), block, payload)


def sub(subject: str, queue: str, sid: bytes) -> bytes:
    words = [word for word in (subject, queue) if word]
    if not subject or any(not word.isprintable() or " " in word for word in words):
        raise ValueError(f"not a subject: {subject!r}, queue {queue!r}")
    return b"SUB %b %b\r\n" % (" ".join(words).encode(), sid)


def unsub(sid: bytes) -> bytes:
    return b"UNSUB %b\r\n" % sid


def parse_headers(block: bytes) -> tuple[dict[str, str] | None, int, str]:
    """Headers, status and description of a block: `NATS/1.0[ status[ description]]`, then `Name: value` lines."""
    first, *lines = block.decode("utf-8", "replace").split("\r\n")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name] = value.strip()
    _, _, rest = first.partition(" ")
    code, _, description = rest.strip().partition(" ")
    return headers or None, int(code) if code.isdigit() else 0, description


def ack_tokens(reply: str) -> tuple[int, int, int, float, int]:
    """Delivery count, stream sequence, consumer sequence, store time and pending count from a delivery's reply subject.

    `$JS.ACK.<stream>.<consumer>.<delivered>.<seq>.<consumer seq>.<ns>.<pending>`; the newer form has domain and account
    before the stream.
    """
    tokens = reply.split(".")
    at = 4 if len(tokens) == 9 else 6
    delivered, seq, consumer_seq, time_ns, pending = tokens[at : at + 5]
    return int(delivered), int(seq), int(consumer_seq), int(time_ns) / 1e9, int(pending)
