"""Variants: pools of workers of one function, each for other parameters of its constructor (decision 0064).

A variant has its own function record, `clf=3f2a9c1b0d`, whose revisions copy the revisions of `clf`. The first call
makes it, a call after a deploy of `clf` adds a revision, and the controller scales it like any function. It exists as
long as its lease, which calls renew. `LeaseExpiry` deletes it when the lease has ended and it has no call and no
worker.

No accepted call is lost: `provide` leaves at least three quarters of the lease, a call repeats `provide` after a long
upload, and a queued call keeps its variant.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, Final, NamedTuple

import msgspec

from gpufn_core.domain.revision import Function, Lease, Revision, RevisionKey, Variant
from gpufn_core.errors import Forbidden, FunctionNotFound, TooManyVariants
from gpufn_core.spec.naming import variant_names, variant_options
from gpufn_core.spec.naming.names import home_of, shown
from gpufn_core.spec.naming.variant_options import marked
from gpufn_gateway.arguments.selector import read
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.auth.scopes import DEPLOY
from gpufn_gateway.functions.deploys import Deploys
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.functions.target import Target
from gpufn_platform.process.clock import Clock

TTL_S: Final = 300.0
_RENEW_AFTER: Final = 0.25  # share of the lease
_LEASE: Final = Lease("variant", TTL_S)


class _Wanted(NamedTuple):
    """A variant that a caller names. `name` is the function itself if nothing differs from it."""

    name: str
    parameters: dict[str, Any]
    options: dict[str, Any]
    function: Function

    @property
    def is_variant(self) -> bool:
        return self.name != self.function.name


class Variants:
    def __init__(self, registry: Registry, deploys: Deploys, clock: Clock) -> None:
        self._registry = registry
        self._deploys = deploys
        self._clock = clock
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def find(self, path: str, principal: Principal) -> str:
        """Return the full name of the variant that a principal means, which need not exist. Raises FunctionNotFound,
        AmbiguousFunction, InvalidInput."""
        selection = variant_names.split(path)
        return self._wanted(self._registry.find(selection.function, principal), selection).name

    async def provide(self, path: str, principal: Principal) -> Target:
        """Return the target of a principal's call to `path`. Make the variant, or renew it, if that is needed.

        Raises FunctionNotFound, AmbiguousFunction, Forbidden, InvalidInput, TooManyVariants.
        """
        selection = variant_names.split(path)
        full = self._registry.find(selection.function, principal)
        principal.require_invoke(full)
        wanted = self._stored(full) if variant_names.is_variant(full) else self._wanted(full, selection)
        self._registry.target(wanted.function.name, selection.method)  # raises for a method that does not exist
        if wanted.options:  # they change settings of a deploy
            principal.require_on(DEPLOY, full)
        await self._make_current(wanted)
        return self._registry.target(wanted.name, selection.method)

    async def provide_for_function(self, full: str, selector: str, caller: str) -> RevisionKey:
        """Return the serving revision of the variant that the function `caller` calls, by the full name of the called
        function. Make the variant, or renew it, if needed. Raises FunctionNotFound, InvalidInput, TooManyVariants, and
        Forbidden for options of a function of another app: a function has no scopes."""
        wanted = self._wanted(full, variant_names.Selection(full, selector, ""))
        if wanted.options and home_of(caller) != home_of(full):
            raise Forbidden(f"A function changes options only of functions of its own app, and {full} is of another.")
        await self._make_current(wanted)
        return wanted.name, self._registry.function(wanted.name).serving

    async def hold(self, name: str) -> None:
        """Renew the lease of a variant by its full name, before a call of it is stored; does nothing for a function.
        Raises FunctionNotFound."""
        if variant_names.is_variant(name):
            await self._deploys.renew(name, _LEASE)

    def _wanted(self, full: str, selection: variant_names.Selection) -> _Wanted:
        function = self._registry.function(full)
        schema = self._registry.serving(function).spec.constructor
        selected = read(selection.selector or "", {} if schema is msgspec.UNSET else schema, full)
        values = selected.parameters | marked(selected.options)
        name = variant_names.variant_name(full, values) if values else full
        return _Wanted(name, *selected, function)

    def _stored(self, name: str) -> _Wanted:
        """Return an existing variant by its full name, with the parameters of its record."""
        active = self._registry.active_revision(name)
        if active is None or active.variant is None or active.variant.is_terminal:
            raise FunctionNotFound(f"There is no function {shown(name)}.")
        function = self._registry.function(variant_names.function_of(name))
        return _Wanted(name, active.variant.parameters, active.variant.options, function)

    async def _make_current(self, wanted: _Wanted) -> None:
        """Make a variant that copies the serving revision, and renew its lease, if that is needed."""
        if wanted.is_variant and not self._is_current(wanted):
            async with self._locks.setdefault(wanted.function.name, asyncio.Lock()):
                await self._make_or_renew(wanted)

    def _is_current(self, wanted: _Wanted) -> bool:
        """Return whether the variant copies the serving revision, and its lease was renewed lately."""
        return self._copies_serving(wanted) and not self._needs_renewal(self._registry.functions[wanted.name])

    def _copies_serving(self, wanted: _Wanted) -> bool:
        active = self._registry.active_revision(wanted.name)
        return active is not None and active.variant is not None and active.variant.revision == wanted.function.serving

    def _needs_renewal(self, function: Function) -> bool:
        return function.lease is None or self._clock.time() - function.lease.renewed_at > TTL_S * _RENEW_AFTER

    async def _make_or_renew(self, wanted: _Wanted) -> None:
        if not self._copies_serving(wanted):
            self._check_limit(wanted)
            await self._deploys.add_variant(self._copy(wanted))
        elif self._needs_renewal(self._registry.functions[wanted.name]):
            await self._deploys.renew(wanted.name, _LEASE)

    def _copy(self, wanted: _Wanted) -> Revision:
        """Raises InvalidInput for options that contradict the spec."""
        copied = self._registry.serving(wanted.function)
        original = copied.spec if wanted.options and copied.signature is not None else None
        return msgspec.structs.replace(
            copied,
            function=wanted.name,
            spec=variant_options.apply(copied.spec, wanted.options),
            number=0,
            created_at=self._clock.time(),
            check=None,
            deploy_id="",
            lease=_LEASE,
            variant=Variant(copied.number, wanted.parameters, wanted.options, original),
        )

    def _check_limit(self, wanted: _Wanted) -> None:
        """Raises TooManyVariants. Several gateways may exceed the limit together by one each."""
        registry = self._registry
        others = [each for each in registry.variants_of(wanted.function.name) if not is_terminal(registry, each)]
        most = registry.serving(wanted.function).spec.variant_limit
        if wanted.name in registry.functions or len(others) < most:
            return
        renewed_at = [each.lease.renewed_at for each in others if each.lease is not None]
        first_end = min(renewed_at, default=0.0) + TTL_S - self._clock.time()
        function, values = wanted.function.name, wanted.parameters | marked(wanted.options)
        raise TooManyVariants(
            f"{function} has {len(others)} variants in use, as many as its max_variants allows, so "
            f"{variant_names.described(function, values)} cannot start. A variant ends after {TTL_S / 60:g} minutes "
            "without calls. Retry later, or raise max_variants.",
            retry_after_s=max(1.0, first_end),
        )


def is_terminal(registry: Registry, function: Function) -> bool:
    """Return whether a variant is the record of a terminal."""
    active = registry.active_revision(function.name)
    return active is not None and active.variant is not None and active.variant.is_terminal
