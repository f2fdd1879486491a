"""What `gpufn deploy` and `Client.deploy` do with one function.

1. read the revision that serves; where its code and spec are the same, nothing is to do
2. say what no node has: its calls would wait, and nothing else would tell
3. upload the bundle and the models' files, make the revision
4. wait until the engines of its models are built; until then it is not active
5. wait until one worker of it has started: the check of a deploy (`gpufn.deploy.check_wait`)
6. wait until calls go to it: while workers of the old revision are warm, they stay there until the new one has its own
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from gpufn.client.views import BuildingRevision, BuildView, FunctionView, RevisionProgress, RevisionView
from gpufn.deploy.build_wait import build_error, upload
from gpufn.deploy.capacity_warnings import what_no_node_has
from gpufn.deploy.check_wait import is_pending, wait_until_checked
from gpufn.deploy.signature_changes import signature_changes
from gpufn_core.domain.revision import CheckState, RevisionState, Source
from gpufn_core.errors import Conflict, Forbidden, FunctionNotFound, FunctionStartFailed, InvalidSpec
from gpufn_core.ids import Digest
from gpufn_core.spec.function_spec import Batch, EntryPoint, FunctionSpec, MethodSpec, Packaging, spec_from_json

if TYPE_CHECKING:
    from gpufn.declare.model import Model
    from gpufn.deploy.bundle import AnyFunction

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_BUILD_PAUSE_S = 0.2  # so that no stage is missed that takes long enough to be wondered about
_MOVES_WITHIN_S = 10.0  # `active`, after the last build
_MANY_PARALLEL_CALLS = 4096  # of one worker; more are rarely what was meant


class Deployable(NamedTuple):
    """A spec, its bundle, where the files of its models lie, by digest, and where all of it comes from. `code` is the
    digest of the function's own code; the bundle may hold other functions as well."""

    spec: FunctionSpec
    bundle: Digest
    data: bytes
    paths: Mapping[str, Path] = {}
    source: Source | None = None
    code: str = ""

    @property
    def size(self) -> int:
        """Bytes, of bundle and models."""
        return len(self.data) + sum(path.stat().st_size for path in self.paths.values())


class Deployment(msgspec.Struct, frozen=True):
    """`view` is None while the engines of `revision` are built, in `builds`. `is_new` False: nothing had changed.
    `arguments` are the changes of the signature. `crowded` is the warning for very many calls in one worker."""

    function: str
    revision: int
    view: FunctionView | None
    is_new: bool
    startup_timeout_s: float
    lacking: str = ""
    builds: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    crowded: str = ""

    def warnings(self) -> Iterator[str]:
        """One sentence each."""
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
    def revision(self, name: str, number: int) -> RevisionProgress: ...
    def put_bundle(self, digest: Digest, data: bytes) -> bool: ...
    def put_artifact(self, digest: str, path: Path, *, sent: Callable[[int], None]) -> bool: ...
    def create_revision(
        self, spec: FunctionSpec, bundle: Digest, *, check: bool, source: Source | None, replace: bool, code: str
    ) -> FunctionView | BuildingRevision: ...


def deployables(functions: Iterable[AnyFunction], include: Sequence[str] = ()) -> Iterator[Deployable]:
    """Reads and hashes what each function needs. Raises InvalidSpec and InvalidBundle."""
    from gpufn.declare import image as _image  # noqa: PLC0415
    from gpufn.declare.function import Function, FunctionClass  # noqa: PLC0415
    from gpufn.deploy.bundle import bundles_of  # noqa: PLC0415
    from gpufn.deploy.code_digest import code_digest  # noqa: PLC0415
    from gpufn.deploy.deploy_source import source_of  # noqa: PLC0415
    from gpufn.deploy.model_files import folder_of, prepare_all  # noqa: PLC0415

    functions = list(functions)
    for function in functions:
        if not isinstance(function, (Function, FunctionClass)):
            raise _no_function(function)
    functions = list(dict.fromkeys(functions))
    named: dict[str, AnyFunction] = {}
    for function in functions:
        if (other := named.setdefault(function.name, function)) is not function:
            both = f"{other.raw.__name__} and {function.raw.__name__}"
            raise InvalidSpec(f"{both} would both be deployed as {function.name}: give one another name=...")
    images = {
        function: _image.prepare(declared, folder_of(function.raw))
        for function in functions
        if (declared := function.settings.declared_image) is not None
    }
    contents = {name: data for image in images.values() for name, data in image.contents.items()}
    for function, packaging, bundle in bundles_of(functions, include, contents):
        models = prepare_all(function.settings.declared_models, folder_of(function.raw))
        image = images[function].spec if function in images else None
        spec = function.spec(packaging, bundle.modules, tuple(model.spec for model in models), image)
        paths = {digest: path for model in models for digest, path in model.paths.items()}
        code = ""
        if packaging is Packaging.SOURCE:
            code = code_digest(bundle.contents(), spec.entry.module, spec.entry.qualname)
        yield Deployable(spec, bundle.digest, bundle.data, paths, source_of(function), code)


