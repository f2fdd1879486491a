"""Set, list and remove secrets, and encrypt them again under a new master key. No value can be read here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Iterable, Iterator, Sequence

import msgspec

from gpufn_core.domain.revision import RevisionState
from gpufn_core.errors import Conflict, FunctionNotFound, InvalidInput, RevisionNotFound, SecretNotFound
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.function_spec import check_secret_name
from gpufn_core.spec.naming.patterns import ALL
from gpufn_core.spec.naming.secret_scopes import SecretRef, check_scope, effective
from gpufn_gateway.buckets import records
from gpufn_gateway.functions.deploys import Deploys
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.functions.secret_use import usable
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
    """A secret, without its value. `functions`: the functions whose workers receive it."""

    name: str
    scope: str
    version: int
    updated_at: float
    functions: tuple[str, ...]

    @property
    def ref(self) -> SecretRef:
        return SecretRef(self.name, self.scope)


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

    async def set(self, ref: SecretRef, value: str) -> SecretView:
        """Store a value, and replace the workers of the functions that get it. Raises InvalidInput, NoMasterKey."""
        check_ref(ref)
        _check(value)
        async with self._lock:
            keyring = await self._keyring()

            def change(entry: Entry | None) -> bytes:
                version = 1 if entry is None else decode_secret(entry.value).version + 1
                return encode(keyring.seal(ref, version, value, self._clock.time()))

            secret = decode_secret((await self._bucket.change(ref.key, change)).value)
        known = await self._known()
        await self._restart(self._users(ref, known))
        return self._view(secret, known)

    async def all(self) -> list[SecretView]:
        """List the secrets by name and scope."""
        secrets = await records(self._bucket, decode_secret)
        known = {secret.ref.key for secret in secrets}
        return [self._view(secret, known) for secret in sorted(secrets, key=lambda secret: secret.ref)]

    async def remove(self, ref: SecretRef) -> None:
        """Remove a secret. Functions that got it get the next wider one, if their deployers could use it. Raises
        SecretNotFound, and Conflict if a function would have none."""
        check_ref(ref)
        known = await self._known()
        others = known - {ref.key}
        if ref.key not in known:
            raise no_such_secret(ref)
        without = {name for name, refs in self._wanted(ref.name, is_built=True) if _loses(refs, ref, others)}
        if without:
            use = f"{', '.join(sorted(without))} use{'s' if len(without) == 1 else ''}"
            raise Conflict(f"{use} {ref.name}: deploy without it first.")
        users = self._users(ref, known)
        await self._bucket.delete(ref.key)
        await self._restart(users)

    async def _known(self) -> frozenset[str]:
        return frozenset(await self._bucket.keys())

    async def _restart(self, functions: Iterable[str]) -> None:
        for function in functions:
            try:
                await self._deploys.restart(function)
            except (FunctionNotFound, RevisionNotFound):  # deleted in the meantime
                log.info("%s was not restarted after a secret had changed: it is gone", function)

    async def rotate(self) -> int:
        """Encrypt the data keys under the first master key; return their number. Make a new master key first if there
        is none yet and it is in a file that no other host needs. Raises NoMasterKey, Conflict."""
        async with self._lock:
            keyring = await self._keyring()
            secrets = await records(self._bucket, decode_secret)
            if all(secret.master_key == keyring.first for secret in secrets) and len(keyring.keys) == 1:
                keyring = self._with_new_key(keyring)
            for secret in secrets:
                await self._rewrap(secret.ref.key, keyring)
            if self._owns_file():
                self._master_key.replace_file(Keyring(keyring.keys[:1]))
        return len(secrets)

    async def _rewrap(self, key: str, keyring: Keyring) -> None:
        def change(entry: Entry | None) -> bytes:
            if entry is None:
                raise SecretNotFound
            return encode(keyring.rewrap(decode_secret(entry.value)))

        try:
            await self._bucket.change(key, change)
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

    def _users(self, ref: SecretRef, known: Container[str]) -> list[str]:
        """Return the functions whose workers receive a secret, among functions with known keys."""
        return sorted({name for name, refs in self._wanted(ref.name) if effective(refs, known) == ref})

    def _wanted(self, name: str, *, is_built: bool = False) -> Iterator[tuple[str, list[SecretRef]]]:
        """Yield the functions with a secret of this name, and the secrets that they can get. `is_built`: also for the
        revisions that are being built."""
        for function, revisions in self._registry.revisions.items():
            record = self._registry.functions.get(function)
            called = () if record is None else record.called
            for number, revision in revisions.items():
                is_used = number in called or (is_built and revision.state is RevisionState.BUILDING)
                if is_used and name in revision.spec.secrets:
                    yield function, usable(revision, name)

    def _view(self, secret: SealedSecret, known: Container[str]) -> SecretView:
        users = self._users(secret.ref, known)
        return SecretView(*secret.ref, secret.version, secret.updated_at, tuple(users))


def check_ref(ref: SecretRef) -> None:
    """Raises InvalidInput."""
    check_secret_name(ref.name)
    check_scope(ref.scope)


def no_such_secret(ref: SecretRef) -> SecretNotFound:
    of = "" if ref.scope == ALL else f" for {ref.scope}"
    return SecretNotFound(f"There is no secret {ref.name}{of}.")


def _loses(refs: Sequence[SecretRef], ref: SecretRef, others: Container[str]) -> bool:
    """Return whether a function that can get `refs` has none without `ref`."""
    return ref in refs and effective(refs, others) is None


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
