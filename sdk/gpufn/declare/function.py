"""What `@gpu_function` returns: the user's code, callable here as before, and its remote side (`gpufn.call.remote`).

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

from gpufn.call.remote import Remote, by_name, kind_of
from gpufn.call.result_decoding import ResultReader
from gpufn.call.threads import run_coroutine
from gpufn.declare import declarations
from gpufn.declare.hooks import hooks
from gpufn.declare.type_hints import resolved, signature_of
from gpufn_core.errors import InvalidInput, InvalidSpec
from gpufn_core.spec.function_spec import CallKind, EntryPoint, FunctionSpec, Packaging
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_core.spec.model_spec import ModelSpec

if TYPE_CHECKING:
    from gpufn.declare.named_function import NamedFunction
    from gpufn.declare.options import Settings

P = ParamSpec("P")
R = TypeVar("R")  # what a call here returns
V = TypeVar("V")  # what a remote call returns
T = TypeVar("T")

_CALLS = frozenset({"remote", "spawn", "map", "starmap", "stream", "aio", "options"})  # what a Method has


class _Declared:
    """What Function and FunctionClass share: the user's object, its settings, its spec, and how it is pickled."""

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
        """As deployed."""
        return self.settings.name

    def spec(
        self,
        packaging: Packaging = Packaging.SOURCE,
        modules: tuple[str, ...] = (),
        models: tuple[ModelSpec, ...] = (),
        image: ImageSpec | None = None,
    ) -> FunctionSpec:
        """What is deployed. Resolves the type hints; InvalidSpec says which parameter is wrong."""
        from gpufn.declare import signature_schema  # noqa: PLC0415

        try:
            return self.settings.spec(
                signature_schema.methods_of(self.raw, self.settings.batch, self.settings.declared_models),
                is_class=isinstance(self.raw, type),
                entry=EntryPoint(self.raw.__module__, self.raw.__qualname__, packaging),
                python=f"{sys.version_info.major}.{sys.version_info.minor}",
                modules=modules,
                models=models,
                image=image,
            )
        except InvalidSpec as error:
            raise InvalidSpec(f"{self.__qualname__}: {error.message}") from error

    def sessions(self, given: Collection[str] = ()) -> dict[str, Any]:
        """Its models but those in `given`, to run here."""
        wanted = {name: model for name, model in self.settings.declared_models.items() if name not in given}
        if not wanted:
            return {}
        from gpufn.call.local_session import session_of  # noqa: PLC0415
        from gpufn.deploy.model_files import folder_of  # noqa: PLC0415

        return {name: session_of(model, folder_of(self.raw)) for name, model in wanted.items()}

    def __reduce__(self) -> str | tuple[Any, ...]:
        """By reference where it can be imported, else by value; `raw` comes after the memo, for it may refer to us."""
        module = sys.modules.get(self.raw.__module__)
        if self.raw.__module__ != "__main__" and getattr(module, self.raw.__qualname__, None) is self:
            return self.raw.__qualname__  # type: ignore[no-any-return]
        return _blank, (type(self),), {"raw": self.raw, "settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.raw, self.settings = state["raw"], state["settings"]
        functools.update_wrapper(cast("Any", self), self.raw, updated=())
        declarations.register(self)


class Function(_Declared, Remote[P, R, V]):
    """A function that gpufn can run elsewhere. Made by `@gpu_function`.

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
        """The remote side of a deployed function whose code is not here, or of a class's method: `counter.add`.

        It has `remote`, `spawn`, `map`, `starmap`, `stream`, `aio` and `options`, as a function that is declared here.
        Nothing is looked up before the first call. Results are Python values, as those of any function. With `pickle`
        arguments without a form of their own are sent as pickles, which a function that has `pickle=True` takes.

        >>> Function.from_name("ocr")
        <NamedFunction ocr>
        """
        from gpufn.declare.named_function import NamedFunction  # noqa: PLC0415

        return NamedFunction(name, pickle=pickle)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run here, as plain Python."""
        models = self.settings.declared_models
        if not models:
            return self.raw(*args, **kwargs)
        given = {name: kwargs.pop(name) for name in models if name in kwargs}  # stand-ins
        return cast("R", self.runnable(given)(**by_name(self._signature(), args, kwargs)))

    def runnable(self, given: dict[str, Any] | None = None) -> Callable[..., Any]:
        """`raw`, with its models; those in `given` take the place of the declared ones."""
        if not self.settings.declared_models:
            return self.raw
        given = given or {}
        return functools.partial(self.raw, **given, **self.sessions(given))

    @property
    def _function_name(self) -> str:  # type: ignore[override]
        return self.settings.name

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
        return f"<Function {self.settings.name}>"


class FunctionClass(_Declared):
    """A class that gpufn can run elsewhere: each worker holds one instance. Made by `@gpu_function`."""

    raw: type

    def __call__(self, *args: Any, **kwargs: Any) -> Instance:
        return Instance(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        # Only what is not found otherwise gets here; `raw` is missing while we are being unpickled.
        if name == "raw" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        if name in hooks(self.raw, "method"):
            return Method(self, name)
        _check_is_no_call(self.raw, name)
        return getattr(self.raw, name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self.raw,)

    def __repr__(self) -> str:
        return f"<FunctionClass {self.settings.name}>"


class Instance:
    """An instance of a FunctionClass here. The user's own object is made, and entered, when it is first used."""

    def __init__(self, declared: FunctionClass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._declared = declared
        self._arguments = args, kwargs
        self._object: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if name in hooks(self._declared.raw, "method"):
            return Method(self._declared, name, self)
        local = self._local()
        if not hasattr(local, name):
            _check_is_no_call(self._declared.raw, name)
        return getattr(local, name)

    def __enter__(self) -> Instance:
        self._local()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Run the `@exit` methods: each of them, whatever one before it raises."""
        entered, self._object = self._object, None
        if entered is None:
            return
        with contextlib.ExitStack() as stack:
            for name in reversed(hooks(type(entered), "exit")):
                stack.callback(_run_hook, entered, name)

    def _local(self) -> Any:
        if self._object is None:
            args, kwargs = self._arguments
            cls = self._declared.raw
            made = cls.__new__(cls, *args, **kwargs)
            for name, session in self._declared.sessions().items():
                setattr(made, name, session)  # there for its __init__ already
            made.__init__(*args, **kwargs)
            for name in hooks(cls, "enter"):
                _run_hook(made, name)
            self._object = made
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
        """Run here, as plain Python."""
        if self._instance is None:  # written as Class.method(instance, ...)
            if not args:
                name, method = self._declared.__qualname__, self._method_name
                raise TypeError(
                    f"{name}.{method}(...) runs here and needs an instance: write {name}().{method}(...), or "
                    f"{name}.{method}.remote(...) to run it on the platform"
                )
            owner, *rest = args
            if isinstance(owner, Instance):
                owner = owner._local()
            return cast("R", self._raw(owner, *rest, **kwargs))
        return cast("R", getattr(self._instance._local(), self._method_name)(*args, **kwargs))

    @property
    def _function_name(self) -> str:  # type: ignore[override]
        if self._instance is not None and any(self._instance._arguments):
            raise InvalidInput(
                f"{self._declared.__qualname__}(...) was given arguments, which stay here: a worker makes its instance "
                "without; pass them to the method, or deploy a second class"
            )
        return self._declared.name

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
    return ResultReader(lambda: resolved(_signature_of(function).return_annotation, function))


def _check_is_no_call(cls: type, name: str) -> None:
    """Raises AttributeError for a call of the class itself."""
    if name in _CALLS and not hasattr(cls, name):
        example = next(iter(hooks(cls, "method")), "METHOD")
        raise AttributeError(f"{cls.__name__} is a class: call a method of it, as in {cls.__name__}.{example}.{name}")


def _blank(cls: type[T]) -> T:
    return object.__new__(cls)


def _run_hook(instance: Any, name: str) -> None:
    hook = getattr(instance, name)
    if kind_of(hook) is CallKind.ASYNC:
        run_coroutine(hook())
    else:
        hook()
