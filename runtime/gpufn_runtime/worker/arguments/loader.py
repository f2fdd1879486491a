"""Load a Revision's code from an unpacked Bundle. This is the only module that unpickles code."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from gpufn.declare import volume, weights
from gpufn.declare.hints.type_hints import signature_of
from gpufn.declare.hooks import HOOKS_WITH_CAUSE, hooks, with_cause
from gpufn_core.encoding import media
from gpufn_core.protocol.launch import WorkerConfig
from gpufn_core.spec.function_spec import CallKind, EntryPoint, FunctionSpec, MethodSpec, Packaging
from gpufn_core.spec.tensor_signature import takes_tensors, tensor_inputs
from gpufn_runtime.worker.arguments.parameters import Parameters, Reader

if TYPE_CHECKING:
    from gpufn_runtime.worker.engines.session import Session

_OUR_MODULES = frozenset(
    {"gpufn", "gpufn_core", "gpufn_platform", "gpufn_runtime", "msgspec", "typing_extensions", "cloudpickle"}
)


class LoadError(Exception):
    """The revision cannot run here for a reason other than an exception in its code. The message is complete."""


class Method(NamedTuple):
    """A method of the revision. If `batched`, calls are gathered, and `call` takes a list per argument. If `is_web`,
    `call` serves a `Session`."""

    call: Callable[..., Any]
    kind: CallKind
    parameters: Reader
    batched: bool
    is_web: bool = False


class Loaded:
    """The loaded revision. The methods of a class exist after `instantiate`.

    A variant has `parameters`. `sessions` are the function's models, by parameter. A class has them as
    attributes before any of its code runs; a plain function receives them with each call.
    """

    def __init__(
        self,
        target: Any,
        spec: FunctionSpec,
        sessions: Mapping[str, Session],
        *,
        revision: int,
        parameters: Mapping[str, Any],
    ) -> None:
        self.methods: dict[str, Method] = {}
        self.enter: list[Callable[[], Any]] = []
        self.exit: list[Callable[[str], Any]] = []  # these receive the cause
        self.park: list[Callable[[str], Any]] = []
        self.resume: list[Callable[[str], Any]] = []
        self._target = target
        self._spec = spec
        self._revision = revision
        self._parameters = parameters
        self.sessions = sessions

    def instantiate(self) -> None:
        """Instantiate the class, if it is one, and collect the methods."""
        if self._spec.is_class:
            for name, session in self.sessions.items():
                setattr(self._target, name, session)
        instance = self._target(**self._constructor_arguments()) if self._spec.is_class else self._target
        for method in self._spec.methods:
            call = getattr(instance, method.name) if method.name else instance
            self.methods[method.name] = self._method(method, call)
        if self._spec.is_class:
            self.enter = [getattr(instance, name) for name in hooks(type(instance), "enter")]
            for hook in HOOKS_WITH_CAUSE:
                setattr(self, hook, [with_cause(getattr(instance, name)) for name in hooks(type(instance), hook)])

    def _constructor_arguments(self) -> dict[str, Any]:
        """Convert the parameters of a variant to the type hints of `__init__`. Raises InvalidInput."""
        if not self._parameters:
            return {}
        init = self._target.__init__
        reader = Parameters(init, provided=list(signature_of(init).parameters)[:1])  # without `self`
        return reader.bind(media.JSON, msgspec.json.encode(self._parameters))[1]

    def _method(self, method: MethodSpec, call: Callable[..., Any]) -> Method:
        batched = self._spec.batch_of(method) is not None
        provided = {} if self._spec.is_class else self.sessions
        parameters = Parameters(
            call,
            raw_parameter=method.raw_parameter,
            batched=batched,
            provided=provided,
            may_pickle=self._spec.pickle,
        )
        call = _with_sessions(call, parameters.signature, provided) if provided else call
        if takes_tensors(method):
            return self._tensor_method(method, call, parameters, batched=batched)
        return Method(call, method.kind, parameters, batched)

    def _tensor_method(
        self, method: MethodSpec, call: Callable[..., Any], parameters: Parameters, *, batched: bool
    ) -> Method:
        """Return a method that also serves the Open Inference Protocol. Imports numpy."""
        from gpufn_runtime.worker.arguments.tensor_calls import TensorFunction  # noqa: PLC0415

        inputs = tensor_inputs(method)
        function = TensorFunction(
            call,
            method.kind,
            parameters,
            inputs,
            name=self._spec.name,
            version=str(self._revision),
            batched=batched,
        )
        return Method(function.call, method.kind, function, batched)


class _Model(Loaded):
    """A model that is deployed without code."""

    def instantiate(self) -> None:
        batched = self._spec.batch is not None and self._target.shares_runs
        for method in self._spec.methods:
            call = self._target.call_all if batched else self._target.call
            self.methods[method.name] = Method(call, method.kind, self._target, batched)


class _WebApp(Loaded):
    """A function that returns an ASGI or WSGI application, which serves web sessions."""

    def instantiate(self) -> None:
        from gpufn_runtime.worker.web.application import Application, WebRequests  # noqa: PLC0415  (needs asyncio)

        assert self._spec.web is not msgspec.UNSET
        app = Application(self._target(), self._spec.web.kind, threads=self._spec.concurrency)
        self.enter, self.exit = [app.start], [lambda cause: app.stop()]
        (method,) = self._spec.methods
        self.methods[method.name] = Method(app.serve, method.kind, WebRequests(self._spec.name), False, is_web=True)


class _Terminal(Loaded):
    """A worker whose only session runs a command. None of the function's own code is imported."""

    def instantiate(self) -> None:
        from gpufn_runtime.worker.terminal.terminal import Starts, Terminal  # noqa: PLC0415  (needs asyncio)

        (method,) = self._spec.methods
        terminal = Terminal(self._target)
        self.methods[method.name] = Method(terminal.serve, method.kind, Starts(self._spec.name), False, is_web=True)


