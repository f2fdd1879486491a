"""Delete temporary functions whose leases were not renewed: their client was killed, or lost the gateway.

Every gateway runs this, and the controller's leader acts. It deletes only what the stored record confirms, because a
watch may lag behind a renewal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from gpufn_core.domain.revision import Function
from gpufn_core.errors import FunctionNotFound
from gpufn_gateway.audit.log import AuditLog
from gpufn_gateway.background_loop import log_failures
from gpufn_gateway.functions.deploys import Deploys, LeaseLost
from gpufn_gateway.functions.registry import Registry
from gpufn_platform.process.clock import Clock

log = logging.getLogger(__name__)

_TICK_S: Final = 1.0


class LeaseExpiry:
    def __init__(
        self, registry: Registry, deploys: Deploys, audit: AuditLog, clock: Clock, leads: Callable[[], bool]
    ) -> None:
        self._registry = registry
        self._deploys = deploys
        self._audit = audit
        self._clock = clock
        self._leads = leads
        self._leading_since: float | None = None  # unix seconds

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            with log_failures("deleting temporary functions"):
                await self.step()
            await asyncio.sleep(_TICK_S)

    async def step(self) -> None:
        if not self._leads():
            self._leading_since = None
            return
        if self._leading_since is None:
            self._leading_since = self._clock.time()
        for function in list(self._registry.functions.values()):
            if self._has_expired(function):
                await self._delete(function.name)

    def _has_expired(self, function: Function) -> bool:
        since = self._leading_since
        return (
            since is not None and function.lease is not None and function.lease.has_expired(self._clock.time(), since)
        )

    async def _delete(self, name: str) -> None:
        def check(function: Function) -> None:
            if not self._has_expired(function):
                raise LeaseLost(f"The lease of {name} was renewed.")

        with contextlib.suppress(FunctionNotFound, LeaseLost):  # deleted or renewed in the meantime
            await self._deploys.delete(name, check)
            log.info("deleted %s, whose lease was not renewed", name, extra={"function": name})
            await self._audit.append(
                principal="platform",
                label="",
                address="",
                request_id="",
                action="DELETE /v1/functions/{fn}",
                object=name,
                status=204,
                code="",
                details={"reason": "lease expired"},
            )
