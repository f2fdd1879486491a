"""The objects that `@gpu_function` returns. Plain calls run in this process; `gpufn.call.remote` has the remote calls.

Function        a function   f(x)  f.remote(x)  f.spawn(x)  f.map(xs)  f.stream(x)  await f.aio.remote(x)
FunctionClass   a class      C()   C.method.remote(x)
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Collection
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import msgspec

from gpufn.call.remote import Remote, by_name, kind_of
from gpufn.call.result_decoding import ResultReader
from gpufn.call.threads import run_coroutine
from gpufn.declare import declarations
from gpufn.declare.hints.type_hints import resolve_hint, signature_of
from gpufn.declare.hooks import hooks, with_cause
from gpufn_core.domain.worker import Cause
from gpufn_core.errors import InvalidInput, InvalidSpec
from gpufn_core.spec.function_spec import CallKind, EntryPoint, FunctionSpec, Packaging
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_core.spec.model_spec import ModelSpec
from gpufn_core.spec.naming import variant_options
from gpufn_core.spec.naming.names import HOME, Home
from gpufn_core.spec.naming.variant_names import with_selector
from gpufn_core.spec.weights_spec import WeightsSpec

if TYPE_CHECKING:
    from gpufn.declare.named_function import NamedFunction
    from gpufn.declare.options import Settings

P = ParamSpec("P")
R = TypeVar("R")  # the result of a local call
V = TypeVar("V")  # the result of a remote call
T = TypeVar("T")

_REMOTE_CALLS = frozenset({"remote", "spawn", "map", "starmap", "stream", "aio", "options"})  # attributes of a Method


class _Declaration:
    """The base of Function and FunctionClass: the user's object, its settings, its spec, and its pickling."""

    raw: Any
    settings: Settings
    __name__: str
    __qualname__: str

    def __init__(self, raw: Any, settings: Settings) -> None:
        functools.update_wrapper(cast("Any", self), raw, updated=())
        self.raw = raw
        self.settings = settings
        declarations.register(self)

    @property
    def name(self) -> str:
        """The name of the function: `predict`, or `search/predict` in the app `search`."""
        return self.settings.path

    def spec(
        self,
        packaging: Packaging = Packaging.SOURCE,
        modules: tuple[str, ...] = (),
        models: tuple[ModelSpec, ...] = (),
        image: ImageSpec | None = None,
        weights: tuple[WeightsSpec, ...] = (),
        *,
        home: Home = HOME,
    ) -> FunctionSpec:
        """Return the spec to deploy. Resolves the type hints. Raises InvalidSpec, which names the wrong parameter."""
        from gpufn.declare.hints import signature_schema  # noqa: PLC0415

        try:
            return self.settings.spec(
                self.settings.web_methods
                or signature_schema.methods_of(self.raw, self.settings.batch, self.settings.declared_models),
                is_class=isinstance(self.raw, type),
                constructor=signature_schema.constructor_of(self.raw) if isinstance(self.raw, type) else msgspec.UNSET,
                entry=EntryPoint(self.raw.__module__, self.raw.__qualname__, packaging),
                python=f"{sys.version_info.major}.{sys.version_info.minor}",
                modules=modules,
                models=models,
                image=image,
                weights=weights,
                home=home,
            )
        except InvalidSpec as error:
            raise InvalidSpec(f"{self.__qualname__}: {error.message}") from error

    def sessions(self, exclude: Collection[str] = ()) -> dict[str, Any]:
        """Return sessions that run the declared models in this process, except for the models in `exclude`."""
        models = {name: model for name, model in self.settings.declared_models.items() if name not in exclude}
        if not models:
            return {}
        from gpufn.call.local_session import session_of  # noqa: PLC0415
        from gpufn.deploy.model_files import folder_of  # noqa: PLC0415

        return {name: session_of(model, folder_of(self.raw)) for name, model in models.items()}

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle by reference if this object can be imported, else by value.

        `raw` is in the state, which is pickled after this object has its memo entry: `raw` may refer to this object.
        """
        module = sys.modules.get(self.raw.__module__)
        if self.raw.__module__ != "__main__" and getattr(module, self.raw.__qualname__, None) is self:
            return self.raw.__qualname__  # type: ignore[no-any-return]
        return _blank, (type(self),), {"raw": self.raw, "settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.raw, self.settings = state["raw"], state["settings"]
        functools.update_wrapper(cast("Any", self), self.raw, updated=())
        declarations.register(self)


class Function(_Declaration, Remote[P, R, V]):
    """A function that gpufn can run on the platform. `@gpu_function` returns it.

    >>> from gpufn import gpu_function
    >>> from gpufn.testing import run_locally
    >>> @gpu_function
    ... def square(x: int) -> int:
    ...     return x * x
    >>> isinstance(square, Function), square.name, square(3)
    (True, 'square', 9)
    >>> with run_locally():
    ...     square.remote(4), list(square.map(range(5))), square.spawn(6).result()
    (16, [0, 1, 4, 9, 16], 36)
    """

    raw: Callable[P, R]

    @staticmethod
    def from_name(name: str, *, pickle: bool = False) -> NamedFunction:
        """Return a deployed function, or a class's method (`counter.add`), by name. Its code is not needed.

        It has `remote`, `spawn`, `map`, `starmap`, `stream`, `aio` and `options`, like a declared function, and its
        results are Python values. The function is looked up when it is called. With `pickle`, arguments that have no
        form of their own are sent as pickles; only a function with `pickle=True` accepts them.

        >>> Function.from_name("ocr")
        <NamedFunction ocr>
        """
        from gpufn.declare.named_function import NamedFunction  # noqa: PLC0415

        return NamedFunction(name, pickle=pickle)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run in this process, as plain Python."""
        models = self.settings.declared_models
        if not models:
            return self.raw(*args, **kwargs)
        replacements = {name: kwargs.pop(name) for name in models if name in kwargs}
        return cast("R", self.runnable(replacements)(**by_name(self._signature(), args, kwargs)))

    def runnable(self, replacements: dict[str, Any] | None = None) -> Callable[..., Any]:
        """Return `raw` with its models bound. `replacements` take the place of the declared models of these names."""
        if not self.settings.declared_models:
            return self.raw
        replacements = replacements or {}
        return functools.partial(self.raw, **replacements, **self.sessions(replacements))

    @property
    def _function_name(self) -> str:  # type: ignore[override]
        return self.settings.path

    @functools.cached_property
    def _kind(self) -> CallKind:  # type: ignore[override]
        return kind_of(self.raw)

    @property
    def _by_name_only(self) -> bool:  # type: ignore[override]
        return bool(self.settings.declared_models)

    @property
    def _may_pickle(self) -> bool:  # type: ignore[override]
        return self.settings.pickle

    @functools.cached_property
    def reader(self) -> ResultReader:
        return _reader_of(self.raw)

    def _signature(self) -> inspect.Signature:
        signature, models = _signature_of(self.raw), self.settings.declared_models
        if not models:
            return signature
        return signature.replace(parameters=[p for p in signature.parameters.values() if p.name not in models])

    def __repr__(self) -> str:
        return f"<Function {self.name}>"


