"""Sealed texts: what a browser keeps for the gateway, signed under the key of the tokens. Pure.

Each use has a `context` of its own, so that no text of one use is valid for another.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping

from gpufn_gateway.auth.tokens import SigningKey


def seal(key: SigningKey, context: bytes, payload: bytes) -> str:
    return f"{key.number}.{_to_text(payload)}.{_to_text(_mac(key, context, payload))}"


def unseal(keys: Mapping[int, SigningKey], context: bytes, text: str) -> bytes:
    """Return the payload of a sealed text. Raises ValueError."""
    try:
        number, payload_text, mac = text.split(".")
        key = keys[int(number)]
        payload, given = _from_text(payload_text), _from_text(mac)
    except (KeyError, binascii.Error) as error:
        raise ValueError("not sealed") from error
    if not hmac.compare_digest(_mac(key, context, payload), given):
        raise ValueError("not sealed here")
    return payload


def _mac(key: SigningKey, context: bytes, payload: bytes) -> bytes:
    return hmac.digest(key.secret, context + payload, hashlib.sha256)


def _to_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _from_text(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
