"""In-memory registry: functions, revisions, engines, keys and the latest reports, kept current by watches.

`resolve` is on the hot path: the first use of a name from a URL is cached, and every further use is one dict lookup.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from gpufn_core.domain.devices.engine import EngineManifest
from gpufn_core.domain.revision import Function, Revision, RevisionState
from gpufn_core.errors import FunctionNotFound, InvalidInput, PlatformError, RevisionNotFound
from gpufn_core.protocol import subjects
from gpufn_core.protocol.records import NodeDrain
from gpufn_core.protocol.report_parts import Statuses
from gpufn_core.protocol.reports import ControllerReport, FunctionStatus, NodeReport, RunnerReport, without_holders
from gpufn_core.spec.function_spec import FunctionSpec, MethodSpec
from gpufn_core.spec.model_spec import ModelSpec
from gpufn_core.spec.naming.names import Names, canonical, is_function_name, shown
from gpufn_core.spec.naming.variant_names import function_of, is_variant
from gpufn_gateway.arguments.signature import Signature
from gpufn_gateway.auth.access import LOCAL, Access, Principal
from gpufn_gateway.auth.team_account import TeamAccount, account_of, quota_id
from gpufn_gateway.buckets import (
    Buckets,
    decode_function,
    decode_key,
    decode_manifest,
    decode_node_drain,
    decode_revision,
    decode_team,
)
from gpufn_gateway.functions.target import SplitTargets, Target
from gpufn_gateway.nodes.device_reports import DeviceReports
from gpufn_gateway.nodes.health_trends import HealthTrends
from gpufn_gateway.nodes.latest_reports import LatestReports
from gpufn_gateway.nodes.totals_reports import TotalsReports
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.leader_lease import Fence
from gpufn_platform.bus.storage.key_value import Entry, Watch
from gpufn_platform.bus.typed_handler import decoded
from gpufn_platform.process.clock import Clock

log = logging.getLogger(__name__)

CONTROLLER_FRESH_S: Final = 5.0
NODE_FRESH_S: Final = 10.0
ARRIVES_WITHIN_S: Final = 10.0  # for a revision that a Function points to: each bucket has its own watch
_MAX_SPELLINGS: Final = 10_000

_controller_report = msgspec.msgpack.Decoder(ControllerReport)
_node_report = msgspec.msgpack.Decoder(NodeReport)
_runner_report = msgspec.msgpack.Decoder(RunnerReport)


class Registry:
    """The callbacks are `on_status(status)` and each of `on_key_deleted(id)`, `on_runner_report(report)` and
    `on_deleted(name)`."""

    def __init__(self, clock: Clock, access: Access) -> None:
        self._clock = clock
        self._access = access
        self.functions: dict[str, Function] = {}
        self._names = Names()
        self._pointed_at: dict[str, float] = {}  # function -> time of its last change, by our monotonic clock
        self.revisions: dict[str, dict[int, Revision]] = {}
        self.teams = access.teams
        self.manifests: dict[str, EngineManifest] = {}  # by EngineKey
        self.statuses = Statuses()
        self._nodes = LatestReports[NodeReport](clock, NODE_FRESH_S)
        self._runners = LatestReports[RunnerReport](clock, NODE_FRESH_S)
        self.device_reports = DeviceReports(clock)
        self.totals = TotalsReports(clock)
        self.trends = HealthTrends()
        self.drains: dict[str, NodeDrain] = {}  # by node
        self.device_reports.on_report = lambda report: self.trends.add_devices(report, clock.monotonic())
        self.totals.on_report = lambda report: self.trends.add_totals(report, clock.monotonic())
        self.on_status: Callable[[FunctionStatus], None] = lambda status: None
        self.on_runner_report: list[Callable[[RunnerReport], None]] = []
        self.on_key_deleted: list[Callable[[str], None]] = []
        self.on_deleted: list[Callable[[str], None]] = []
        self.loaded = False
        self._fence = Fence()
        self._controller_reported_at: float | None = None
        self._targets: dict[str, Target] = {}  # by the name as written, for principals that see every function
        self._visible_targets: dict[tuple[frozenset[str], str], Target] = {}  # by scopes and name, for the others
        self._signatures: dict[tuple[str, int, str], Signature] = {}
        self._watches: list[Watch] = []

    # --- updates -----------------------------------------------------------------------------------------------------

    async def start(self, bus: Bus, buckets: Buckets) -> None:
        """Start the watches. Returns when all existing records have been read."""
        bus.subscribe(subjects.CONTROLLER_REPORT, decoded(_controller_report, self.receive_controller_report))
        bus.subscribe(subjects.NODE_REPORTS, decoded(_node_report, self.receive_node_report))
        self.device_reports.start(bus)
        self.totals.start(bus)
        bus.subscribe(subjects.RUNNER_REPORTS, decoded(_runner_report, self.receive_runner_report))
        # Referenced records first: a Function must never point to a revision that is not loaded yet.
        self._watches.append(await buckets.node_drains.watch(self.on_node_drain))
        self._watches.append(await buckets.teams.watch(self.on_team))
        self._watches.append(await buckets.engines.watch(self.on_engine))
        self._watches.append(await buckets.revisions.watch(self.on_revision))
        self._watches.append(await buckets.functions.watch(self.on_function))
        self._watches.append(await buckets.keys.watch(self.on_key))
        self.loaded = True

    def stop(self) -> None:
        for watch in self._watches:
            watch.stop()

    def on_function(self, key: str, entry: Entry | None) -> None:
        if entry is None:
            self._pointed_at.pop(key, None)
            if self.functions.pop(key, None) is not None:
                self._forget_targets()
                self.statuses.pop(key)
                for callback in self.on_deleted:
                    callback(key)
        else:
            self.functions[key] = decode_function(entry.value)
            self._pointed_at[key] = self._clock.monotonic()
            self._forget_targets()

        self._update_name(key)

    def on_revision(self, key: str, entry: Entry | None) -> None:
        name, _, number = key.rpartition(".")
        if entry is None:
            self.revisions.get(name, {}).pop(int(number), None)
            self._signatures = {key: each for key, each in self._signatures.items() if key[:2] != (name, int(number))}
        else:
            self.revisions.setdefault(name, {})[int(number)] = decode_revision(entry.value)
        self._update_name(name)
        self._forget_targets()

    def _update_name(self, name: str) -> None:
        """Callers can mean a function as long as it exists or is being built."""
        function = self.functions.get(name)
        if function is not None or self.is_being_built(name):
            self._names.add(name, is_temporary=function is not None and function.lease is not None)
        else:
            self._names.discard(name)

    def on_node_drain(self, node: str, entry: Entry | None) -> None:
        if entry is None:
            self.drains.pop(node, None)
        else:
            self.drains[node] = decode_node_drain(entry.value)

    def on_team(self, name: str, entry: Entry | None) -> None:
        if entry is None:
            self.teams.remove(name)
            self._key_deleted(quota_id(name))
        else:
            self.teams.put(decode_team(entry.value))
        self._access.on_team(name)
        self._forget_targets()

    def on_engine(self, key: str, entry: Entry | None) -> None:
        if entry is None:
            self.manifests.pop(key, None)
        else:
            self.manifests[key] = decode_manifest(entry.value)

    def on_key(self, key: str, entry: Entry | None) -> None:
        if entry is None:
            self._access.remove(key)
            self._key_deleted(key)
        else:
            self._access.put(decode_key(entry.value))

    def _key_deleted(self, key: str) -> None:
        for call in self.on_key_deleted:
            call(key)

    def receive_controller_report(self, report: ControllerReport) -> None:
        now = self._clock.monotonic()
        if not self._fence.accepts(report.epoch, now):
            return  # from a former leader that does not know yet that it was replaced
        self._controller_reported_at = now
        self.statuses.take(report)
        for status in report.functions:
            self.on_status(status)

    def receive_node_report(self, report: NodeReport) -> None:
        self._nodes.put(report)

    def receive_runner_report(self, report: RunnerReport) -> None:
        self._runners.put(report)
        for callback in self.on_runner_report:
            callback(report)

    # --- queries -----------------------------------------------------------------------------------------------------

    def resolve(self, name: str, principal: Principal = LOCAL) -> Target:
        """Return the target of a principal's call to `name`: full or short, in either spelling, `fn.method` for a
        class. For a variant use `Variants.provide`. Raises FunctionNotFound, AmbiguousFunction."""
        sees_all, scopes = principal.sees_all, principal.scopes
        target = self._targets.get(name) if sees_all else self._visible_targets.get((scopes, name))
        if target is None:
            base, _, method = name.partition(".")
            if is_variant(base):  # only `Variants.provide` renews its lease
                raise FunctionNotFound(f"{shown(base)} is a variant, which cannot be used here.")
            target = self.target(self.find(base, principal), method)
            if len(self._targets) + len(self._visible_targets) >= _MAX_SPELLINGS:
                self._forget_targets()
            if sees_all:
                self._targets[name] = target
            else:
                self._visible_targets[scopes, name] = target
        return target

    def find(self, name: str, principal: Principal = LOCAL) -> str:
        """Return the full name of the function that a principal means by `name`. Raises FunctionNotFound, also for a
        function that the principal may not see; AmbiguousFunction."""
        try:
            return self._names.find(name, may_see=principal.may_see)
        except FunctionNotFound:
            if principal.sees_all:
                raise
            raise FunctionNotFound(f"There is no function {shown(name)} that this API key may call.") from None

    def find_or_deleted(self, name: str, principal: Principal = LOCAL) -> str:
        """Like `find`, but a name without a function counts as the full name of a deleted function that the principal
        could see. Raises InvalidInput, FunctionNotFound, AmbiguousFunction."""
        try:
            return self.find(name, principal)
        except FunctionNotFound as error:
            full = canonical(name)
            if not is_function_name(function_of(full)):
                raise InvalidInput(f"{shown(name)} is not a valid function name", field="function") from None
            principal.require_visible(full, error)
            return full

    def function(self, name: str) -> Function:
        """Return a Function by its full name. Raises FunctionNotFound."""
        function = self.functions.get(name)
        if function is None:
            raise FunctionNotFound(f"There is no function {shown(name)}.")
        return function

    def target(self, name: str, method_name: str) -> Target:
        """Return the target of a call to a function by its full name. Raises FunctionNotFound."""
        function = self.function(name)
        target = self._target(function, self.serving(function), method_name)
        if function.traffic is not None:
            targets = [target]
            for number in function.traffic.called:
                revision = self.revisions.get(name, {}).get(number)
                if revision is None or number == target.number or not is_usable(revision):
                    continue
                if revision.is_checked_first:  # its calls stay with the serving revision until a worker is READY
                    continue
                with contextlib.suppress(FunctionNotFound):  # it lacks the method
                    targets.append(self._target(function, revision, method_name))
            target.split = SplitTargets(function.traffic, targets)
        return target

    def _target(self, function: Function, revision: Revision, method_name: str) -> Target:
        method = _method(function.name, revision.spec, method_name)
        key = (function.name, revision.number, method.name)
        signature = self._signatures.get(key)
        if signature is None:
            signature = self._signatures[key] = Signature.of(method)
        return Target(function, revision, method, signature, self._account_of(function.name))

    def split_functions(self) -> list[str]:
        """Return the functions whose calls are divided between revisions."""
        return [name for name, function in self.functions.items() if function.traffic is not None]

    def serving(self, function: Function) -> Revision:
        """Return the serving revision. Raises PlatformError if it may still arrive, RevisionNotFound if it is lost."""
        revision = self.revisions.get(function.name, {}).get(function.serving)
        if revision is not None:
            return revision
        name, label = function.name, f"{function.name}@{function.serving}"
        if self._clock.monotonic() - self._pointed_at.get(name, math.inf) <= ARRIVES_WITHIN_S:
            raise PlatformError(f"{label} is not loaded yet; try again.")
        raise RevisionNotFound(f"The record of {label} is lost: deploy {name} again.")

    def revision(self, name: str, number: int) -> Revision:
        """Return a revision of a function by its full name. It exists before its Function does. Raises
        RevisionNotFound."""
        revision = self.revisions.get(name, {}).get(number)
        if revision is None:
            raise RevisionNotFound(f"{shown(name)} has no revision {number}.")
        return revision

    def is_being_built(self, name: str) -> bool:
        """Return whether a revision of this name is BUILDING. There may be no Function yet."""
        return any(revision.state is RevisionState.BUILDING for revision in self.revisions.get(name, {}).values())

    def manifest(self, revision: Revision, model: ModelSpec) -> EngineManifest | None:
        """Return the manifest of a model's first known engine: all its engines have the same inputs and outputs."""
        keys = (key for keys in revision.engines.get(model.parameter, {}).values() for key in keys)
        return next((self.manifests[key] for key in keys if key in self.manifests), None)

    def variants_of(self, name: str) -> list[Function]:
        """Return the variants of a function by its full name."""
        return [each for full, each in self.functions.items() if is_variant(full) and function_of(full) == name]

    def all_revisions(self) -> Iterator[Revision]:
        for numbered in self.revisions.values():
            yield from numbered.values()

    def active_revision(self, name: str) -> Revision | None:
        """Return the active revision of a function by its full name; None if there is none, or it is not loaded."""
        function = self.functions.get(name)
        return None if function is None else self.revisions.get(name, {}).get(function.active)

    def active_revisions(self) -> Iterator[Revision]:
        return filter(None, map(self.active_revision, self.functions))

    def numbers(self, name: str) -> list[int]:
        """Return the numbers of the existing revisions, in order. The highest ever is kept as a tombstone."""
        return sorted(self.revisions.get(name, ()))

    def ready_workers(self, function: Function) -> int | None:
        """Return the READY workers of the serving revision; None while unknown."""
        status = self.statuses.get(function.name)
        if status is None or status.serving != function.serving or not self.has_fresh_controller_report():
            return None
        return status.workers.ready

    def status_for(self, principal: Principal, name: str) -> FunctionStatus | None:
        """Return the status of a function, without the names of other functions unless the principal sees all."""
        status = self.statuses.get(name)
        return status if status is None or principal.sees_all else without_holders(status)

    def has_fresh_controller_report(self) -> bool:
        reported_at = self._controller_reported_at
        return reported_at is not None and self._clock.monotonic() - reported_at <= CONTROLLER_FRESH_S

    def silent_drains(self) -> list[NodeDrain]:
        """Return the drains of nodes that do not report, ordered by name. An agent that starts again is drained."""
        live = {report.node for report in self.live_nodes()}
        return [drain for node, drain in sorted(self.drains.items()) if node not in live]

    def live_nodes(self) -> list[NodeReport]:
        return self._nodes.all()

    def live_runners(self) -> list[RunnerReport]:
        return self._runners.all()

    def why_not_ready(self) -> str | None:
        """Return the preconditions that are missing before calls can be served; None if nothing is."""
        if not self.loaded:
            return "the functions are not loaded yet"
        if not self.has_fresh_controller_report():
            return f"no controller has reported for {CONTROLLER_FRESH_S:g} seconds"
        if not self.live_nodes():
            return "no agent has reported: is one running?"
        if not self.live_runners():
            return "no runner has reported: is one running?"
        return None

    def _account_of(self, function: str) -> TeamAccount | None:
        """Return the account whose limits calls of a function count against, if its team has limits for calls."""
        team = self.teams.get(self.teams.name_of(function))
        return None if team is None else account_of(team)

    def _forget_targets(self) -> None:
        self._targets.clear()
        self._visible_targets.clear()


def is_usable(revision: Revision) -> bool:
    return revision.state is RevisionState.READY


def _method(name: str, spec: FunctionSpec, method_name: str) -> MethodSpec:
    """Raises FunctionNotFound."""
    method = spec.method(method_name)
    if method is None:
        callable_as = " or ".join(f"{name}.{each.name}" for each in spec.methods if each.name) or name
        wrong = f"{name}.{method_name}" if method_name else name
        raise FunctionNotFound(f"{shown(wrong)} cannot be called; call {callable_as}.")
    return method
