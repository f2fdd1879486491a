"""Webhook signatures in the Standard Webhooks format."""

from __future__ import annotations

import pytest

from gpufn.webhooks import new_secret, sign, signatures, verify
from gpufn_core.errors import InvalidSignature

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
BODY = b'{"test": 2432232314}'
AT = 1614265330


def headers(**changed: str) -> dict[str, str]:
    given = {"Webhook-Id": "msg_1", "Webhook-Timestamp": str(AT), "Webhook-Signature": sign(SECRET, "msg_1", AT, BODY)}
    return given | {name.replace("_", "-"): value for name, value in changed.items()}


def test_a_signed_webhook_is_accepted() -> None:
    verify(SECRET, headers(), BODY, now=AT + 299)
    verify(SECRET, {name.lower(): value for name, value in headers().items()}, BODY, now=AT - 299)


def test_during_a_rotation_the_old_and_the_new_secret_are_accepted() -> None:
    newer = new_secret()
    both = headers(Webhook_Signature=signatures((newer, SECRET), "msg_1", AT, BODY))
    for secret in (newer, SECRET):
        verify(secret, both, BODY, now=AT)


@pytest.mark.parametrize(
    ("changed", "body", "now", "message"),
    [
        ({}, BODY + b" ", AT, "No signature of this webhook"),
        ({"Webhook_Id": "msg_2"}, BODY, AT, "No signature of this webhook"),
        ({"Webhook_Timestamp": str(AT + 1)}, BODY, AT, "No signature of this webhook"),
        ({"Webhook_Signature": "v1,AAAA v2,xyz"}, BODY, AT, "No signature of this webhook"),
        ({"Webhook_Signature": ""}, BODY, AT, "No signature of this webhook"),
        ({"Webhook_Timestamp": "soon"}, BODY, AT, "not a number of seconds"),
        ({}, BODY, AT + 301, "too far from the current time"),
        ({}, BODY, AT - 301, "too far from the current time"),
    ],
)
def test_a_changed_or_replayed_webhook_is_refused(
    changed: dict[str, str], body: bytes, now: float, message: str
) -> None:
    with pytest.raises(InvalidSignature, match=message):
        verify(SECRET, headers(**changed), body, now=now)


def test_a_wrong_secret_a_missing_header_and_a_malformed_secret_have_different_errors() -> None:
    with pytest.raises(InvalidSignature, match="matches this secret"):
        verify(new_secret(), headers(), BODY, now=AT)
    with pytest.raises(InvalidSignature, match="webhook-id is missing"):
        verify(SECRET, {}, BODY, now=AT)
    with pytest.raises(InvalidSignature, match=r"base64 .*whsec_"):
        verify("whsec_!", headers(), BODY, now=AT)