def _no_function(given: Any) -> InvalidSpec:
    instead = ""
    if isinstance(given, str):
        instead = "; those of a file are deployed by `gpufn deploy FILE`"
    elif isinstance(given, Iterable):
        instead = "; deploy takes functions one by one: deploy(*functions)"
    return InvalidSpec(f"{given!r} is no @gpu_function: deploy takes functions and classes that are{instead}")


def deployable_model(model: Model, options: Mapping[str, Any]) -> Deployable:
    """A model as a function without code; `options` as of `@gpu_function`, with its name. Paths start here.

    Calls share runs of up to `max_batch` rows; with 1, one call is read while another runs.
    """
    from gpufn.declare.options import settings_from  # noqa: PLC0415
    from gpufn.deploy.bundle import EMPTY  # noqa: PLC0415
    from gpufn.deploy.model_files import prepare  # noqa: PLC0415

    gathers = {"batch": Batch(model.max_batch)} if model.max_batch > 1 else {"concurrency": 2}
    settings = settings_from({**gathers, **options}, "model")
    prepared = prepare("model", model, Path.cwd())
    spec = settings.spec(
        (MethodSpec(parameters={"type": "object"}),),
        is_class=False,
        entry=EntryPoint("", "", Packaging.MODEL),
        models=(prepared.spec,),
    )
    return Deployable(spec, EMPTY.digest, EMPTY.data, prepared.paths)


def deploy(
    api: Api,
    wanted: Deployable,
    *,
    force: bool = False,
    check: bool = True,
    replace: bool = False,
    told: Callable[[str], None] = lambda progress: None,
) -> Deployment:
    """Steps 1 to 3. `force`: a new revision even when nothing changed. `replace`: also of another file or project.
    `told` gets how far the uploads are."""
    spec, digest = wanted.spec, wanted.bundle
    name, patience_s = spec.name, spec.startup_timeout_s
    before = _known(api, name)
    same = None if before is None or force or not _serves_alone(before) else _same(api, before, wanted)
    if before is not None and same is not None:
        if same.bundle == digest:
            api.put_bundle(digest, wanted.data)  # the store may have lost it: its workers would not start
        return Deployment(name, before.active, before, is_new=False, startup_timeout_s=patience_s)
    lacking = ""
    with contextlib.suppress(Forbidden):  # a key that may only deploy
        lacking = what_no_node_has(spec.resources, api.nodes(), in_container=spec.image is not None)
    api.put_bundle(digest, wanted.data)
    upload(api, wanted.paths, told)
    made = api.create_revision(spec, digest, check=check, source=wanted.source, replace=replace, code=wanted.code)
    arguments, crowded = _changed_arguments(before, spec), crowding(spec)
    if isinstance(made, BuildingRevision):
        return Deployment(name, made.revision, None, True, patience_s, lacking, made.builds, arguments, crowded)
    return Deployment(name, made.active, made, True, patience_s, lacking, arguments=arguments, crowded=crowded)


def crowding(spec: FunctionSpec) -> str:
    """The warning for a function whose batches add up to very many calls in one worker; "" for others.

    >>> spec = FunctionSpec(name="f", entry=EntryPoint("app", "f"), methods=(MethodSpec(),))
    >>> crowding(msgspec.structs.replace(spec, concurrency=200, batch=Batch(32)))[:70]
    'each worker of f runs up to 6,400 calls at the same time (concurrency='
    """
    if spec.batch is None or spec.parallel_calls <= _MANY_PARALLEL_CALLS:
        return ""
    return (
        f"each worker of {spec.name} runs up to {spec.parallel_calls:,} calls at the same time "
        f"(concurrency={spec.concurrency} x max_size={spec.batch.max_size}): concurrency is the number of batches that "
        "run at the same time; lower it, unless the function has the memory and the threads for so many"
    )


def finish(api: Api, deployment: Deployment, timeout_s: float | None = None) -> FunctionView:
    """Steps 4 to 6, in silence."""
    view = deployment.view or wait_until_built(api, deployment.function, deployment.revision, timeout_s)
    view = checked(api, view, deployment.startup_timeout_s, timeout_s)
    if unchecked(view):
        return view
    return wait_until_it_serves(api, view, deployment.startup_timeout_s if timeout_s is None else timeout_s)


