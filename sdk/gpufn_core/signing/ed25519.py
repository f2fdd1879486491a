"""Ed25519 keys and signatures. Keys are PEM files, as `openssl genpkey -algorithm ed25519` writes them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature as _WrongSignature
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gpufn_core.errors import InvalidInput
from gpufn_core.signing.statement import DeploySignature, Statement, signed_bytes

_RAW = serialization.Encoding.Raw, serialization.PublicFormat.Raw


def key_id(public_key: bytes) -> str:
    """Return the id of a public key: the start of its sha256."""
    return hashlib.sha256(public_key).hexdigest()[:32]


class Signer:
    """A private key that signs deploys."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.id = key_id(key.public_key().public_bytes(*_RAW))

    @classmethod
    def new(cls) -> Self:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a private key. Raises InvalidInput, also if other users can read the file."""
        try:
            if path.stat().st_mode & 0o077:
                raise InvalidInput(f"other users can read the signing key {path}: run chmod 600 {path}")
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except OSError as error:
            raise InvalidInput(f"cannot read the signing key {path}: {error.strerror}") from error
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise InvalidInput(
                f"{path} is not a private key without a password in PEM: make one with `gpufn signing keygen`"
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise InvalidInput(f"{path} is not an Ed25519 key: make one with `gpufn signing keygen`")
        return cls(key)

    def write(self, path: Path) -> None:
        """Write the private key to a new file that only its owner can read. Raises OSError."""
        data = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def public_pem(self) -> str:
        public = self._key.public_key()
        pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        return pem.decode()

    def sign(self, statement: Statement) -> DeploySignature:
        payload = statement.encoded()
        return DeploySignature(payload, self.id, self._key.sign(signed_bytes(payload)))


def parse_public_key(pem: str) -> bytes:
    """Return the 32 bytes of a public key in PEM. Raises InvalidInput."""
    try:
        key = serialization.load_pem_public_key(pem.encode())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidInput("this is not an Ed25519 public key in PEM", field="public_key")
    return key.public_bytes(*_RAW)


def is_signed_by(public_key: bytes, signature: DeploySignature) -> bool:
    """Return whether the owner of `public_key` signed the payload."""
    try:
        key = Ed25519PublicKey.from_public_bytes(public_key)
        key.verify(signature.value, signed_bytes(signature.payload))
    except (ValueError, _WrongSignature):
        return False
    return True
