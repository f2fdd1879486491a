"""Trust and distrust keys, and require signatures in an environment."""

from __future__ import annotations

import msgspec

from gpufn_core.errors import Conflict, InvalidInput, InvalidSpec, SignerNotFound
from gpufn_core.protocol.codec import encode
from gpufn_core.signing.trust import SIGNER_NAME, TrustedKey
from gpufn_core.spec.naming.names import check_group, parts_of
from gpufn_core.spec.naming.patterns import check_pattern
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.openapi.request_bodies import MAX_SIGNER_PATTERNS
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.process.clock import Clock
from gpufn_platform.signing.signatures import KEYS, REQUIRED, Signatures


class SignerView(msgspec.Struct, frozen=True):
    """A trusted key. `functions`: the functions whose active revision it signed."""

    name: str
    id: str
    patterns: tuple[str, ...]
    added_at: float
    functions: tuple[str, ...]


class TrustedKeys:
    def __init__(self, bucket: KeyValue, signatures: Signatures, registry: Registry, clock: Clock) -> None:
        self._bucket = bucket
        self._signatures = signatures
        self._registry = registry
        self._clock = clock

    def all(self) -> list[SignerView]:
        """List the trusted keys by name."""
        return [self._view(key) for key in self._signatures.keys]

    def required(self) -> list[str]:
        """List the environments that require signatures."""
        return self._signatures.required

    async def trust(self, name: str, public_key: str, patterns: tuple[str, ...]) -> SignerView:
        """Trust a key, or replace the key of this name. Raises InvalidInput, Conflict."""
        from gpufn_core.signing.ed25519 import key_id, parse_public_key  # noqa: PLC0415  8 MB, needed with a key only

        if SIGNER_NAME.fullmatch(name) is None:
            raise InvalidInput(
                f"{name[:80]!r} is not the name of a key: use a to z, 0 to 9 and hyphens, at most 64 characters",
                field="name",
            )
        if not 0 < len(patterns) <= MAX_SIGNER_PATTERNS:
            raise InvalidInput(f"a key has 1 to {MAX_SIGNER_PATTERNS} patterns of functions", field="patterns")
        for pattern in patterns:
            check_pattern(pattern, "patterns")
        public = parse_public_key(public_key)
        other = next((key for key in self._signatures.keys if key.public_key == public and key.name != name), None)
        if other is not None:
            raise Conflict(f"This key is already trusted as {other.name}: remove that one first.")
        key = TrustedKey(
            name=name, id=key_id(public), public_key=public, patterns=patterns, added_at=self._clock.time()
        )
        await self._bucket.put(f"{KEYS}{name}", encode(key))
        return self._view(key)

    async def distrust(self, name: str) -> SignerView:
        """Stop trusting a key. Running workers continue; new workers of the revisions that it signed do not start.
        Raises SignerNotFound."""
        known = next((key for key in self._signatures.keys if key.name == name), None)
        if known is None:
            raise SignerNotFound(f"There is no trusted key {name[:80]!r}.")
        await self._bucket.delete(f"{KEYS}{name}")
        return self._view(known)

    async def require(self, environment: str, *, force: bool = False) -> None:
        """Require signatures in an environment. Raises InvalidInput; Conflict if functions there could not start any
        more, without `force`."""
        _check_environment(environment)
        refused = [] if force else self._refused(environment)
        if refused:
            raise Conflict(
                f"These functions have no valid signature, and could not start any more: {', '.join(refused)}. Deploy "
                "them with --sign first, or use --force."
            )
        await self._bucket.put(f"{REQUIRED}{environment}", encode(self._clock.time()))

    async def allow_unsigned(self, environment: str) -> None:
        """Require no signatures any more in an environment. Raises InvalidInput."""
        _check_environment(environment)
        if environment in self._signatures.required:
            await self._bucket.delete(f"{REQUIRED}{environment}")

    def _refused(self, environment: str) -> list[str]:
        return sorted(
            revision.function
            for revision in self._registry.active_revisions()
            if parts_of(revision.function).env == environment
            and self._signatures.would_refuse(revision, required=environment)
        )

    def _view(self, key: TrustedKey) -> SignerView:
        active = self._registry.active_revisions()
        signed = sorted(each.function for each in active if each.signature and each.signature.key == key.id)
        return SignerView(key.name, key.id, key.patterns, key.added_at, tuple(signed))


def _check_environment(name: str) -> None:
    try:
        check_group("environment", name)
    except InvalidSpec as error:
        raise InvalidInput(error.message, field="environment") from error
