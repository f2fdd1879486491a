"""Rules of trust: which keys may sign which functions, and where a signature is required. Pure.

A signature that is present is always checked. Without one, a deploy is refused where signatures are required.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from gpufn_core.domain.devices.engine import Build
from gpufn_core.domain.revision import Revision
from gpufn_core.encoding.msgspec_errors import DECODE_ERRORS
from gpufn_core.errors import InvalidInput, UntrustedDeploy
from gpufn_core.signing.statement import DeploySignature, Statement, decode_statement, spec_digest
from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_core.spec.naming import variant_options
from gpufn_core.spec.naming.names import parts_of
from gpufn_core.spec.naming.patterns import matches
from gpufn_core.spec.naming.variant_names import function_of
from gpufn_core.spec.terminal_spec import terminal_spec

SIGNER_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")


class TrustedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A public key whose owner may sign deploys of the functions that match one of `patterns`."""

    name: str
    id: str
    public_key: bytes
    patterns: tuple[str, ...]
    added_at: float = 0.0  # unix seconds


class Trust(msgspec.Struct, frozen=True, kw_only=True):
    """The trusted keys, and the environments that require a signature. With `requires_all`, all do, and builds without
    a function too."""

    keys: tuple[TrustedKey, ...] = ()
    required: frozenset[str] = frozenset()
    requires_all: bool = False

    def requires(self, function: str) -> bool:
        return self.requires_all or (bool(function) and parts_of(function).env in self.required)


def check_revision(trust: Trust, function: str, revision: Revision) -> None:
    """Check that a trusted key signed `revision` as a revision of `function`. Raises UntrustedDeploy.

    `function` is the name under which the revision is stored, and to which its workers would belong. A variant is
    signed as its function: its parameters are values of callers, as arguments are.
    """
    function = function_of(function)
    if trust.requires(function) and revision.variant is not None and revision.variant.is_terminal:
        raise UntrustedDeploy(
            f"{parts_of(function).env} requires signatures, and the commands of a terminal have none: deploy "
            f"{function} to another environment for a terminal."
        )
    statement = _verified(trust, function, revision.signature)
    if statement is None:
        return
    actual = Statement.of(function, _signed_spec(revision), revision.bundle, statement.signed_at)
    if different := actual.differences(statement):
        raise UntrustedDeploy(
            f"The signature of {function} is of another deploy: {', '.join(different)} differ from what was signed. "
            "Sign and deploy it again."
        )


def _signed_spec(revision: Revision) -> FunctionSpec:
    """Return the spec that was signed. A caller may change the resources of a variant, and nothing else. Raises
    UntrustedDeploy."""
    variant = revision.variant
    if variant is None or variant.original is None:
        return revision.spec
    try:
        changed = variant_options.apply(variant.original, variant.options)
        is_changed_by_options = (terminal_spec(changed) if variant.is_terminal else changed) == revision.spec
    except InvalidInput:
        is_changed_by_options = False
    if not is_changed_by_options:
        raise UntrustedDeploy(f"The spec of {revision} differs from what was signed by more than its options.")
    return variant.original


def check_build(trust: Trust, build: Build) -> None:
    """Check that a trusted key signed the model of a build. Raises UntrustedDeploy."""
    statement = _verified(trust, build.function, build.signature)
    if statement is None:
        return
    if statement.function != build.function or spec_digest(build.model) not in statement.models:
        raise UntrustedDeploy(
            f"The signature of {build.function} is of another deploy: it does not have this model. Sign and deploy it "
            "again."
        )


def _verified(trust: Trust, function: str, signature: DeploySignature | None) -> Statement | None:
    """Return the signed statement; None if there is no signature and none is required. Raises UntrustedDeploy."""
    if signature is None:
        if trust.requires(function):
            what = f"{function} is not signed, and {parts_of(function).env} requires signatures" if function else ""
            raise UntrustedDeploy(
                f"{what or 'This build is not signed, and this node requires signatures'}: deploy with --sign FILE."
            )
        return None
    from gpufn_core.signing.ed25519 import is_signed_by  # noqa: PLC0415  8 MB that unsigned builds do not need

    keys = [key for key in trust.keys if any(matches(pattern, function) for pattern in key.patterns)]
    trusted = next((key for key in keys if key.id == signature.key), None)
    if trusted is None:
        raise UntrustedDeploy(
            f"The key {signature.key} that signed {function} is not trusted for it: sign with a trusted key, or let an "
            "administrator run `gpufn signing trust`."
        )
    if not is_signed_by(trusted.public_key, signature):
        raise UntrustedDeploy(f"The signature of {function} is not valid: sign and deploy it again.")
    try:
        return decode_statement(signature.payload)
    except DECODE_ERRORS as error:
        raise UntrustedDeploy(
            f"The signature of {function} is in a form that this release does not know: {error}."
        ) from error