class FunctionClass(_Declaration):
    """A class that gpufn can run on the platform; each worker holds one instance. `@gpu_function` returns it."""

    raw: type

    def __call__(self, *args: Any, **kwargs: Any) -> Instance:
        return Instance(self, args, kwargs)

    def with_options(self, **options: Any) -> ClassWithOptions:
        """Return the class with other options: ``Clf.with_options(gpu="L4")("big").predict.remote(x)``. They make a
        variant, as `Function.with_options` describes. Raises InvalidInput."""
        variant_options.check_names(options)
        return ClassWithOptions(self, options)

    def __getattr__(self, name: str) -> Any:
        # Python calls this only if the normal lookup fails. During unpickling, `raw` does not exist yet.
        if name == "raw" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        if name in hooks(self.raw, "method"):
            return Method(self, name)
        _check_not_remote_call(self.raw, name)
        return getattr(self.raw, name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self.raw,)

    def __repr__(self) -> str:
        return f"<FunctionClass {self.name}>"


class ClassWithOptions:
    """A FunctionClass whose calls go to a variant with other options."""

    def __init__(self, declared: FunctionClass, options: dict[str, Any]) -> None:
        self._declared = declared
        self._options = options

    def __call__(self, *args: Any, **kwargs: Any) -> Instance:
        return Instance(self._declared, args, kwargs, self._options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self(), name)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        return f"{self._declared!r}.with_options({options})"


