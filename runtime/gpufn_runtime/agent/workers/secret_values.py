"""Values of secrets, decrypted for the workers that this agent starts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol

from gpufn_core.errors import PlatformError, SecretNotFound
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.secrets.envelope import Keyring, SealedSecret, decode_secret
from gpufn_platform.secrets.master_key import MasterKey

log = logging.getLogger(__name__)


class Secrets(Protocol):
    async def values(self, names: Iterable[str]) -> dict[str, str]:
        """Return the current values by name. Raises SecretNotFound, PlatformError, InvalidSetting."""


class StoredSecrets:
    def __init__(self, bucket: KeyValue, master_key: MasterKey) -> None:
        self._bucket = bucket
        self._master_key = master_key
        self._keyring: Keyring | None = None  # kept: a command such as a KMS client takes long

    async def check(self) -> None:
        """Raises InvalidSetting if another master key encrypts the stored secrets. A node without a master key is
        fine: functions with secrets cannot start there."""
        secrets = [decode_secret(entry.value) for entry in await self._bucket.entries()]
        if await asyncio.to_thread(self._master_key.load) is None:
            if secrets:
                log.warning("functions with secrets cannot start on this node: %s does not exist", self._master_key)
            return
        await asyncio.to_thread(self._master_key.check, secrets)

    async def values(self, names: Iterable[str]) -> dict[str, str]:
        """Return the current values by name. Raises SecretNotFound, PlatformError, InvalidSetting."""
        return {name: await self._value(name) for name in names}

    async def _value(self, name: str) -> str:
        secret = await self._record(name)
        if self._keyring is None or not self._keyring.opens(secret):  # the first one, or the master key was rotated
            self._keyring = await asyncio.to_thread(self._master_key.load)
            secret = await self._record(name)  # the rotation may have ended in between
        if self._keyring is None:
            raise PlatformError(
                f"This node cannot decrypt the secret {name}: {self._master_key} does not exist. Copy the master key "
                "to this node."
            )
        return self._keyring.open(secret)

    async def _record(self, name: str) -> SealedSecret:
        entry = await self._bucket.get(name)
        if entry is None:
            raise SecretNotFound(f"The secret {name} is not set: run gpufn secrets set {name}.")
        return decode_secret(entry.value)
