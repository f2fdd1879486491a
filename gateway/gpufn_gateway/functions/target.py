"""The target of a call: a revision's method, with everything precomputed that a call needs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from gpufn_core.domain.revision import Function, Revision
from gpufn_core.domain.traffic import NO_HEADERS, Split, choose
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_gateway.arguments.signature import Signature
from gpufn_gateway.auth.team_account import TeamAccount

_IDEMPOTENCY_KEY = b"idempotency-key"
_RANDOM_BYTES = 8


class Target:
    """`split` is None unless the function's calls are divided between revisions: then this target is the serving
    revision's, and `of` returns the one for a call."""

    __slots__ = (
        "budget_s", "function", "method", "name", "number", "revision", "revision_header", "signature", "split", "team",
    )  # fmt: skip

    def __init__(
        self, function: Function, revision: Revision, method: MethodSpec, signature: Signature, team: TeamAccount | None
    ) -> None:
        spec = revision.spec
        queue_s = spec.startup_timeout_s if spec.queue_timeout_s is None else spec.queue_timeout_s
        self.name = function.name
        self.number = revision.number
        self.function = function
        self.revision = revision
        self.method = method
        self.signature = signature
        self.team = team  # whose limits it counts against
        self.budget_s = queue_s + spec.timeout_s  # from submission to the deadline
        self.revision_header = str(revision).encode()
        self.split: SplitTargets | None = None

    @property
    def path(self) -> str:
        """The name with which a client calls it: `predict`, or `counter.add` for a method."""
        return f"{self.name}.{self.method.name}" if self.method.name else self.name

    def of(self, key: str, headers: Mapping[bytes, bytes] = NO_HEADERS, revision: str = "") -> Target:
        """Return the target of one call: `revision`, if the client names one that receives calls, otherwise chosen by
        the headers and the key. Calls with equal keys get the same target."""
        if self.split is None:
            return self
        return (self.split.by_number.get(revision) if revision else self.split.choose(key, headers)) or self


class SplitTargets:
    """`by_number` has the revisions of the split that can be called and have the method. Calls for another one go to
    the serving revision."""

    __slots__ = ("by_number", "split")

    def __init__(self, split: Split, targets: list[Target]) -> None:
        self.split = split
        self.by_number = {str(target.number): target for target in targets}

    def choose(self, key: str, headers: Mapping[bytes, bytes]) -> Target | None:
        """`key` is the common key of repeated calls. Without a key it is the Idempotency-Key, or random."""
        sent = key.encode() or headers.get(_IDEMPOTENCY_KEY) or secrets.token_bytes(_RANDOM_BYTES)
        return self.by_number.get(str(choose(self.split, sent, headers)))
