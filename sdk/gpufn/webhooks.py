"""Webhooks as Standard Webhooks signs them: what the platform sends when a submitted call has ended.

    POST <your address>
    webhook-id: <the invocation's id, the same at every try>
    webhook-timestamp: <unix seconds>
    webhook-signature: v1,<base64 of HMAC-SHA256 over "id.timestamp.body">

A receiver calls `verify` before it believes the body. `gpufn keys webhook-secret` shows the secret.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable, Mapping

from gpufn_core.errors import InvalidSignature

_PREFIX = "whsec_"
_SECRET_BYTES = 32


def new_secret() -> str:
    return _PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def sign(secret: str, id: str, at: int, body: bytes) -> str:  # noqa: A002
    """The value of `webhook-signature`; `at` in unix seconds.

    >>> sign("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330,
    ...      b'{"test": 2432232314}')
    'v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE='
    """
    digest = hmac.new(_key(secret), f"{id}.{at}.".encode() + body, hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()


def signatures(keys: Iterable[str], id: str, at: int, body: bytes) -> str:  # noqa: A002
    """With more than one secret, as while it is changed: a receiver needs to know one of them."""
    return " ".join(sign(key, id, at, body) for key in keys)


def verify(
    secret: str, headers: Mapping[str, str], body: bytes, *, now: float | None = None, tolerance_s: float = 300.0
) -> None:
    """Raises InvalidSignature unless the platform sent `body`, at most `tolerance_s` ago. Header names in any case.

    >>> verify("whsec_c2VjcmV0", {"webhook-id": "1", "webhook-timestamp": "5", "webhook-signature": "v1,x"}, b"", now=5)
    Traceback (most recent call last):
        ...
    gpufn.errors.InvalidSignature: No signature of this webhook is by this secret.
    """
    lower = {name.lower(): value for name, value in headers.items()}
    try:
        id_, at = lower["webhook-id"], int(lower["webhook-timestamp"])
        claimed = lower["webhook-signature"].split()
    except KeyError as error:
        raise InvalidSignature(f"The header {error.args[0]} is missing.") from None
    except ValueError:
        raise InvalidSignature("The header webhook-timestamp is not a number of seconds.") from None
    if abs((time.time() if now is None else now) - at) > tolerance_s:
        raise InvalidSignature("The webhook's timestamp is too far from now: it may be an old one, sent again.")
    expected = sign(secret, id_, at, body).encode()
    if not any(hmac.compare_digest(expected, each.encode()) for each in claimed):
        raise InvalidSignature("No signature of this webhook is by this secret.")


def _key(secret: str) -> bytes:
    try:
        return base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidSignature("A webhook's secret is whsec_ and base64.") from None
