"""Encryption of nats-server's store: the settings, and the checks before a start.

nats-server does not refuse a store that it cannot decrypt. It starts without the streams, and the gateway would create
empty ones in their place. Therefore `encryption.json` in its folder has the id of the key, and a start with another key
is refused (docs/decisions/0049-tls-and-encryption-of-the-bus.md has the measurements).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from gpufn_core.home import Home
from gpufn_platform.process.private_files import replace_private
from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.secrets.envelope import Keyring
from gpufn_platform.secrets.key_source import KeySource

CIPHER, KEY = "GPUFN_STORE_CIPHER", "GPUFN_STORE_KEY"
_CIPHERS: Final = ("aes", "chachapoly")


class _Record(msgspec.Struct, frozen=True):
    """The content of encryption.json. `key` is an id, from which the key cannot be found."""

    cipher: str
    key: str


@dataclass(frozen=True)
class StoreEncryption:
    cipher: str
    keyring: Keyring = field(repr=False)
    source: str

    @staticmethod
    def is_set(environ: Mapping[str, str]) -> bool:
        return environ.get("GPUFN_STORE_CIPHER", "").strip() not in ("", "off")

    @classmethod
    def from_env(cls, environ: Mapping[str, str], home: Home) -> StoreEncryption | None:
        """Read the settings; None without encryption. Creates the default key file for a store that is not encrypted
        yet. Raises InvalidSetting, OSError."""
        if not cls.is_set(environ):
            return None
        if (cipher := environ["GPUFN_STORE_CIPHER"].strip()) not in _CIPHERS:
            raise InvalidSetting(f"{CIPHER}={cipher!r}: write aes, chachapoly or off.")
        source = KeySource.named(KEY, environ, home.store_key)
        if source.file == home.store_key and not is_encrypted(home.nats):
            source.create_file()
        keyring = source.load()
        if keyring is None:
            raise InvalidSetting(f"{source} does not exist, and the store in {home.nats} needs it: restore the file.")
        if len(keyring.keys) > 1:
            raise InvalidSetting(f"{source} has several keys, and the key of a store cannot be changed: write one.")
        return cls(cipher, keyring, str(source))

    @property
    def key(self) -> str:
        return self.keyring.text().strip()

    @property
    def record(self) -> _Record:
        return _Record(self.cipher, self.keyring.first)


def check(directory: Path, encryption: StoreEncryption | None) -> None:
    """Raises InvalidSetting for a store that nats-server could not read with these settings. Nothing is changed."""
    if not is_encrypted(directory):
        return
    record = _read(directory)
    if encryption is None:
        cipher = record.cipher if record else "aes"
        raise InvalidSetting(
            f"The store in {directory} is encrypted: set {CIPHER}={cipher} and its key. It is unchanged."
        )
    if record is None:
        raise InvalidSetting(f"{_path(directory)} is missing or damaged: restore it from the backup of {directory}.")
    if record.key != encryption.record.key:
        raise InvalidSetting(
            f"{encryption.source} is not the key of the store in {directory}: set the right key. The store is "
            "unchanged."
        )


def must_convert(directory: Path, encryption: StoreEncryption | None) -> bool:
    """Return whether the store has streams that are not encrypted, or with another cipher."""
    if encryption is None or not any(directory.glob("jetstream/*/streams/*")):
        return False
    record = _read(directory)
    return not is_encrypted(directory) or (record is not None and record.cipher != encryption.cipher)


def write_record(directory: Path, encryption: StoreEncryption | None) -> None:
    """Write encryption.json, before nats-server writes anything with the key. Raises OSError."""
    if encryption is None:
        _path(directory).unlink(missing_ok=True)  # `check` has found nothing that is encrypted
    elif _read(directory) != encryption.record:
        replace_private(_path(directory), msgspec.json.encode(encryption.record))


def is_encrypted(directory: Path) -> bool:
    """Return whether any stream is encrypted: nats-server stores a stream's own key beside it."""
    return any(directory.glob("jetstream/*/streams/*/meta.key"))


def _path(directory: Path) -> Path:
    return directory / "encryption.json"


def _read(directory: Path) -> _Record | None:
    try:
        return msgspec.json.decode(_path(directory).read_bytes(), type=_Record)
    except (OSError, msgspec.MsgspecError):
        return None
