"""The ranks above 0 of a gang: they run each call, and report only how it ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.frames import Verb
from gpufn_runtime.worker.execute.attempts import Attempt
from gpufn_runtime.worker.execute.results import Results
from gpufn_runtime.worker.platform_calls.pending_requests import PendingRequest, PendingRequests

_ONLY_RANK_0 = "only rank 0 of a gang can call functions: write `if os.environ['RANK'] == '0':` around the call"


class OtherRankResults(Results):
    """The caller receives the result of rank 0, so results and items of other ranks are not encoded."""

    def returned(self, attempt: Attempt, value: Any, started: float, *, charged_s: float | None = None) -> None:
        self._end(attempt, OutcomeKind.SUCCEEDED, started)

    def item(self, attempt: Attempt, value: Any) -> None:
        pass


class OtherRankRequests(PendingRequests):
    """Other ranks restore the checkpoint of their call. All ranks run the same code, but only rank 0 stores one."""

    @contextlib.contextmanager
    def open(
        self, verb: Verb, target: str, body: bytes = b"", *, attempt: Attempt | None = None, **fields: Any
    ) -> Iterator[PendingRequest]:
        if verb is not Verb.RESTORE:
            raise InvalidInput(_ONLY_RANK_0)
        with super().open(verb, target, body, attempt=attempt, **fields) as request:
            yield request

    def request(
        self, verb: Verb, target: str, body: bytes = b"", *, attempt: Attempt | None = None, **fields: Any
    ) -> tuple[str, bytes]:
        if verb is Verb.CHECKPOINT:
            return "", b""
        return super().request(verb, target, body, attempt=attempt, **fields)
