"""Envelope encryption of secrets. Pure, except for random numbers.

Each value is encrypted with AES-256-GCM under its own data key, and the data key under a master key. Name, scope and
version are associated data of both, so a record that was copied under another name, scope or version does not open. A
rotation of the master key encrypts the data keys again, not the values.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence

import msgspec

from gpufn_core.errors import PlatformError
from gpufn_core.spec.naming.patterns import ALL
from gpufn_core.spec.naming.secret_scopes import SecretRef

_KEY_BYTES = 32
_NONCE_BYTES = 12


class WrongMasterKey(PlatformError):
    """A secret is encrypted under another master key."""

    retryable = False


class SealedSecret(msgspec.Struct, frozen=True, kw_only=True):
    """A stored secret. `master_key` is the id of the master key that encrypts the data key."""

    name: str
    version: int  # 1, 2, ...: each new value
    updated_at: float  # unix seconds
    master_key: str
    data_key: bytes  # encrypted
    value: bytes  # encrypted
    scope: str = ALL

    @property
    def ref(self) -> SecretRef:
        return SecretRef(self.name, self.scope)


decode_secret = msgspec.msgpack.Decoder(SealedSecret).decode


class Keyring:
    """The master keys: the first one encrypts, each one decrypts."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys:
            raise ValueError("there is no key")
        if any(len(key) != _KEY_BYTES for key in keys):
            raise ValueError(f"a key does not have {_KEY_BYTES} bytes")
        self.keys = tuple(keys)
        self._key_by_id = {_id_of(key): key for key in keys}
        self.first = _id_of(keys[0])

    @classmethod
    def parse(cls, text: str) -> Keyring:
        """Parse keys in base64, one per line. Raises ValueError."""
        try:
            keys = [base64.b64decode(line, validate=True) for line in text.split()]
        except ValueError:
            raise ValueError("a key is not base64") from None
        return cls(keys)

    def text(self) -> str:
        return "".join(f"{base64.b64encode(key).decode()}\n" for key in self.keys)

    def opens(self, secret: SealedSecret) -> bool:
        return secret.master_key in self._key_by_id

    def seal(self, ref: SecretRef, version: int, value: str, now: float) -> SealedSecret:
        data_key = os.urandom(_KEY_BYTES)
        return SealedSecret(
            name=ref.name,
            scope=ref.scope,
            version=version,
            updated_at=now,
            master_key=self.first,
            data_key=_encrypt(self.keys[0], data_key, _context("data key", ref, version)),
            value=_encrypt(data_key, value.encode(), _context("value", ref, version)),
        )

    def open(self, secret: SealedSecret, ref: SecretRef) -> str:
        """Decrypt the value of the secret `ref`, under whose key the record was found. Raises WrongMasterKey, or
        PlatformError for a damaged record and for one of another secret."""
        data_key = self._data_key(secret, ref)
        return _decrypt(secret, ref, data_key, secret.value, "value").decode()

    def rewrap(self, secret: SealedSecret) -> SealedSecret:
        """Encrypt the data key under the first master key. Raises as `open`."""
        context = _context("data key", secret.ref, secret.version)
        data_key = _encrypt(self.keys[0], self._data_key(secret, secret.ref), context)
        return msgspec.structs.replace(secret, master_key=self.first, data_key=data_key)

    def _data_key(self, secret: SealedSecret, ref: SecretRef) -> bytes:
        master_key = self._key_by_id.get(secret.master_key)
        if master_key is None:
            raise WrongMasterKey(f"The secret {ref.key} is encrypted under another master key.")
        return _decrypt(secret, ref, master_key, secret.data_key, "data key")


def new_master_key() -> bytes:
    return os.urandom(_KEY_BYTES)


def _id_of(key: bytes) -> str:
    return hashlib.sha256(b"gpufn master key id\0" + key).hexdigest()[:16]


def _context(part: str, ref: SecretRef, version: int) -> bytes:
    """Return the associated data. A secret for every function has the associated data of releases without scopes."""
    scope = () if ref.scope == ALL else (ref.scope,)
    return msgspec.msgpack.encode(("gpufn secret", part, ref.name, version, *scope))


def _encrypt(key: bytes, data: bytes, context: bytes) -> bytes:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415  8 MB, needed with a secret only

    nonce = os.urandom(_NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, data, context)


def _decrypt(secret: SealedSecret, ref: SecretRef, key: bytes, data: bytes, part: str) -> bytes:
    from cryptography.exceptions import InvalidTag  # noqa: PLC0415  (see `_encrypt`)
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415

    context = _context(part, ref, secret.version)
    try:
        return AESGCM(key).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], context)
    except (InvalidTag, ValueError):
        raise PlatformError(f"The record of the secret {ref.key} is damaged: set the secret again.") from None
