"""Deploy of one function, for `gpufn deploy` and `Client.deploy`.

1. read the revision that serves, and the newest one beside it that has a part of the calls. Create no revision if the
   code and spec of one are the same. The one beside it then gets all calls, or with `traffic` that part of them
2. warn about requirements that no node meets: the function's calls would wait without an error
3. upload the bundle, the models' files and local weights, sign the deploy, create the revision
4. wait until the engines of its models are built; it becomes active only then
5. wait until one of its workers has started: the check of a deploy (`gpufn.deploy.check_wait`)
6. wait until calls go to it: while the old revision has warm workers, it keeps serving until the new one has its own
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from gpufn.client.views.functions import BuildingRevision, FunctionView, RevisionProgress, RevisionView
from gpufn.client.views.models import BuildView
from gpufn.deploy.build_wait import build_error, upload
from gpufn.deploy.capacity_warnings import unmet_requirement
from gpufn.deploy.check_wait import is_pending, wait_until_checked
from gpufn.deploy.signature_changes import signature_changes
from gpufn_core.domain.package_needs import package_needs
from gpufn_core.domain.revision import CheckState, Lease, RevisionState, Source
from gpufn_core.domain.traffic import WHOLE, HeaderRule, Mirror
from gpufn_core.errors import (
    AmbiguousFunction,
    Conflict,
    Forbidden,
    FunctionNotFound,
    FunctionStartFailed,
    GpufnError,
)
from gpufn_core.ids import Digest
from gpufn_core.protocol.messages import LogLine
from gpufn_core.signing.statement import DeploySignature, Statement
from gpufn_core.spec.function_spec import FunctionSpec, spec_from_json

if TYPE_CHECKING:
    from gpufn.client.endpoints.traffic import TrafficView
    from gpufn.deploy.deployables import Deployable
    from gpufn_core.signing.ed25519 import Signer

_FIRST_POLL_S, _LONGEST_POLL_S = 0.05, 1.0
_BUILD_POLL_S = 0.2  # short enough to show every build stage of a noticeable length
_ACTIVATION_S = 10.0  # limit from the last build to the activation of the revision
_MANY_PARALLEL_CALLS = 4096  # in one worker; a higher number is rarely intended


class Deployment(msgspec.Struct, frozen=True):
    """A deployed revision, and the warnings of its deploy.

    `view` is None while `builds` build the engines of `revision`. `is_new` is False if nothing had changed;
    `is_promoted`, if the revision had a part of the calls before, and gets all of them. `lacking` is the requirement
    that no node meets. `arguments` are the changes of the signature. `crowded` is the warning about too many parallel
    calls in one worker. `signed_by` is the id of the key that signed the revision in this deploy or an earlier one.
    """

    function: str
    revision: int
    view: FunctionView | None
    is_new: bool
    startup_timeout_s: float
    lacking: str = ""
    builds: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    crowded: str = ""
    is_promoted: bool = False
    signed_by: str = ""

    def warnings(self) -> Iterator[str]:
        """Yield the warnings, one sentence each."""
        if self.lacking:
            yield f"calls of {self.function} will wait: {self.lacking}"
        if self.arguments:
            yield f"the arguments of {self.function} changed: {'; '.join(self.arguments)}"
        if self.crowded:
            yield self.crowded


class Api(Protocol):
    """The methods of a Client that a deploy needs."""

    def function(self, name: str, *, env_values: bool = False) -> FunctionView: ...
    def revisions(self, name: str) -> list[RevisionView]: ...
    def nodes(self) -> list[dict[str, Any]]: ...
    def revision(self, name: str, number: int, *, env_values: bool = False) -> RevisionProgress: ...
    def put_bundle(self, digest: Digest, data: bytes) -> bool: ...
    def put_artifact(self, digest: str, path: Path, *, sent: Callable[[int], None]) -> bool: ...
    def create_revision(
        self,
        spec: FunctionSpec,
        bundle: Digest,
        *,
        check: bool,
        source: Source | None,
        replace: bool,
        code: str,
        deploy_id: str,
        signature: DeploySignature | None,
        lease: Lease | None,
        traffic: int | None = None,
    ) -> FunctionView | BuildingRevision: ...
    def traffic(self, name: str) -> TrafficView: ...
    def set_traffic(
        self,
        name: str,
        weights: Mapping[int, int],
        *,
        headers: Sequence[HeaderRule],
        mirror: Mirror | None,
        return_if: Collection[str],
        window_s: float | None,
        min_calls: int | None,
    ) -> Any: ...
    def rollback(self, name: str, revision: int | None = None) -> FunctionView: ...
    def logs(self, name: str, *, tail: int = 100) -> Iterator[LogLine]: ...


def deploy(
    api: Api,
    deployable: Deployable,
    *,
    force: bool = False,
    check: bool = True,
    replace: bool = False,
    deploy_id: str = "",
    signer: Signer | None = None,
    lease: Lease | None = None,
    traffic: int | None = None,
    on_progress: Callable[[str], None] = lambda progress: None,
) -> Deployment:
    """Run steps 1 to 3. `on_progress` receives the progress of the uploads.

    `force` creates a new revision even if nothing changed. `replace` allows replacing a function of another file or
    project. `deploy_id` is shared by the functions that are deployed together. `signer` signs the deploy; a function
    that did not change, but that this key did not sign, is deployed again. `lease` makes the function temporary.
    `traffic` is the percentage of the calls for the revision; the serving one gets the rest.
    """
    spec, digest = deployable.spec, deployable.bundle
    name, timeout_s = spec.name, spec.startup_timeout_s
    signed_by = "" if signer is None else signer.id
    before = _current_view(api, name)
    if before is not None and not force and _is_serving(before) and _lease_id(before.lease) == _lease_id(lease):
        same = _unchanged_revision(api, before, deployable) or _unchanged_canary(api, before, deployable)
        if same and same.signed_by == (signed_by or same.signed_by):
            if same.bundle == digest:
                api.put_bundle(digest, deployable.data)  # the store may have lost it; its workers would not start
            is_promoted = same.number != before.active and traffic is None
            if is_promoted:
                before = api.rollback(name, same.number)
            elif same.number != before.active and traffic is not None:
                before = _with_canary(api, before, same.number, traffic)
            return Deployment(
                name, same.number, before, False, timeout_s, is_promoted=is_promoted, signed_by=same.signed_by
            )
    lacking = ""
    with contextlib.suppress(Forbidden):  # a key that may only deploy
        lacking = unmet_requirement(
            spec.resources,
            api.nodes(),
            in_container=spec.in_container,
            needs=spec.node_needs,
            packages=package_needs(spec),
        )
    api.put_bundle(digest, deployable.data)
    upload(api, deployable.paths, on_progress)
    created = api.create_revision(
        spec,
        digest,
        check=check,
        source=deployable.source,
        replace=replace,
        code=deployable.code,
        deploy_id=deploy_id,
        signature=None if signer is None else _signature(signer, spec, digest),
        lease=lease,
        **({} if traffic is None else {"traffic": traffic}),
    )
    arguments, crowded = _changed_arguments(before, spec), parallelism_warning(spec)
    if isinstance(created, BuildingRevision):
        view, number, builds = None, created.revision, created.builds
    else:
        view, number, builds = created, created.active if created.canary is None else created.canary, ()
    return Deployment(name, number, view, True, timeout_s, lacking, builds, arguments, crowded, signed_by=signed_by)


def _signature(signer: Signer, spec: FunctionSpec, bundle: Digest) -> DeploySignature:
    """Sign the spec as the gateway will decode it: JSON changes some types, such as int to float."""
    stored = spec_from_json(msgspec.json.encode(spec))
    return signer.sign(Statement.of(spec.name, stored, bundle, time.time()))


def parallelism_warning(spec: FunctionSpec) -> str:
    """Return a warning if the batches of a function add up to too many calls in one worker, else "".

    >>> from gpufn_core.spec.function_spec import Batch, EntryPoint, MethodSpec
    >>> spec = FunctionSpec(name="f", entry=EntryPoint("app", "f"), methods=(MethodSpec(),))
    >>> parallelism_warning(msgspec.structs.replace(spec, concurrency=200, batch=Batch(32)))[:70]
    'each worker of f runs up to 6,400 calls at the same time (concurrency='
    """
    batch = spec.largest_batch
    if batch is None or spec.parallel_calls <= _MANY_PARALLEL_CALLS:
        return ""
    return (
        f"each worker of {spec.name} runs up to {spec.parallel_calls:,} calls at the same time "
        f"(concurrency={spec.concurrency} x max_size={batch.max_size}): concurrency is the number of batches that "
        "run at the same time; lower it, unless the function has the memory and the threads for that many calls"
    )


def finish(api: Api, deployment: Deployment, timeout_s: float | None = None) -> FunctionView:
    """Run steps 4 to 6 without progress output."""
    view = deployment.view or wait_until_built(api, deployment.function, deployment.revision, timeout_s)
    view = finish_check(api, view, deployment.startup_timeout_s, timeout_s)
    if unchecked_warning(view):
        return view
    return wait_until_serving(api, view, deployment.startup_timeout_s if timeout_s is None else timeout_s)


def finish_check(
    api: Api,
    view: FunctionView,
    startup_timeout_s: float,
    timeout_s: float | None = None,
    *,
    on_reason: Callable[[str], None] | None = None,
) -> FunctionView:
    """Run step 5 and return the function's view afterwards. `on_reason` receives the progress of weights and images."""
    if not is_pending(view):
        return view

    def report_reason() -> None:
        if on_reason is None:
            return
        with contextlib.suppress(GpufnError):  # the wait itself reports a failure
            if view.spec.get("weights"):
                on_reason(api.function(view.name).reason)
            elif view.spec.get("image"):
                for line in api.logs(view.name, tail=1):
                    if line.revision == view.active and not line.worker:  # of the making of the image
                        on_reason(line.text)

    check = wait_until_checked(api, view, startup_timeout_s, timeout_s, on_poll=report_reason)
    return msgspec.structs.replace(api.function(view.name), check=check)