def load(config: WorkerConfig) -> Loaded:
    """Import or unpickle the function, and load its models. Exceptions of user code propagate."""
    if config.is_terminal:
        os.chdir(config.bundle_dir)
        return _Terminal(config.worker, config.spec, {}, revision=config.revision, parameters={})
    entry = config.spec.entry
    if entry.packaging is Packaging.MODEL:
        return _model(config)
    weights.install(dict(zip((spec.declaration for spec in config.spec.weights), config.weights, strict=True)))
    volume.install({each.name: volume.Mounted(each.path, each.version) for each in config.volumes})
    sys.path.insert(0, config.bundle_dir)
    os.chdir(config.bundle_dir)  # so that relative paths work as in the user's project
    target = _unpickle(config) if entry.packaging is Packaging.PICKLE else _import(entry, config.bundle_dir)
    target = getattr(target, "raw", target)  # the object that `@gpu_function` decorates
    if not callable(target) or isinstance(target, type) != config.spec.is_class:
        expected = "a class" if config.spec.is_class else "a function"
        raise LoadError(f"{entry.module}.{entry.qualname} is {type(target).__name__!r} but was deployed as {expected}")
    sessions = _sessions(config) if config.spec.models else {}
    kind = _WebApp if config.spec.serves_app else Loaded
    return kind(target, config.spec, sessions, revision=config.revision, parameters=config.parameters)


def _model(config: WorkerConfig) -> Loaded:
    sessions = _sessions(config)
    from gpufn_runtime.worker.engines.model_function import ModelFunction  # noqa: PLC0415  (see `_sessions`)

    (session,) = sessions.values()
    model = ModelFunction(session, config.function, config.revision)
    return _Model(model, config.spec, sessions, revision=config.revision, parameters={})


def _sessions(config: WorkerConfig) -> Mapping[str, Session]:
    """Load the models. Imports numpy and the engine runtimes, so only called if there are models."""
    try:
        from gpufn_runtime.worker.engines.load import NoEngine, load_sessions  # noqa: PLC0415
    except ImportError as error:
        raise LoadError(f"this node lacks the packages to run models: {error}") from error
    try:
        return load_sessions(config)
    except NoEngine as error:
        raise LoadError(str(error)) from error


def _with_sessions(
    call: Callable[..., Any], without: inspect.Signature, sessions: Mapping[str, Session]
) -> Callable[..., Any]:
    """Wrap `call` so that callers omit the sessions, also in positional arguments."""
    signature = signature_of(call)
    order = list(signature.parameters)

    def provided(*args: Any, **kwargs: Any) -> Any:
        arguments = {**without.bind(*args, **kwargs).arguments, **sessions}
        bound = inspect.BoundArguments(signature, {name: arguments[name] for name in order if name in arguments})
        return call(*bound.args, **bound.kwargs)

    return provided


class ThirdPartyModules:
    """Installed modules in memory, except modules that every worker has: candidates for a template process to preload.

    `newly_loaded` returns the modules loaded since the previous call. A worker must not report modules that its
    template had loaded; and iterating over all of torch's modules would copy memory pages, which takes 5 ms.
    """

    def __init__(self) -> None:
        self._newest = ""

    def newly_loaded(self) -> tuple[str, ...]:
        # This runs entirely in C, so that no thread imports meanwhile.
        newest_first = list(itertools.takewhile(self._newest.__ne__, reversed(sys.modules)))
        if newest_first:
            self._newest = newest_first[0]
        return tuple(sorted(filter(_is_third_party, newest_first)))


third_party = ThirdPartyModules()


def _is_third_party(name: str) -> bool:
    if "." in name or name.startswith("_") or name in _OUR_MODULES:
        return False
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    return f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file


def _import(entry: EntryPoint, bundle_dir: str) -> Any:
    top = entry.module.partition(".")[0]
    loaded = sys.modules.get(top)
    if loaded is not None and not (getattr(loaded, "__file__", None) or "").startswith(bundle_dir):
        raise LoadError(f"the module {top!r} has the name of a module that is already loaded: rename the file")
    __import__(entry.module)
    target: Any = sys.modules[entry.module]
    for name in entry.qualname.split("."):
        try:
            target = getattr(target, name)
        except AttributeError:
            raise LoadError(f"the module {entry.module} has no {entry.qualname}") from None
    return target


def _unpickle(config: WorkerConfig) -> Any:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if config.spec.python not in ("", here):
        raise LoadError(
            f"{config.spec.name} was pickled by Python {config.spec.python}, but this worker runs {here}: "
            "deploy it from a file, or with the same Python version"
        )
    import cloudpickle  # noqa: PLC0415  (only for functions without a file)

    with open(os.path.join(config.bundle_dir, "function.pkl"), "rb") as file:
        return cloudpickle.load(file)