class Instance:
    """A local instance of a FunctionClass. Creates the user's object, and runs its `@enter` methods, on first use."""

    def __init__(
        self,
        declared: FunctionClass,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: dict[str, Any] | None = None,
    ) -> None:
        self._declared = declared
        self._arguments = args, kwargs
        self._options = options or {}
        self._object: Any = None

    @functools.cached_property
    def parameters(self) -> dict[str, Any]:
        """The arguments of the constructor, by name: they choose the pool of workers that remote calls go to. Raises
        TypeError for arguments that do not fit the constructor, InvalidInput for one without a name."""
        args, kwargs = self._arguments
        if not args and not kwargs:
            return {}
        from gpufn.declare.hints import signature_schema  # noqa: PLC0415

        cls = self._declared.raw
        named = by_name(signature_of(cls), args, kwargs)
        known = {parameter.name for parameter in signature_schema.constructor_parameters(cls)}
        if unnamed := named.keys() - known - kwargs.keys():
            raise InvalidInput(
                f"{self._declared.__qualname__}(...): {min(unnamed)} has no name in the constructor, so it cannot be "
                "sent: write an __init__ with named parameters"
            )
        return named

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if name in hooks(self._declared.raw, "method"):
            return Method(self._declared, name, self)
        local = self._local()
        if not hasattr(local, name):
            _check_not_remote_call(self._declared.raw, name)
        return getattr(local, name)

    def __enter__(self) -> Instance:
        self._local()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Run all `@exit` methods, even if one of them raises."""
        entered, self._object = self._object, None
        if entered is None:
            return
        with contextlib.ExitStack() as stack:
            for name in reversed(hooks(type(entered), "exit")):
                stack.callback(_run_hook, functools.partial(with_cause(getattr(entered, name)), Cause.STOP.value))

    def _local(self) -> Any:
        if self._object is None:
            args, kwargs = self._arguments
            cls = self._declared.raw
            instance = cls.__new__(cls, *args, **kwargs)
            for name, session in self._declared.sessions().items():
                setattr(instance, name, session)  # before `__init__`, which may use it
            instance.__init__(*args, **kwargs)
            for name in hooks(cls, "enter"):
                _run_hook(getattr(instance, name))
            self._object = instance
        return self._object

    def __repr__(self) -> str:
        return f"<{self._declared.__qualname__} of {self._declared!r}>"


class Method(Remote[P, R, V]):
    """A `@method` of a FunctionClass."""

    def __init__(self, declared: FunctionClass, name: str, instance: Instance | None = None) -> None:
        self._declared = declared
        self._method_name = name
        self._instance = instance
        self._raw = hooks(declared.raw, "method")[name]
        self._kind = kind_of(self._raw)
        self._may_pickle = declared.settings.pickle
        functools.update_wrapper(cast("Any", self), self._raw, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run in this process, as plain Python."""
        if self._instance is None:  # a call such as Class.method(instance, ...)
            if not args:
                name, method = self._declared.__qualname__, self._method_name
                raise TypeError(
                    f"{name}.{method}(...) is a local call and needs an instance: write {name}().{method}(...), or "
                    f"{name}.{method}.remote(...) to run it on the platform"
                )
            instance, *rest = args
            if isinstance(instance, Instance):
                instance = instance._local()
            return cast("R", self._raw(instance, *rest, **kwargs))
        return cast("R", getattr(self._instance._local(), self._method_name)(*args, **kwargs))

    @property
    def _function_name(self) -> str:  # type: ignore[override]
        if self._instance is None:
            return self._declared.name
        values = self._instance.parameters | variant_options.marked(self._instance._options)
        return with_selector(self._declared.name, values)

    def _signature(self) -> inspect.Signature:
        signature = _signature_of(self._raw)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    @functools.cached_property
    def reader(self) -> ResultReader:
        return _reader_of(self._raw)

    def __repr__(self) -> str:
        return f"<Method {self._declared.name}.{self._method_name}>"


@functools.lru_cache(maxsize=1024)
def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    return signature_of(function)


def _reader_of(function: Callable[..., Any]) -> ResultReader:
    return ResultReader(lambda: resolve_hint(_signature_of(function).return_annotation, function))


def _check_not_remote_call(cls: type, name: str) -> None:
    """Raise AttributeError for a remote call of the class itself, such as `Class.remote`."""
    if name in _REMOTE_CALLS and not hasattr(cls, name):
        example = next(iter(hooks(cls, "method")), "METHOD")
        raise AttributeError(f"{cls.__name__} is a class: call one of its methods, as {cls.__name__}.{example}.{name}")


def _blank(cls: type[T]) -> T:  # deployed pickles refer to it by name
    return object.__new__(cls)


def _run_hook(hook: Callable[[], Any]) -> None:
    result = hook()
    if inspect.iscoroutine(result):
        run_coroutine(result)
