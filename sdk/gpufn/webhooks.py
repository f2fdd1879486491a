"""Webhook signatures in the Standard Webhooks format. The platform sends a webhook when a submitted call has ended.

    POST <your address>
    webhook-id: <the invocation's id, the same for every delivery attempt>
    webhook-timestamp: <unix seconds>
    webhook-signature: v1,<base64 of HMAC-SHA256 over "id.timestamp.body">

A receiver calls `verify` before it trusts the body. `gpufn keys webhook-secret` shows the secret.
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
    """Return a random secret, as `whsec_` and base64."""
    return _PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def sign(secret: str, id: str, at: int, body: bytes) -> str:  # noqa: A002
    """Return the value of the header `webhook-signature`. `at` is in unix seconds.

    >>> sign("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330,
    ...      b'{"test": 2432232314}')
    'v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE='
    """
    digest = hmac.new(_key(secret), f"{id}.{at}.".encode() + body, hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()


def signatures(keys: Iterable[str], id: str, at: int, body: bytes) -> str:  # noqa: A002
    """Return the value of `webhook-signature` for several secrets, as during a rotation.

    A receiver needs to know only one of them.
    """
    return " ".join(sign(key, id, at, body) for key in keys)


def verify(
    secret: str, headers: Mapping[str, str], body: bytes, *, now: float | None = None, tolerance_s: float = 300.0
) -> None:
    """Raise InvalidSignature unless the platform signed `body` within the last `tolerance_s` seconds.

    The case of the header names does not matter.

    >>> verify("whsec_c2VjcmV0", {"webhook-id": "1", "webhook-timestamp": "5", "webhook-signature": "v1,x"}, b"", now=5)
    Traceback (most recent call last):
        ...
    gpufn.errors.InvalidSignature: No signature of this webhook matches this secret.
    """
    values = {name.lower(): value for name, value in headers.items()}
    try:
        id_, at = values["webhook-id"], int(values["webhook-timestamp"])
        received = values["webhook-signature"].split()
    except KeyError as error:
        raise InvalidSignature(f"The header {error.args[0]} is missing.") from None
    except ValueError:
        raise InvalidSignature("The header webhook-timestamp is not a number of seconds.") from None
    if abs((time.time() if now is None else now) - at) > tolerance_s:
        raise InvalidSignature("The timestamp of this webhook is too far from the current time: it may be a replay.")
    expected = sign(secret, id_, at, body).encode()
    if not any(hmac.compare_digest(expected, signature.encode()) for signature in received):
        raise InvalidSignature("No signature of this webhook matches this secret.")


def _key(secret: str) -> bytes:
    try:
        return base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidSignature("A webhook secret is base64 after the prefix whsec_.") from None
