"""Envelope encryption: what opens, and what does not."""

from __future__ import annotations

import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gpufn_core.errors import PlatformError
from gpufn_core.spec.naming.secret_scopes import SecretRef
from gpufn_platform.secrets.envelope import Keyring, WrongMasterKey, decode_secret, new_master_key

TOKEN = SecretRef("TOKEN")
SCOPED = SecretRef("TOKEN", "prod/search/*")
OLD, NEW = new_master_key(), new_master_key()
VALUE = "hf_secret ä\n"


def test_a_sealed_value_opens_and_is_not_in_its_record() -> None:
    secret = Keyring([OLD]).seal(TOKEN, 1, VALUE, now=5.0)
    assert Keyring([OLD]).open(secret, TOKEN) == VALUE
    assert VALUE.encode() not in msgspec.msgpack.encode(secret)


def test_equal_values_have_different_records() -> None:
    keyring = Keyring([OLD])
    assert keyring.seal(TOKEN, 1, VALUE, 5.0).value != keyring.seal(TOKEN, 1, VALUE, 5.0).value


def test_another_master_key_does_not_open() -> None:
    with pytest.raises(WrongMasterKey):
        Keyring([NEW]).open(Keyring([OLD]).seal(TOKEN, 1, VALUE, 5.0), TOKEN)


@pytest.mark.parametrize(
    "change", [{"name": "OTHER"}, {"version": 2}, {"scope": "prod/*"}, {"value": b""}, {"data_key": bytes(60)}]
)
def test_a_changed_record_does_not_open(change: dict[str, object]) -> None:
    secret = msgspec.structs.replace(Keyring([OLD]).seal(TOKEN, 1, VALUE, 5.0), **change)
    with pytest.raises(PlatformError):
        Keyring([OLD]).open(secret, secret.ref)


@pytest.mark.parametrize(
    ("sealed", "found"),
    [
        (TOKEN, SCOPED),
        (SCOPED, TOKEN),
        (SCOPED, SecretRef("TOKEN", "prod/*")),
        (SCOPED, SecretRef("TOKEN", "prod/ads/*")),
        (TOKEN, SecretRef("OTHER")),
    ],
)
@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_record_that_was_moved_to_another_secret_does_not_open(
    sealed: SecretRef, found: SecretRef, is_renamed: bool
) -> None:
    secret = Keyring([OLD]).seal(sealed, 1, VALUE, 5.0)
    if is_renamed:
        secret = msgspec.structs.replace(secret, name=found.name, scope=found.scope)
    with pytest.raises(PlatformError):
        Keyring([OLD]).open(secret, found)


def test_a_record_of_a_release_without_scopes_opens() -> None:
    """Sealed as that release did: its associated data and its record have no scope."""

    def encrypt(key: bytes, part: str, data: bytes) -> bytes:
        nonce = bytes(12)
        return nonce + AESGCM(key).encrypt(nonce, data, msgspec.msgpack.encode(("gpufn secret", part, "TOKEN", 1)))

    data_key = bytes(range(32))
    master_key = Keyring([OLD]).first
    old = {"name": "TOKEN", "version": 1, "updated_at": 1.0, "master_key": master_key}
    old |= {"data_key": encrypt(OLD, "data key", data_key), "value": encrypt(data_key, "value", VALUE.encode())}
    secret = decode_secret(msgspec.msgpack.encode(old))
    assert Keyring([OLD]).open(secret, TOKEN) == VALUE
    assert Keyring([NEW]).open(Keyring([NEW, OLD]).rewrap(secret), TOKEN) == VALUE


def test_a_rewrapped_secret_opens_with_the_new_key_only_and_its_value_is_the_same_ciphertext() -> None:
    secret = Keyring([OLD]).seal(TOKEN, 1, VALUE, 5.0)
    rewrapped = Keyring([NEW, OLD]).rewrap(secret)
    assert Keyring([NEW]).open(rewrapped, TOKEN) == VALUE
    assert not Keyring([OLD]).opens(rewrapped)
    assert rewrapped.value == secret.value


def test_keys_survive_their_text() -> None:
    assert Keyring.parse(Keyring([NEW, OLD]).text()).keys == (NEW, OLD)


@pytest.mark.parametrize("text", ["", "abc", "c2hvcnQ=", "ä"])
def test_invalid_keys(text: str) -> None:
    with pytest.raises(ValueError, match="key"):
        Keyring.parse(text)
