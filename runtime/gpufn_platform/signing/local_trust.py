"""The node's own rules of trust: settings that the bus cannot change.

A gateway that an attacker controls can write any record to the bus, trusted keys included. With these settings an agent
or builder does not need to trust the bus.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from gpufn_core.errors import InvalidInput
from gpufn_core.signing.trust import Trust, TrustedKey
from gpufn_core.spec.naming.names import GROUP
from gpufn_core.spec.naming.patterns import is_pattern
from gpufn_platform.process.settings import InvalidSetting

MODE = "GPUFN_SIGNATURES"
FILE = "GPUFN_TRUSTED_KEYS_FILE"
_MODES = ("off", "policy", "require")

_Version = tuple[int, int, int]  # version of the file: it changes when the file does


class _Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    public_key: str
    patterns: tuple[str, ...] = msgspec.field(name="for", default=("*",))


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of trusted keys: the keys by name, and the environments that require a signature."""

    keys: dict[str, _Key] = {}
    require: tuple[str, ...] = ()


class LocalTrust:
    """`mode` is off, policy or require. `file` has the trusted keys; without a file, the keys on the bus count."""

    def __init__(self, mode: str = "policy", file: Path | None = None) -> None:
        self._mode = mode
        self._file = file
        self._version: _Version | None = None
        self._own = Trust()

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Read the settings and the file. Raises InvalidSetting."""
        mode = environ.get(MODE, "").strip() or "policy"
        if mode not in _MODES:
            raise InvalidSetting(f"{MODE} must be off, policy or require, not {mode!r}.")
        path = environ.get(FILE, "").strip()
        trust = cls(mode, Path(path) if path else None)
        trust.refresh()
        return trust

    @property
    def is_off(self) -> bool:
        return self._mode == "off"

    def refresh(self) -> bool:
        """Read the file again if it changed, and return whether it did. Raises InvalidSetting."""
        if self._file is None:
            return False
        try:
            status = self._file.stat()
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
            if version == self._version:
                return False
            if status.st_mode & 0o022:
                raise ValueError("other users can write the file: run chmod go-w")
            self._own = _parse(self._file.read_bytes())
        except OSError as error:
            self._version = None
            raise InvalidSetting(f"Cannot read {FILE}={self._file}: {error.strerror}.") from error
        except (ValueError, InvalidInput) as error:
            self._version = None
            raise InvalidSetting(f"{FILE}={self._file}: {error}") from error
        self._version = version
        return True

    def combine(self, shared: Trust) -> Trust:
        """Return the rules of this node, given the rules on the bus. The bus can add requirements, but remove none."""
        own = self._own if self._file is not None else Trust(keys=shared.keys)
        return Trust(keys=own.keys, required=own.required | shared.required, requires_all=self._mode == "require")


def _parse(data: bytes) -> Trust:
    """Raises ValueError, InvalidInput."""
    content: Any = tomllib.loads(data.decode())
    file = msgspec.convert(content, _File)
    for environment in file.require:
        if GROUP.fullmatch(environment) is None:
            raise ValueError(f"{environment!r} in require is not the name of an environment")
    return Trust(keys=tuple(_key(name, key) for name, key in file.keys.items()), required=frozenset(file.require))


def _key(name: str, key: _Key) -> TrustedKey:
    from gpufn_core.signing.ed25519 import key_id, parse_public_key  # noqa: PLC0415  8 MB, needed with a file only

    for pattern in key.patterns:
        if not is_pattern(pattern):
            raise ValueError(f"{pattern!r} in keys.{name} is no pattern of functions, such as prod/*")
    public = parse_public_key(key.public_key)
    return TrustedKey(name=name, id=key_id(public), public_key=public, patterns=key.patterns)
