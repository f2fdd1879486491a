"""The automatic return of splits, by the controller's leader, each second: from its reports, by `return_rules`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from gpufn_core.domain.audit import LONGEST_TEXT
from gpufn_core.domain.revision import Function
from gpufn_core.errors import FunctionNotFound
from gpufn_gateway.audit.log import AuditLog
from gpufn_gateway.background_loop import log_failures
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.functions.return_rules import breach
from gpufn_gateway.functions.splits import Splits

log = logging.getLogger(__name__)

_TICK_S: Final = 1.0


class TrafficReturn:
    def __init__(self, registry: Registry, splits: Splits, audit: AuditLog, *, leads: Callable[[], bool]) -> None:
        self._registry = registry
        self._splits = splits
        self._audit = audit
        self._leads = leads

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            with log_failures("returning splits"):
                if self._leads():
                    await self.step()
            await asyncio.sleep(_TICK_S)

    async def step(self) -> None:
        for function in list(self._registry.functions.values()):
            if function.traffic is not None:
                await self._return(function)

    async def _return(self, function: Function) -> None:
        split, status = function.traffic, self._registry.statuses.get(function.name)
        if split is None or status is None or status.split_at != split.set_at:
            return  # the controller has not counted calls of this split yet
        found = breach(split, function.serving, status.revisions)
        if found is None:
            return
        revision, reason = found
        with contextlib.suppress(FunctionNotFound):  # deleted in the meantime
            after = await self._splits.give_back(function.name, split, revision, reason)
            if after.returned is None or after.traffic == split:
                return
            log.warning("returned the split of %s: %s", f"{function.name}@{revision}", reason)
            restored = "1 revision" if after.traffic is None else after.traffic.describe()
            await self._audit.append(
                principal="platform",
                label="",
                address="",
                request_id="",
                action="DELETE /v1/functions/{fn}/traffic",
                object=function.name,
                status=200,
                code="",
                details={
                    "revision": str(revision),
                    "reason": reason[:LONGEST_TEXT],
                    "weights": split.describe(),
                    "restored": restored,
                },
            )
