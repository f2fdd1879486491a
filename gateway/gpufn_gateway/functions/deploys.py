"""Deploys: functions and their revisions, changed by compare-and-set, so that concurrent changes all take effect.

deploy    1. the bundle must be stored   2. create `REVISIONS <fn>.<n>`, create-only: n is one above the highest
          3. move `active` in `FUNCTIONS <fn>` to n; `serving` moves with it only if the old revision has no READY
             worker, and the new revision needs no check. The controller does the rest
             (`gpufn_gateway.controller.decide.scaling.rollout`)
build     deploy of a function with models: step 2 creates a BUILDING revision, after its builds; step 3 is `finish`,
          when the builds have ended (`gpufn_gateway.builds.revision_activation`)
delete    remove the Function's record, cancel its builds, end queued calls as cancelled; retire or fail its revisions,
          which are collected once no call runs on them (`gpufn_gateway.garbage_collection.rules`), except the highest
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from gpufn_core.domain.invocation import OutcomeKind, deleted_error
from gpufn_core.domain.revision import CheckState, Function, Lease, Revision, RevisionState
from gpufn_core.domain.traffic import Split
from gpufn_core.errors import (
    BuildFailed,
    BuildNotFound,
    Conflict,
    FunctionNotFound,
    InvalidSpec,
    RevisionNotFound,
)
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.function_spec import FunctionSpec, ScalingPolicy
from gpufn_gateway.buckets import Buckets, decode_function, decode_revision
from gpufn_gateway.builds import build_rules
from gpufn_gateway.builds.builds import Builds
from gpufn_gateway.functions.bundle_check import check_bundle
from gpufn_gateway.functions.deploy_checks import DeployChecks, DeployOptions, LeaseLost
from gpufn_gateway.functions.registry import Registry, is_usable
from gpufn_gateway.garbage_collection.rules import as_retired
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store
from gpufn_platform.bus.storage.key_value import Entry
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue import queue_position

_TRIES: Final = 50  # each lost race means that another change succeeded


class RevisionNotReady(Conflict):
    """The revision is being built, or its build failed."""

    retryable = False


_DEFAULT_OPTIONS: Final = DeployOptions()


@dataclass(kw_only=True, eq=False)
class Deploys:
    bus: Bus
    buckets: Buckets
    registry: Registry
    builds: Builds
    checks: DeployChecks
    clock: Clock

    # --- bundles -----------------------------------------------------------------------------------------------------

    async def put_bundle(self, digest: str, data: bytes) -> None:
        """Raises InvalidBundle."""
        await asyncio.to_thread(check_bundle, data, digest)
        await object_store.put(self.bus, subjects.BUNDLES, data)

    # --- functions ---------------------------------------------------------------------------------------------------

    async def deploy(self, spec: FunctionSpec, bundle: str, options: DeployOptions = _DEFAULT_OPTIONS) -> Function:
        """Deploy a spec without models.

        Raises InvalidBundle or InvalidSpec if something was not uploaded, Forbidden, SourceConflict, UntrustedDeploy,
        StorageLimitExceeded, FunctionLimitExceeded, and Conflict if too many deploys race.
        """
        revision = await self.checks.new_revision(spec, bundle, options, self.clock.time())
        return await self._move_active(await self._add_revision(revision))

    async def add(self, spec: FunctionSpec, bundle: str, options: DeployOptions = _DEFAULT_OPTIONS) -> Revision:
        """Create a revision of a spec without models, and leave the active one as it is. Raises as `deploy`."""
        return await self._add_revision(await self.checks.new_revision(spec, bundle, options, self.clock.time()))

    async def build(self, spec: FunctionSpec, bundle: str, options: DeployOptions = _DEFAULT_OPTIONS) -> Revision:
        """Start the builds of a spec with models, and return the BUILDING revision.

        Raises InvalidBundle or InvalidSpec if something was not uploaded, Forbidden, SourceConflict, UntrustedDeploy,
        StorageLimitExceeded, FunctionLimitExceeded, and NoCapacity without a device to build for.
        """
        revision = await self.checks.new_revision(spec, bundle, options, self.clock.time())
        kinds = build_rules.device_kinds(spec.resources, self.registry.live_nodes())
        # Queue the builds before creating the revision: a revision without running builds would wait forever.
        builds: list[str] = []
        try:
            for model in spec.models:
                for kind in kinds:
                    builds.append((await self.builds.begin(model, kind, spec.name, options.signature)).id)
            return await self._add_revision(
                msgspec.structs.replace(revision, state=RevisionState.BUILDING, builds=tuple(builds))
            )
        except BaseException:
            await self._cancel(builds)
            raise

    async def finish(self, after: Revision) -> None:
        """Store the final state of a BUILDING revision, and make a READY one active. Idempotent."""

        def change(before: Revision) -> Revision:
            return after if before.state is RevisionState.BUILDING else before

        stored = await self._change_revision(after.function, after.number, change)
        if stored.state is RevisionState.READY:
            await self._move_active(stored)

    async def rollback(
        self, name: str, number: int | None, check: Callable[[Revision], None] = lambda revision: None
    ) -> Function:
        """Make an earlier revision active: `number`, or the one before the active one. `check` may refuse it.
        Raises RevisionNotFound, and the errors of `check_rules`."""

        def change(function: Function) -> Function:
            known = self.registry.revisions.get(name, {})
            usable = [each for each, revision in known.items() if is_usable(revision)]
            if number is None:
                earlier = [each for each in usable if each < function.active]
                if not earlier:
                    raise RevisionNotFound(f"{name} has no revision before {function.active}.")
                wanted = max(earlier)
            elif number in usable:
                wanted = number
            elif number in known and known[number].state is not RevisionState.RETIRED:
                raise not_ready(known[number])
            else:
                raise RevisionNotFound(f"{name} has no revision {number}; it has {_listed(usable)}.")
            self.checks.check_earlier(known[wanted])
            check(known[wanted])
            return self.with_active(function, known[wanted])

        return await self.change(name, change)

    async def restart(self, name: str) -> Function:
        """Replace the workers of a function without losing a call: a copy of its active revision becomes active, as
        after a deploy. Raises FunctionNotFound, RevisionNotFound."""
        function = self.registry.function(name)
        known = self.registry.revisions.get(name, {})
        candidates = (known.get(number) for number in (function.active, function.serving))
        original = next((each for each in candidates if each is not None and is_usable(each)), None)
        if original is None:
            raise RevisionNotFound(f"{name} has no revision that can start.")
        check = original.check if original.is_checked_first else None
        copy = msgspec.structs.replace(original, created_at=self.clock.time(), check=check, lease=function.lease)
        return await self._move_active(await self._add_revision(copy))

    async def scale(
        self, name: str, least: int | msgspec.UnsetType | None, most: int | msgspec.UnsetType | None
    ) -> Function:
        """Set bounds that override the spec's. None restores the spec's bound, UNSET keeps it. Raises InvalidSpec."""

        def change(function: Function) -> Function:
            spec = self.registry.serving(function).spec.scaling
            min_workers = function.min_workers if least is msgspec.UNSET else least
            max_workers = function.max_workers if most is msgspec.UNSET else most
            ScalingPolicy(
                min_workers=spec.min_workers if min_workers is None else min_workers,
                max_workers=spec.max_workers if max_workers is None else max_workers,
            )
            scaled = msgspec.structs.replace(function, min_workers=min_workers, max_workers=max_workers)
            if scaled.traffic is not None:
                check_workers(scaled, self.registry.serving(function).spec, scaled.traffic)
            return scaled

        return await self.change(name, change)

    async def add_variant(self, revision: Revision) -> Function:
        """Make a revision of a variant active, without its own workers before its first call. Raises Conflict."""
        return await self._move_active(await self._add_revision(revision), min_workers=0)

    async def renew(self, name: str, lease: Lease) -> Function:
        """Renew the lease of a function. Raises FunctionNotFound, LeaseLost."""

        def change(function: Function) -> Function:
            check_lease(function, lease.id)
            return msgspec.structs.replace(function, lease=self._renewed(lease))

        return await self.change(name, change)

    async def delete(self, name: str, check: Callable[[Function], None] = lambda function: None) -> None:
        """Delete a function. Running calls finish; queued calls and builds are cancelled. `check` may reject the stored
        record. Raises FunctionNotFound."""
        entry = await self.buckets.functions.get(name)
        if entry is not None:
            check(decode_function(entry.value))
        # First the builds: a finished build must not recreate the function after its deletion.
        revisions = self.registry.revisions.get(name, {})
        being_built = [number for number, each in revisions.items() if each.state is RevisionState.BUILDING]
        for number in being_built:
            await self._end(name, number)
        for _ in range(_TRIES):
            entry = await self.buckets.functions.get(name)
            if entry is None:
                if being_built:
                    return
                raise FunctionNotFound(f"There is no function {name!r}.")
            check(decode_function(entry.value))
            try:
                await self.buckets.functions.delete(name, entry.revision)
                break
            except Conflict:
                continue
        else:
            raise _busy(name)
        await self._delete_schedules(name)
        latest, revisions = decode_function(entry.value).latest, self.registry.revisions.get(name, {})
        # A higher number belongs to a concurrent deploy that recreates the function, unless it has builds.
        numbers = [number for number in self.registry.numbers(name) if number <= latest or revisions[number].builds]
        for number in numbers:
            await self._end(name, number)
        error = deleted_error(name).info()
        for number in numbers:
            await queue_position.end_queued(
                self.bus, name, number, kind=OutcomeKind.CANCELLED, error=error, now=self.clock.time()
            )
        for variant in self.registry.variants_of(name):
            with contextlib.suppress(FunctionNotFound):
                await self.delete(variant.name)

    # --- internals ---------------------------------------------------------------------------------------------------

    async def _delete_schedules(self, name: str) -> None:
        """Delete them now. The leader does so too, but keeps a young schedule, because its function may not be loaded
        yet; such a schedule would call the next function of this name."""
        for key in (name, *await self.buckets.schedules.keys(f"{name}.")):
            if await self.buckets.schedules.get(key) is not None:
                await self.buckets.schedules.delete(key)

    async def _cancel(self, builds: Iterable[str]) -> None:
        for build in builds:
            with contextlib.suppress(BuildNotFound):
                await self.builds.cancel(build)

    async def _add_revision(self, revision: Revision) -> Revision:
        """Store a revision under the next number, and return it. Raises Conflict."""
        name = revision.function
        # Read from the bus: our watch may lag, and lower numbers may be free because they were collected.
        known = await self.buckets.revisions.keys(f"{name}.")
        entry = await self.buckets.functions.get(name)
        latest = 0 if entry is None else decode_function(entry.value).latest  # the store may have lost its record
        number = max((latest, *(int(key.rpartition(".")[2]) for key in known)))
        for _ in range(_TRIES):
            number += 1
            numbered = msgspec.structs.replace(revision, number=number)
            try:
                await self.buckets.revisions.create(subjects.revision_key(name, number), encode(numbered))
            except Conflict:
                continue
            return numbered
        raise _busy(name)

    async def _move_active(self, revision: Revision, *, min_workers: int | None = None) -> Function:
        name, number, now = revision.function, revision.number, self.clock.time()
        lease = None if revision.lease is None else self._renewed(revision.lease)
        first = Function(
            name=name,
            active=number,
            serving=number,
            latest=number,
            updated_at=now,
            min_workers=min_workers,
            lease=lease,
        )

        def change(function: Function) -> Function:
            if function.latest > number:
                return function  # a later deploy was faster: it stays active
            kept = None if function.lease is None else lease  # a permanent function stays permanent
            return msgspec.structs.replace(self.with_active(function, revision), latest=number, lease=kept)

        return await self.change(name, change, absent=first)

    def _renewed(self, lease: Lease) -> Lease:
        return msgspec.structs.replace(lease, renewed_at=self.clock.time())

    def with_active(self, function: Function, revision: Revision) -> Function:
        """Make a revision active. `serving` moves at once only if no worker is warm and the revision needs no check, or
        if the old revision cannot serve. Otherwise the controller moves it, which ends a split."""
        old = self.registry.revisions.get(function.name, {}).get(function.serving)
        is_cold = self.registry.ready_workers(function) == 0
        moves = (is_cold and not revision.is_checked_first) or old is None or old.state is RevisionState.FAILED
        is_settled = moves or revision.number == function.serving
        return msgspec.structs.replace(
            function,
            active=revision.number,
            serving=revision.number if moves else function.serving,
            traffic=None if is_settled else function.traffic,
            updated_at=self.clock.time(),
        )

    async def change(
        self, name: str, change: Callable[[Function], Function], *, absent: Function | None = None
    ) -> Function:
        """Change the record of a function by compare-and-set. Raises FunctionNotFound unless there is one or
        `absent`."""

        def changed(entry: Entry | None) -> bytes:
            if entry is not None:
                return encode(change(decode_function(entry.value)))
            if absent is None:
                raise FunctionNotFound(f"There is no function {name!r}.")
            return encode(absent)

        stored = await self.buckets.functions.change(name, changed)
        return decode_function(stored.value)

    async def _end(self, name: str, number: int) -> None:
        """Retire a revision of a deleted function, or fail it and cancel its builds."""

        def change(revision: Revision) -> Revision:
            if revision.state is RevisionState.READY:
                return as_retired(revision, self.clock.time())
            if revision.state is RevisionState.BUILDING:
                error = BuildFailed(f"{name} was deleted while it was being built")
                return build_rules.as_failed(revision, error.info())
            return revision

        try:
            ended = await self._change_revision(name, number, change)
        except RevisionNotFound:  # collected in the meantime
            return
        if ended.state is RevisionState.FAILED:
            await self._cancel(ended.builds)

    async def _change_revision(self, name: str, number: int, change: Callable[[Revision], Revision]) -> Revision:
        key = subjects.revision_key(name, number)

        def changed(entry: Entry | None) -> bytes:
            if entry is None:
                raise RevisionNotFound(f"{name} has no revision {number}.")
            return encode(change(decode_revision(entry.value)))

        stored = await self.buckets.revisions.change(key, changed)
        return decode_revision(stored.value)


def check_lease(function: Function, id_: str) -> None:
    """Raises LeaseLost unless the function is temporary, with the lease `id_`."""
    if function.lease is None:
        raise LeaseLost(f"{function.name} was deployed permanently.")
    if function.lease.id != id_:
        raise LeaseLost(f"Another client took over {function.name}.")


def check_workers(function: Function, spec: FunctionSpec, split: Split) -> None:
    """Raises InvalidSpec if the function may have fewer workers than its split has revisions."""
    most = spec.scaling.max_workers if function.max_workers is None else function.max_workers
    if 0 < most < len(split.called):
        raise InvalidSpec(
            f"{function.name}: its split has {len(split.called)} revisions, and max_workers={most} allows no worker "
            f"for each. Set max_workers to {len(split.called)} or more, or end the split."
        )


def _busy(name: str) -> Conflict:
    return Conflict(f"{name} is being changed by too many requests at once; try again.")


def not_ready(revision: Revision) -> RevisionNotReady:
    if revision.state is RevisionState.BUILDING:
        return RevisionNotReady(f"{revision} is being built; it becomes active automatically.")
    if revision.check is not None and revision.check.state is CheckState.FAILED:
        why = revision.error.summary if revision.error is not None else "its check failed"
        return RevisionNotReady(f"{revision} failed to start: {why}")
    why = revision.error.message if revision.error is not None else "its builds failed"
    return RevisionNotReady(f"{revision} could not be built: {why}")


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers)) or "none"
