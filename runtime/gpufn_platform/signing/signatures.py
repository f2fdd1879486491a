"""Checks of signatures by a gateway, agent or builder, with the rules on the bus and the rules of the node.

A revision is verified once: the result counts until its record or a rule changes, so a start does not pay for it.
Before a refusal the rules are read from the bus, because a watch may lag: the key may have been trusted just now.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import msgspec

from gpufn_core.domain.devices.engine import Build
from gpufn_core.domain.revision import Revision, RevisionKey
from gpufn_core.encoding.msgspec_errors import DECODE_ERRORS
from gpufn_core.errors import UntrustedDeploy
from gpufn_core.signing.trust import Trust, TrustedKey, check_build, check_revision
from gpufn_platform.bus.storage.key_value import Entry, KeyValue, Watch
from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.signing.local_trust import LocalTrust

log = logging.getLogger(__name__)

KEYS: Final = "key."
REQUIRED: Final = "require."

decode_trusted_key = msgspec.msgpack.Decoder(TrustedKey).decode


class Signatures:
    """`on_change` is called when a rule on the bus has changed."""

    def __init__(self, bucket: KeyValue, local: LocalTrust) -> None:
        self._bucket = bucket
        self._local = local
        self._keys: dict[str, TrustedKey] = {}
        self._required: set[str] = set()
        self._trust = local.combine(Trust())
        self._verified: dict[RevisionKey, Revision] = {}
        self._watch: Watch | None = None
        self.on_change: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Start the watch. Returns once all rules are known."""
        self._watch = await self._bucket.watch(self._on_record)

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()

    @property
    def keys(self) -> list[TrustedKey]:
        """The trusted keys on the bus, by name."""
        return [self._keys[name] for name in sorted(self._keys)]

    @property
    def required(self) -> list[str]:
        """The environments that require signatures by a rule on the bus."""
        return sorted(self._required)

    async def verify_revision(self, key: RevisionKey, revision: Revision) -> None:
        """Check the signature of the revision that is stored as `key`. Raises UntrustedDeploy, BusUnavailable."""
        await self._verify(lambda: self.check_revision(key, revision))

    async def verify_new(self, revision: Revision) -> None:
        """Check a revision that is not stored yet. Raises UntrustedDeploy, BusUnavailable."""
        await self._verify(lambda: self.check_new(revision))

    async def verify_build(self, build: Build) -> None:
        """Raises UntrustedDeploy, BusUnavailable."""
        await self._verify(lambda: self.check_build(build))

    async def _verify(self, check: Callable[[], None]) -> None:
        try:
            check()
        except UntrustedDeploy:
            for key in await self._bucket.keys():
                await self._bucket.get(key)  # this updates our watch
            check()

    def check_revision(self, key: RevisionKey, revision: Revision) -> None:
        """Like `verify_revision`, with the rules that are known here. Raises UntrustedDeploy."""
        if self._local.is_off:
            return
        self._refresh()
        if self._verified.get(key) is revision:
            return
        self._verified.pop(key, None)
        if revision.key != key:
            raise UntrustedDeploy(f"The record of {key[0]}@{key[1]} is of another revision: deploy it again.")
        check_revision(self._trust, revision.function, revision)
        self._verified[key] = revision

    def check_new(self, revision: Revision) -> None:
        """Like `verify_new`, with the rules that are known here. Raises UntrustedDeploy."""
        if not self._local.is_off:
            self._refresh()
            check_revision(self._trust, revision.function, revision)

    def check_build(self, build: Build) -> None:
        """Like `verify_build`, with the rules that are known here. Raises UntrustedDeploy."""
        if not self._local.is_off:
            self._refresh()
            check_build(self._trust, build)

    def would_refuse(self, revision: Revision, *, required: str) -> bool:
        """Return whether the revision could not start if the environment `required` required signatures."""
        trust = msgspec.structs.replace(self._trust, required=self._trust.required | {required})
        try:
            check_revision(trust, revision.function, revision)
        except UntrustedDeploy:
            return True
        return False

    def forget(self, key: RevisionKey) -> None:
        """Forget a deleted revision."""
        self._verified.pop(key, None)

    def _refresh(self) -> None:
        try:
            if self._local.refresh():
                self._combine()
        except InvalidSetting as error:  # fail closed: the file is the node's protection
            raise UntrustedDeploy(f"This node cannot check signatures. {error.message}") from error

    def _combine(self) -> None:
        shared = Trust(keys=tuple(self._keys.values()), required=frozenset(self._required))
        self._trust = self._local.combine(shared)
        self._verified.clear()

    def _on_record(self, key: str, entry: Entry | None) -> None:
        if key.startswith(REQUIRED):
            (self._required.discard if entry is None else self._required.add)(key.removeprefix(REQUIRED))
        elif key.startswith(KEYS):
            self._keys.pop(key.removeprefix(KEYS), None)
            if entry is not None:
                try:
                    self._keys[key.removeprefix(KEYS)] = decode_trusted_key(entry.value)
                except DECODE_ERRORS as error:
                    log.error("the trusted key %s cannot be read, and is not trusted: %s", key, error)
        self._combine()
        self.on_change()