def unchecked_warning(view: FunctionView) -> str:
    """Return a warning if no node had room for the revision's check, else ""."""
    if view.check is None or view.check.state is not CheckState.UNCHECKED:
        return ""
    return f"{view.name}@{view.active} was not checked, its first call may fail: {view.check.reason}"


def wait_until_built(
    api: Api,
    name: str,
    number: int,
    timeout_s: float | None = None,
    *,
    on_builds: Callable[[Sequence[BuildView]], None] = lambda builds: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> FunctionView:
    """Run step 4. `on_builds` receives the revision's builds at each poll.

    Raises BuildFailed, Conflict if another revision replaced this one meanwhile, and TimeoutError.
    """
    started, ready_at = clock(), None
    while True:
        revision = api.revision(name, number)
        on_builds(revision.builds)
        if revision.state is RevisionState.FAILED:
            raise build_error(revision.error)
        if revision.state is not RevisionState.BUILDING:
            ready_at = clock() if ready_at is None else ready_at
            view = _existing_view(api, name)
            if view is not None and view.active == number:
                return view
            active = 0 if view is None else view.active
            if active > number or clock() > ready_at + _ACTIVATION_S:
                other = f"{name}@{active}" if active else "no revision"
                raise Conflict(f"{name}@{number} is built, but {other} is active")
        if timeout_s is not None and clock() >= started + timeout_s:
            raise TimeoutError(f"{name}@{number} is not built after {timeout_s:g} s; the build continues")
        sleep(_BUILD_POLL_S)


def wait_until_serving(
    api: Api,
    view: FunctionView,
    timeout_s: float,
    *,
    on_reason: Callable[[str], None] = lambda reason: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> FunctionView:
    """Run step 6. `on_reason` receives the reason for the wait whenever it changes.

    Raises FunctionStartFailed if the new revision's workers do not start, Conflict if another revision replaces it, and
    TimeoutError.
    """
    name, number = view.name, view.active
    deadline, poll_s, last = clock() + timeout_s, _FIRST_POLL_S, ""
    while view.serving != number:
        if view.active != number:
            raise Conflict(f"{name}@{number} was replaced by {name}@{view.active} before it served")
        if view.next is not None and view.next.revision == number and (error := view.next.start_error) is not None:
            raise FunctionStartFailed(
                f"{name}@{number} does not start, {name}@{view.serving} still serves: {error.summary}"
            )
        if clock() >= deadline:
            raise TimeoutError(
                f"{name}@{number} does not serve after {timeout_s:g} s, {name}@{view.serving} still does: {view.reason}"
            )
        if view.reason != last:
            last = view.reason
            on_reason(last)
        sleep(poll_s)
        poll_s = min(poll_s * 1.5, _LONGEST_POLL_S)
        try:
            view = api.function(name)
        except Forbidden:  # a key that may only deploy cannot read functions
            return view
    return view


def _current_view(api: Api, name: str) -> FunctionView | None:
    """Return the view of a function before its deploy, or None."""
    with contextlib.suppress(Forbidden):
        return _existing_view(api, name, env_values=True)  # the comparison needs the values
    return None


def _existing_view(api: Api, name: str, *, env_values: bool = False) -> FunctionView | None:
    """Return the view of the function with this full name, or None. A bare name may find a function of another app."""
    try:
        view = api.function(name, env_values=env_values)
    except (FunctionNotFound, AmbiguousFunction):
        return None
    return view if view.name == name else None


def _lease_id(lease: Lease | None) -> str:
    return "" if lease is None else lease.id


def _is_serving(view: FunctionView) -> bool:
    """Return whether the active revision serves; a revision that does not start is deployed again."""
    return view.active == view.serving and view.start_error is None


def _changed_arguments(before: FunctionView | None, spec: FunctionSpec) -> tuple[str, ...]:
    if before is None or not before.spec:
        return ()
    return tuple(signature_changes(spec_from_json(before.spec).methods, spec.methods))


def _unchanged_revision(api: Api, view: FunctionView, deployable: Deployable) -> RevisionView | None:
    """Return the active revision if it is unchanged."""
    active = next((each for each in api.revisions(view.name) if each.number == view.active), None)
    return active if active is not None and _is_unchanged(active, view.spec, deployable) else None


def _unchanged_canary(api: Api, view: FunctionView, deployable: Deployable) -> RevisionProgress | None:
    """Return the newest revision with a part of the calls beside the serving one, if it is unchanged and can serve."""
    weights = {} if view.traffic is None else view.traffic.weights
    numbers = [number for number, weight in weights.items() if weight and number != view.serving]
    if not numbers:
        return None
    canary = api.revision(view.name, max(numbers), env_values=True)
    if canary.state is not RevisionState.READY:
        return None
    return canary if _is_unchanged(canary, canary.spec, deployable) else None


def _with_canary(api: Api, view: FunctionView, number: int, percent: int) -> FunctionView:
    """Give a revision its part of the calls, and the serving one the rest, unless they have them. The rules of the
    split stay."""
    weights = {view.serving: WHOLE - percent, number: percent}
    if view.traffic is None or view.traffic.weights != weights:
        split = api.traffic(view.name)
        api.set_traffic(
            view.name,
            weights,
            headers=split.headers,
            mirror=split.mirror,
            return_if=split.return_if,
            window_s=split.window_s,
            min_calls=split.min_calls,
        )
    return msgspec.structs.replace(view, canary=number)


def _is_unchanged(
    revision: RevisionView | RevisionProgress, spec_json: Mapping[str, Any], deployable: Deployable
) -> bool:
    """Return whether a revision has the same spec, and the same bundle, or the same code of the function in another
    bundle.

    With another bundle, its third-party modules do not count: they belong to all functions of the bundle.
    """
    if not spec_json:
        return False
    before, after = spec_from_json(spec_json), spec_from_json(msgspec.json.encode(deployable.spec))
    if revision.bundle == deployable.bundle:
        return before == after
    if not deployable.code or revision.code != deployable.code:
        return False
    return _without_modules(before) == _without_modules(after)


def _without_modules(spec: FunctionSpec) -> FunctionSpec:
    return msgspec.structs.replace(spec, modules=())