def checked(api: Api, view: FunctionView, startup_timeout_s: float, timeout_s: float | None = None) -> FunctionView:
    """Step 5: the function as it is afterwards."""
    if not is_pending(view):
        return view
    check = wait_until_checked(api, view, startup_timeout_s, timeout_s)
    return msgspec.structs.replace(api.function(view.name), check=check)


def unchecked(view: FunctionView) -> str:
    """The warning for a revision whose check found no room; "" for others."""
    if view.check is None or view.check.state is not CheckState.UNCHECKED:
        return ""
    return f"{view.name}@{view.active} was not checked, its first call may fail: {view.check.reason}"


def wait_until_built(
    api: Api,
    name: str,
    number: int,
    timeout_s: float | None = None,
    *,
    seen: Callable[[Sequence[BuildView]], None] = lambda builds: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> FunctionView:
    """Step 4. `seen` gets the revision's builds as they go on.

    Raises BuildFailed, Conflict when another revision took its place meanwhile, and TimeoutError.
    """
    started, ready_at = clock(), None
    while True:
        revision = api.revision(name, number)
        seen(revision.builds)
        if revision.state is RevisionState.FAILED:
            raise build_error(revision.error)
        if revision.state is not RevisionState.BUILDING:
            ready_at = clock() if ready_at is None else ready_at
            view, active = None, 0
            with contextlib.suppress(FunctionNotFound):  # its first revision
                view = api.function(name)
                active = view.active
            if view is not None and active == number:
                return view
            if active > number or clock() > ready_at + _MOVES_WITHIN_S:
                other = f"{name}@{active}" if active else "none"
                raise Conflict(f"{name}@{number} is built, and {other} is the active one")
        if timeout_s is not None and clock() >= started + timeout_s:
            raise TimeoutError(f"{name}@{number} is not built after {timeout_s:g} s; the build goes on")
        sleep(_BUILD_PAUSE_S)


def wait_until_it_serves(
    api: Api,
    view: FunctionView,
    timeout_s: float,
    *,
    told: Callable[[str], None] = lambda reason: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> FunctionView:
    """Step 6. `told` gets the reason for the wait, each time it is another one.

    Raises FunctionStartFailed when the new revision's workers do not start, Conflict when another one took its place,
    and TimeoutError.
    """
    name, wanted = view.name, view.active
    give_up, pause_s, last = clock() + timeout_s, _FIRST_PAUSE_S, ""
    while view.serving != wanted:
        if view.active != wanted:
            raise Conflict(f"{name}@{wanted} was replaced by {name}@{view.active} before it served")
        if view.next is not None and view.next.revision == wanted and (error := view.next.start_error) is not None:
            raise FunctionStartFailed(
                f"{name}@{wanted} does not start, {name}@{view.serving} still serves: {error.summary}"
            )
        if clock() >= give_up:
            raise TimeoutError(
                f"{name}@{wanted} does not serve after {timeout_s:g} s, {name}@{view.serving} still does: {view.reason}"
            )
        if view.reason != last:
            last = view.reason
            told(last)
        sleep(pause_s)
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        try:
            view = api.function(name)
        except Forbidden:  # a key that may only deploy cannot see it
            return view
    return view


def _known(api: Api, name: str) -> FunctionView | None:
    try:
        return api.function(name, env_values=True)  # to compare them
    except (FunctionNotFound, Forbidden):
        return None


def _serves_alone(view: FunctionView) -> bool:
    """Whether the active revision serves: one that does not start is worth another try."""
    return view.active == view.serving and view.start_error is None


def _changed_arguments(before: FunctionView | None, spec: FunctionSpec) -> tuple[str, ...]:
    if before is None or not before.spec:
        return ()
    return tuple(
        signature_changes(spec_from_json(before.spec).methods, spec_from_json(msgspec.json.encode(spec)).methods)
    )


def _same(api: Api, view: FunctionView, wanted: Deployable) -> RevisionView | None:
    """The active revision, where it runs what is wanted: the same bundle, or the same code of the function in another
    one. Third-party modules of the bundle do not count then: they belong to all its functions."""
    active = next((each for each in api.revisions(view.name) if each.number == view.active), None)
    if active is None or not view.spec:
        return None
    before, after = spec_from_json(view.spec), spec_from_json(msgspec.json.encode(wanted.spec))
    if active.bundle == wanted.bundle:
        return active if before == after else None
    if not wanted.code or active.code != wanted.code:
        return None
    return active if _without_modules(before) == _without_modules(after) else None


def _without_modules(spec: FunctionSpec) -> FunctionSpec:
    return msgspec.structs.replace(spec, modules=())
