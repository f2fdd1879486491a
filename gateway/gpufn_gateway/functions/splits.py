"""Splits of functions: set one, end it, or return to the one before. Each change is a compare-and-set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from gpufn_core.domain.revision import Function, Revision, RevisionState
from gpufn_core.domain.traffic import (
    MAX_REVISIONS,
    WHOLE,
    Returned,
    Split,
    checked_headers,
    checked_weights,
    parse_return_rules,
)
from gpufn_core.errors import Conflict, InvalidInput, InvalidSpec, RevisionNotFound
from gpufn_core.spec.naming.variant_names import is_variant
from gpufn_core.spec.web_spec import WebSpec
from gpufn_gateway.functions.deploys import Deploys, check_workers, not_ready
from gpufn_gateway.functions.registry import Registry, is_usable
from gpufn_gateway.openapi.request_bodies import Traffic
from gpufn_platform.process.clock import Clock


class RolloutInProgress(Conflict):
    """Another revision is about to serve, and ends the split."""


@dataclass(kw_only=True, eq=False)
class Splits:
    registry: Registry
    deploys: Deploys
    clock: Clock

    async def divide(
        self, name: str, new: Traffic, check: Callable[[Revision], None] = lambda revision: None
    ) -> Function:
        """Divide the calls of a function. All of them for one revision make it active, as a rollback does. `check` may
        refuse a revision. Raises InvalidInput, RevisionNotFound, RevisionNotReady, RolloutInProgress, InvalidSpec."""
        weights = checked_weights(new.weights) if new.weights else {}
        headers, rules = checked_headers(new.headers), parse_return_rules(new.return_if)

        def change(function: Function) -> Function:
            split = Split(
                weights=weights or {function.serving: WHOLE},
                set_at=self.clock.time(),
                headers=headers,
                mirror=new.mirror,
                return_if=rules,
                window_s=new.window_s,
                min_calls=new.min_calls,
                before=None if function.traffic is None else msgspec.structs.replace(function.traffic, before=None),
            )
            revisions = [self._revision(name, number) for number in {*split.called, *split.weights}]
            for revision in revisions:
                self.deploys.checks.check_earlier(revision)
                check(revision)
            if len(split.called) == 1 and split.mirror is None and not split.return_if:
                (only,) = split.called
                active = self.deploys.with_active(function, self._revision(name, only))
                return msgspec.structs.replace(active, returned=None)
            self._check(function, split, revisions)
            return msgspec.structs.replace(function, traffic=split, returned=None, updated_at=self.clock.time())

        return await self.deploys.change(name, change)

    async def check_canary(self, name: str) -> None:
        """Check that a new revision can get a part of the calls, before it is created. Raises RolloutInProgress,
        InvalidSpec."""
        function = self.registry.function(name)
        weights = {function.serving: WHOLE - 1, function.latest + 1: 1}
        self._check(function, Split(weights=weights, set_at=0.0), [])

    async def add_canary(self, revision: Revision, percent: int) -> Function:
        """Give a new revision a part of the calls, and the serving one the rest. It gets none before its check has
        passed. Raises RolloutInProgress, InvalidInput, InvalidSpec."""

        def change(function: Function) -> Function:
            split = Split(
                weights=dict(sorted({function.serving: WHOLE - percent, revision.number: percent}.items())),
                set_at=self.clock.time(),
                before=None if function.traffic is None else msgspec.structs.replace(function.traffic, before=None),
            )
            self._check(function, split, [revision])
            latest = max(function.latest, revision.number)
            return msgspec.structs.replace(
                function, traffic=split, returned=None, latest=latest, updated_at=self.clock.time()
            )

        return await self.deploys.change(revision.function, change)

    async def clear(self, name: str) -> Function:
        """Send all calls to the serving revision. Raises FunctionNotFound."""
        now = self.clock.time()

        def change(function: Function) -> Function:
            return msgspec.structs.replace(function, traffic=None, returned=None, updated_at=now)

        return await self.deploys.change(name, change)

    async def give_back(self, name: str, split: Split, revision: int, reason: str) -> Function:
        """Restore the split before `split`. Send all calls to the serving revision if that one cannot be restored, or
        may give the bad `revision` calls for good. Does nothing if `split` was replaced. Raises FunctionNotFound."""
        now = self.clock.time()

        def change(function: Function) -> Function:
            if function.traffic is None or function.traffic.set_at != split.set_at:
                return function
            before = split.before
            if before is not None:
                is_possible = self._is_possible(function, before) and _loses_calls(revision, before, split)
                before = msgspec.structs.replace(before, set_at=now) if is_possible else None
            returned = Returned(at=now, reason=reason, revision=revision, weights=split.describe())
            return msgspec.structs.replace(function, traffic=before, returned=returned, updated_at=now)

        return await self.deploys.change(name, change)

    def _is_possible(self, function: Function, split: Split) -> bool:
        """Return whether the revisions of an earlier split exist, and may have a worker each."""
        known = self.registry.revisions.get(function.name, {})
        if not all(number in known and is_usable(known[number]) for number in split.called):
            return False
        try:
            check_workers(function, self.registry.serving(function).spec, split)
        except InvalidSpec:
            return False
        return True

    def _revision(self, name: str, number: int) -> Revision:
        known = self.registry.revisions.get(name, {})
        revision = known.get(number)
        if revision is None or revision.state is RevisionState.RETIRED:
            usable = ", ".join(str(each) for each in sorted(known) if is_usable(known[each])) or "none"
            raise RevisionNotFound(f"{name} has no revision {number}; it has {usable}.")
        if not is_usable(revision):
            raise not_ready(revision)
        return revision

    def _check(self, function: Function, split: Split, revisions: list[Revision]) -> None:
        if is_variant(function.name):
            raise InvalidInput("the calls of a variant cannot be split", field="fn")
        if function.active != function.serving:
            raise RolloutInProgress(
                f"{function.name}@{function.active} is about to serve, which ends a split: wait until it does, or make "
                f"{function.name}@{function.serving} active again with `gpufn rollback`."
            )
        if len(revisions) > MAX_REVISIONS:
            raise InvalidInput(f"a split has at most {MAX_REVISIONS} revisions", field="weights")
        serving = self.registry.serving(function)
        others = [revision for revision in revisions if revision.number != function.serving]
        if split.return_if and not others:
            raise InvalidInput("a rule for the return needs a revision beside the serving one", field="return_if")
        for revision in others:
            if _kind(revision.spec.web) != _kind(serving.spec.web):
                raise InvalidInput(f"{revision} and {serving} are not the same kind of web function", field="weights")
        check_workers(function, serving.spec, split)


def _loses_calls(revision: int, before: Split, after: Split) -> bool:
    """Return whether a revision that broke a rule of `after` has no calls with `before`, or breaks a rule there too."""
    return revision not in before.called or (bool(before.return_if) and {*after.return_if} <= {*before.return_if})


def _kind(web: WebSpec | msgspec.UnsetType) -> bool | None:
    return None if web is msgspec.UNSET else web.is_app
