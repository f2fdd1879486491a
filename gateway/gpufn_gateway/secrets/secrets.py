"""Set, list and remove secrets, and encrypt them again under a new master key. No value can be read here."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from gpufn_core.errors import Conflict, FunctionNotFound, InvalidInput, RevisionNotFound, SecretNotFound
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.function_spec import check_secret_name
from gpufn_gateway.buckets import records
from gpufn_gateway.functions.deploys import Deploys
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.openapi.request_bodies import MAX_SECRET_BYTES
from gpufn_platform.bus.storage.key_value import Entry, KeyValue
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.secrets.envelope import Keyring, SealedSecret, decode_secret, new_master_key
from gpufn_platform.secrets.master_key import MasterKey

log = logging.getLogger(__name__)


class NoMasterKey(Conflict):
    """The gateway has no master key that it can use."""

    retryable = False


class SecretView(msgspec.Struct, frozen=True):
    """A secret, without its value. `functions`: the functions whose active revision uses it."""

    name: str
    version: int
    updated_at: float
    functions: tuple[str, ...]


class Secrets:
    def __init__(
        self, bucket: KeyValue, master_key: MasterKey, registry: Registry, deploys: Deploys, clock: Clock
    ) -> None:
        self._bucket = bucket
        self._master_key = master_key
        self._registry = registry
        self._deploys = deploys
        self._clock = clock
        self._lock = asyncio.Lock()  # a rotation must not drop the key of a secret that is being set

    async def set(self, name: str, value: str) -> SecretView:
        """Store a value, and replace the workers of the functions that use it. Raises InvalidInput,
        NoMasterKey."""
        check_secret_name(name)
        _check(value)
        async with self._lock:
            keyring = await self._keyring()

            def change(entry: Entry | None) -> bytes:
                version = 1 if entry is None else decode_secret(entry.value).version + 1
                return encode(keyring.seal(name, version, value, self._clock.time()))

            secret = decode_secret((await self._bucket.change(name, change)).value)
        for function in self._users(name):
            try:
                await self._deploys.restart(function)
            except (FunctionNotFound, RevisionNotFound):  # deleted in the meantime
                log.info("%s was not restarted with the new secret %s: it is gone", function, name)
        return self._view(secret)

    async def all(self) -> list[SecretView]:
        """List the secrets by name."""
        secrets = await records(self._bucket, decode_secret)
        return [self._view(secret) for secret in sorted(secrets, key=lambda secret: secret.name)]

    async def remove(self, name: str) -> None:
        """Remove a secret that no function uses. Raises SecretNotFound, Conflict."""
        check_secret_name(name)
        if users := self._users(name):
            raise Conflict(f"{', '.join(users)} use{'s' if len(users) == 1 else ''} {name}: deploy without it first.")
        if await self._bucket.get(name) is None:
            raise SecretNotFound(f"There is no secret {name}.")
        await self._bucket.delete(name)

    async def rotate(self) -> int:
        """Encrypt the data keys under the first master key; return their number. Make a new master key first if there
        is none yet and it is in a file that no other host needs. Raises NoMasterKey, Conflict."""
        async with self._lock:
            keyring = await self._keyring()
            secrets = await records(self._bucket, decode_secret)
            if all(secret.master_key == keyring.first for secret in secrets) and len(keyring.keys) == 1:
                keyring = self._with_new_key(keyring)
            for secret in secrets:
                await self._rewrap(secret.name, keyring)
            if self._owns_file():
                self._master_key.replace_file(Keyring(keyring.keys[:1]))
        return len(secrets)

    async def _rewrap(self, name: str, keyring: Keyring) -> None:
        def change(entry: Entry | None) -> bytes:
            if entry is None:
                raise SecretNotFound
            return encode(keyring.rewrap(decode_secret(entry.value)))

        try:
            await self._bucket.change(name, change)
        except SecretNotFound:  # removed in the meantime
            return

    def _with_new_key(self, keyring: Keyring) -> Keyring:
        if not self._owns_file():
            raise Conflict(
                f"There is no new master key: on each host, put one before the old one in {self._master_key.setting}, "
                "then rotate again."
            )
        both = Keyring([new_master_key(), *keyring.keys])
        self._master_key.replace_file(both)
        return both

    def _owns_file(self) -> bool:
        """Return whether the key is in a file of this host, and no other node needs it."""
        return self._master_key.file is not None and len(self._registry.live_nodes()) <= 1

    async def _keyring(self) -> Keyring:
        try:
            keyring = await asyncio.to_thread(self._master_key.load)
        except InvalidSetting as error:
            raise NoMasterKey(error.message) from error
        if keyring is None:
            raise NoMasterKey(
                f"{self._master_key} does not exist: write 32 random bytes in base64 to it, on the host of each "
                "gateway and agent."
            )
        return keyring

    def _users(self, name: str) -> list[str]:
        revisions = self._registry.revisions
        return sorted(
            function.name
            for function in self._registry.functions.values()
            if any(
                name in revisions[function.name][number].spec.secrets
                for number in (function.active, function.serving)
                if number in revisions.get(function.name, {})
            )
        )

    def _view(self, secret: SealedSecret) -> SecretView:
        return SecretView(secret.name, secret.version, secret.updated_at, tuple(self._users(secret.name)))


async def check_master_key(bucket: KeyValue, master_key: MasterKey) -> None:
    """Raises InvalidSetting if another master key encrypts the stored secrets."""
    secrets = await records(bucket, decode_secret)
    await asyncio.to_thread(master_key.check, secrets)


def _check(value: str) -> None:
    if not value:
        raise InvalidInput("the value is empty", field="value")
    if (size := len(value.encode())) > MAX_SECRET_BYTES:
        raise InvalidInput(f"a value may have {MAX_SECRET_BYTES:,} bytes, and this one has {size:,}", field="value")
    if "\0" in value:
        raise InvalidInput("an environment variable cannot hold a null character", field="value")
