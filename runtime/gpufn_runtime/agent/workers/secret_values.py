"""Values of secrets, decrypted for the workers that this agent starts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from gpufn_core.errors import PlatformError, SecretNotFound
from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_core.spec.naming.patterns import ALL
from gpufn_core.spec.naming.secret_scopes import SecretRef, candidates
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.secrets.envelope import Keyring, SealedSecret, decode_secret
from gpufn_platform.secrets.master_key import MasterKey

log = logging.getLogger(__name__)


class Secrets(Protocol):
    async def values(self, spec: FunctionSpec, widest: Mapping[str, str]) -> dict[str, str]:
        """Return the current values of a function's secrets by name: the most specific ones, of at most the scope
        `widest` (`Revision.secret_scopes`). Raises SecretNotFound, PlatformError, InvalidSetting."""


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

    async def values(self, spec: FunctionSpec, widest: Mapping[str, str]) -> dict[str, str]:
        """Return the current values of a function's secrets by name: the most specific ones, of at most the scope
        `widest` (`Revision.secret_scopes`). Raises SecretNotFound, PlatformError, InvalidSetting."""
        refs = [candidates(name, spec.name, widest.get(name, ALL)) for name in spec.secrets]
        values = await asyncio.gather(*map(self._value, refs))
        return dict(zip(spec.secrets, values, strict=True))

    async def _value(self, refs: Sequence[SecretRef]) -> str:
        secret, ref = await self._record(refs)
        if self._keyring is None or not self._keyring.opens(secret):  # the first one, or the master key was rotated
            self._keyring = await asyncio.to_thread(self._master_key.load)
            secret, ref = await self._record(refs)  # the rotation may have ended in between
        if self._keyring is None:
            raise PlatformError(
                f"This node cannot decrypt the secret {ref.key}: {self._master_key} does not exist. Copy the master "
                "key to this node."
            )
        return self._keyring.open(secret, ref)

    async def _record(self, refs: Sequence[SecretRef]) -> tuple[SealedSecret, SecretRef]:
        """Return the first existing record, and its reference."""
        entries = await asyncio.gather(*(self._bucket.get(ref.key) for ref in refs))
        for ref, entry in zip(refs, entries, strict=True):
            if entry is not None:
                return decode_secret(entry.value), ref
        widest = refs[-1]
        raise SecretNotFound(f"The secret {widest.key} is not set: run gpufn secrets set {widest.arguments}.")
