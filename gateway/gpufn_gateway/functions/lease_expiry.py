"""Delete temporary functions whose leases were not renewed: their client was killed, or lost the gateway. Delete
variants without recent calls, once they have neither calls nor workers.

Every gateway runs this, and the controller's leader acts. It deletes a function only if the stored record confirms it,
because a watch may lag behind a renewal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Set
from typing import Final

from gpufn_core.domain.revision import Function, RevisionKey
from gpufn_core.errors import FunctionNotFound
from gpufn_core.spec.naming.variant_names import is_variant
from gpufn_gateway.audit.log import AuditLog
from gpufn_gateway.background_loop import log_failures
from gpufn_gateway.functions.deploy_checks import LeaseLost
from gpufn_gateway.functions.deploys import Deploys
from gpufn_gateway.functions.registry import Registry
from gpufn_platform.process.clock import Clock

log = logging.getLogger(__name__)

_TICK_S: Final = 1.0


class LeaseExpiry:
    def __init__(
        self,
        registry: Registry,
        deploys: Deploys,
        audit: AuditLog,
        clock: Clock,
        *,
        leads: Callable[[], bool],
        in_use: Callable[[], Set[RevisionKey] | None],
    ) -> None:
        self._registry = registry
        self._deploys = deploys
        self._audit = audit
        self._clock = clock
        self._leads = leads
        self._in_use = in_use
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
                if not is_variant(function.name):
                    await self._delete(function.name)
                elif self._is_unused(function.name):
                    await self._delete_variant(function.name)

    def _is_unused(self, name: str) -> bool:
        in_use = self._in_use()
        return in_use is not None and all(key[0] != name for key in in_use)

    def _has_expired(self, function: Function) -> bool:
        since = self._leading_since
        return (
            since is not None and function.lease is not None and function.lease.has_expired(self._clock.time(), since)
        )

    def _check(self, function: Function) -> None:
        if not self._has_expired(function):
            raise LeaseLost(f"The lease of {function.name} was renewed.")

    async def _delete_variant(self, name: str) -> None:
        """Delete a variant. That is no change of an object that a user made, so the audit log leaves it out."""
        with contextlib.suppress(FunctionNotFound, LeaseLost):  # deleted or called in the meantime
            await self._deploys.delete(name, self._check)

    async def _delete(self, name: str) -> None:
        with contextlib.suppress(FunctionNotFound, LeaseLost):  # deleted or renewed in the meantime
            await self._deploys.delete(name, self._check)
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
