"""The record of a terminal: a variant of the function, whose only worker runs the command.

The controller, the runner and the agent treat it as any variant. It is deleted with the terminal. If the gateway dies
first, its lease ends.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Final

import msgspec

from gpufn_core.domain.revision import Function, Lease, Variant
from gpufn_core.errors import CapacityError, FunctionNotFound, GpufnError
from gpufn_core.ids import new_ulid
from gpufn_core.spec.naming.variant_names import variant_name
from gpufn_core.spec.terminal_spec import terminal_spec
from gpufn_gateway.functions.deploys import Deploys
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.functions.target import Target
from gpufn_gateway.functions.variants import is_terminal
from gpufn_platform.process.clock import Clock
from gpufn_platform.signing.signatures import Signatures

log = logging.getLogger(__name__)

MAX_TERMINALS: Final = 10  # per function; several gateways may together exceed it by one each
_LEASE: Final = Lease("terminal", 300.0)


class TerminalRecords:
    def __init__(self, registry: Registry, deploys: Deploys, signatures: Signatures, clock: Clock) -> None:
        self._registry = registry
        self._deploys = deploys
        self._signatures = signatures
        self._clock = clock

    async def add(self, function: Function) -> Target:
        """Make the record of a new terminal. Raises CapacityError, InvalidInput, UntrustedDeploy, Conflict."""
        variants = self._registry.variants_of(function.name)
        if sum(is_terminal(self._registry, each) for each in variants) >= MAX_TERMINALS:
            raise CapacityError(f"{function.name} has {MAX_TERMINALS} terminals, which is the limit: close one first.")
        copied = self._registry.serving(function)
        original = None if copied.signature is None else copied.spec
        revision = msgspec.structs.replace(
            copied,
            function=variant_name(function.name, {"@terminal": new_ulid()}),
            spec=terminal_spec(copied.spec),
            number=0,
            created_at=self._clock.time(),
            check=None,
            deploy_id="",
            lease=_LEASE,
            variant=Variant(copied.number, original=original, is_terminal=True),
        )
        await self._signatures.verify_new(revision)
        added = await self._deploys.add_variant(revision)
        return self._registry.target(added.name, "")

    async def remove(self, target: Target) -> None:
        """Delete the record. Its worker ends."""
        try:
            with contextlib.suppress(FunctionNotFound):
                await self._deploys.delete(target.name)
        except GpufnError as error:
            log.warning("the terminal %s is deleted when its lease ends: %s", target.name, error)
