"""The signed statement of a deploy, in a canonical form. Pure.

A signature covers the function's full name, the bundle and the whole spec, so it cannot be moved to another function,
environment, bundle or spec. It does not cover the number of the revision: a copy of a revision keeps its signature.

The bytes that are signed follow DSSE: the type of the payload, then the payload, each with its length.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Annotated, Any, Final, Self

import msgspec

from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_core.spec.model_spec import ModelSpec

PAYLOAD_TYPE: Final = b"application/vnd.gpufn.deploy.v1+json"
MAX_PAYLOAD_BYTES: Final = 64 << 10
SIGNATURE_BYTES: Final = 64

_canonical_json = msgspec.json.Encoder().encode


class DeploySignature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Statement as it was signed. `payload` is its encoding, `key` the id of the signer's public key, and `value` the
    Ed25519 signature of `signed_bytes(payload)`."""

    payload: Annotated[bytes, msgspec.Meta(max_length=MAX_PAYLOAD_BYTES)]
    key: Annotated[str, msgspec.Meta(max_length=64)]
    value: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)]


class Statement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a deploy for which its signer vouches.

    `spec` is the digest of the whole FunctionSpec. `models`, `weights` and `image` are digests of its parts: a builder
    knows only one model.
    """

    function: str
    bundle: str
    spec: str
    models: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    image: str = ""
    signed_at: float  # unix seconds, by the signer's clock

    @classmethod
    def of(cls, function: str, spec: FunctionSpec, bundle: str, signed_at: float) -> Self:
        return cls(
            function=function,
            bundle=bundle,
            spec=spec_digest(spec),
            models=tuple(map(spec_digest, spec.models)),
            weights=tuple(each.digest for each in spec.weights),
            image=spec.image.digest if spec.image else "",
            signed_at=signed_at,
        )

    def encoded(self) -> bytes:
        return _canonical_json(self)

    def differences(self, other: Statement) -> list[str]:
        """Return the names of the fields that differ."""
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]


decode_statement = msgspec.json.Decoder(Statement).decode


def signed_bytes(payload: bytes) -> bytes:
    """Return the bytes that a signature covers: the pre-authentication encoding of DSSE.

    >>> signed_bytes(b"{}")
    b'DSSEv1 36 application/vnd.gpufn.deploy.v1+json 2 {}'
    """
    return b"DSSEv1 %d %b %d %b" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE, len(payload), payload)


def spec_digest(spec: FunctionSpec | ModelSpec) -> str:
    """Return the sha256 of a spec in its canonical form.

    The canonical form leaves out fields that have their default, so a later release that adds a field computes the same
    digest. Fields are sorted; the keys of dictionaries keep their order, because the order of parameters has a meaning.
    """
    return hashlib.sha256(_canonical_json(_canonical(spec))).hexdigest()


def _canonical(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        fields = ((name, getattr(value, name), default) for name, default in _fields(type(value)))
        return {name: _canonical(each) for name, each, default in fields if not _is_default(each, default)}
    if isinstance(value, dict):
        return {key: _canonical(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_canonical(each) for each in value]
    return value


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, Any], ...]:
    """Return the names of a struct's fields, sorted, with their defaults; NODEFAULT for a required field."""
    fields = msgspec.structs.fields(kind)
    return tuple(
        (field.name, field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default)
        for field in sorted(fields, key=lambda field: field.name)
    )
