from __future__ import annotations

import pytest

from gpufn_core.encoding import media
from gpufn_core.encoding.media import BYTES, JSON, MSGPACK, NATIVE
from gpufn_gateway.http import negotiation

BODIES = [
    (None, JSON),
    ("", JSON),
    ("application/JSON; charset=utf-8", JSON),
    ("text/json", JSON),
    ("application/x-www-form-urlencoded", JSON),
    ("application/msgpack", MSGPACK),
    ("application/x-msgpack", MSGPACK),
    ("application/vnd.msgpack", MSGPACK),
    (NATIVE, NATIVE),
    ("application/geo+json", "application/geo+json"),
    ("application/problem+json", "application/problem+json"),
    ("image/png; q=1", "image/png; q=1"),
    ("image/\u00e9", BYTES),
]


@pytest.mark.parametrize(("content_type", "kind"), BODIES)
def test_the_kind_of_a_body(content_type: str | None, kind: str) -> None:
    assert negotiation.body_kind(None if content_type is None else content_type.encode("latin-1")) == kind


@pytest.mark.parametrize("content_type", [text for text, _ in BODIES])
def test_the_worker_accepts_a_body_as_the_gateway_did(content_type: str | None) -> None:
    kind = negotiation.body_kind(None if content_type is None else content_type.encode("latin-1"))
    assert negotiation.is_arguments(media.media_type(kind)) == negotiation.is_arguments(kind)
    if negotiation.is_arguments(kind):
        assert media.media_type(content_type or "") == kind


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (None, ""),
        ("*/*", ""),
        ("text/html, application/x-msgpack;q=0.9", MSGPACK),
        ("application/json, application/vnd.gpufn.msgpack", NATIVE),
        ("application/vnd.gpufn.msgpack;q=0, application/msgpack; q=0.0, */*", ""),
        ("image/png;q=0, image/webp", "image/webp"),
        ("application/json, application/msgpack;Q=0.", JSON),
        ("application/json, application/msgpack;q=0.1", MSGPACK),
        ("application/msgpack;q=much", MSGPACK),
        ("text/event-stream", JSON),
        ("application/vnd.gpufn.items", NATIVE),
        ("image/png,", "image/png"),
    ],
)
def test_the_format_of_the_response_that_the_sender_accepts(accept: str | None, wanted: str) -> None:
    assert negotiation.result_encoding(None if accept is None else accept.encode()) == wanted
