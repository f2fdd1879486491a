"""Envelope encryption: what opens, and what does not."""

from __future__ import annotations

import msgspec
import pytest

from gpufn_core.errors import PlatformError
from gpufn_platform.secrets.envelope import Keyring, WrongMasterKey, new_master_key

OLD, NEW = new_master_key(), new_master_key()
VALUE = "hf_secret ä\n"


def test_a_sealed_value_opens_and_is_not_in_its_record() -> None:
    secret = Keyring([OLD]).seal("TOKEN", 1, VALUE, now=5.0)
    assert Keyring([OLD]).open(secret) == VALUE
    assert VALUE.encode() not in msgspec.msgpack.encode(secret)


def test_equal_values_have_different_records() -> None:
    keyring = Keyring([OLD])
    assert keyring.seal("TOKEN", 1, VALUE, 5.0).value != keyring.seal("TOKEN", 1, VALUE, 5.0).value


def test_another_master_key_does_not_open() -> None:
    with pytest.raises(WrongMasterKey):
        Keyring([NEW]).open(Keyring([OLD]).seal("TOKEN", 1, VALUE, 5.0))


@pytest.mark.parametrize("change", [{"name": "OTHER"}, {"version": 2}, {"value": b""}, {"data_key": bytes(60)}])
def test_a_changed_record_does_not_open(change: dict[str, object]) -> None:
    secret = msgspec.structs.replace(Keyring([OLD]).seal("TOKEN", 1, VALUE, 5.0), **change)
    with pytest.raises(PlatformError):
        Keyring([OLD]).open(secret)


def test_a_rewrapped_secret_opens_with_the_new_key_only_and_its_value_is_the_same_ciphertext() -> None:
    secret = Keyring([OLD]).seal("TOKEN", 1, VALUE, 5.0)
    rewrapped = Keyring([NEW, OLD]).rewrap(secret)
    assert Keyring([NEW]).open(rewrapped) == VALUE
    assert not Keyring([OLD]).opens(rewrapped)
    assert rewrapped.value == secret.value


def test_keys_survive_their_text() -> None:
    assert Keyring.parse(Keyring([NEW, OLD]).text()).keys == (NEW, OLD)


@pytest.mark.parametrize("text", ["", "abc", "c2hvcnQ=", "ä"])
def test_invalid_keys(text: str) -> None:
    with pytest.raises(ValueError, match="key"):
        Keyring.parse(text)
