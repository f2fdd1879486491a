"""`@gpu_function`, and the decorators for a class's methods: `@enter`, `@method`, `@park`, `@resume`, `@exit`.

Decoration makes only the checks that need no resolved type hints, because workers decorate again at every cold start.
`signature_schema` resolves the hints at deploy.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack, cast, overload

import msgspec

from gpufn.call.remote import kind_of
from gpufn.declare.function import Function, FunctionClass, Method
from gpufn.declare.hints.type_hints import signature_of
from gpufn.declare.hooks import BATCH, HOOK, HOOKS_WITH_CAUSE, hooks
from gpufn.declare.model import Model
from gpufn.declare.options import PlainOptions, settings_from, signature
from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.function_spec import Batch, MethodSpec
from gpufn_core.spec.naming.names import function_name
from gpufn_core.spec.web_spec import WebSpec

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


class Decorator(Protocol):
    @overload
    def __call__(self, target: C, /) -> C: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, target: Callable[P, Coroutine[Any, Any, T]], /) -> Function[P, Coroutine[Any, Any, T], T]: ...
    @overload
    def __call__(self, target: Callable[P, AsyncIterator[T]], /) -> Function[P, AsyncIterator[T], list[T]]: ...
    @overload
    def __call__(self, target: Callable[P, Iterator[T]], /) -> Function[P, Iterator[T], list[T]]: ...
    @overload
    def __call__(self, target: Callable[P, R], /) -> Function[P, R, R]: ...


class DecoratorWithModels(Protocol):
    """The decorator for a function with `models`, whose parameters are not typed.

    Callers leave out the parameters that receive models, and Python has no type for "all parameters but these".
    """

    @overload
    def __call__(self, target: C, /) -> C: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(
        self, target: Callable[..., Coroutine[Any, Any, T]], /
    ) -> Function[..., Coroutine[Any, Any, T], T]: ...
    @overload
    def __call__(self, target: Callable[..., AsyncIterator[T]], /) -> Function[..., AsyncIterator[T], list[T]]: ...
    @overload
    def __call__(self, target: Callable[..., Iterator[T]], /) -> Function[..., Iterator[T], list[T]]: ...
    @overload
    def __call__(self, target: Callable[..., R], /) -> Function[..., R, R]: ...


@overload  # a class stays itself to type checkers, with a Method for each @method
def gpu_function(target: C, /) -> C: ...  # type: ignore[overload-overlap]
@overload
def gpu_function(target: Callable[P, Coroutine[Any, Any, T]], /) -> Function[P, Coroutine[Any, Any, T], T]: ...
@overload
def gpu_function(target: Callable[P, AsyncIterator[T]], /) -> Function[P, AsyncIterator[T], list[T]]: ...
@overload
def gpu_function(target: Callable[P, Iterator[T]], /) -> Function[P, Iterator[T], list[T]]: ...
@overload
def gpu_function(target: Callable[P, R], /) -> Function[P, R, R]: ...
@overload
def gpu_function(*, models: Mapping[str, Model], **options: Unpack[PlainOptions]) -> DecoratorWithModels: ...
@overload
def gpu_function(**options: Unpack[PlainOptions]) -> Decorator: ...
def gpu_function(target: Any = None, /, **options: Any) -> Any:
    """Declare a function or a class that gpufn can run on the platform. A plain call still runs in this process.

    docs/reference/python.md has a table of the options with their types, defaults and meanings.

    Raises InvalidSpec, which names the wrong option.

    >>> @gpu_function(gpu=["L4", "any"], timeout=60, retries=2)
    ... def classify(image: bytes, top: int = 5) -> list[str]:
    ...     return ["cat", "dog"][:top]
    >>> classify(b"...", top=1)
    ['cat']
    >>> gpu_function(max_worker=3)
    Traceback (most recent call last):
        ...
    gpufn.errors.InvalidSpec: there is no option 'max_worker'; did you mean 'max_workers'?
    """
    if target is None:
        settings_from(options, "unnamed")  # so that the traceback of a wrong option shows the decorator's line
        return lambda target: declare(target, options)
    if options:
        raise InvalidSpec("write @gpu_function(...) with options only, above the function")
    return declare(target, {})


vars(gpu_function)["__signature__"] = signature()


@overload
def enter(hook: F, /) -> F: ...
@overload
def enter() -> Callable[[F], F]: ...
def enter(hook: Any = None, /) -> Any:
    """Mark a method that runs once when a worker starts, before its first call. Load the model in it.

    >>> @gpu_function
    ... class Doubler:
    ...     @enter
    ...     def load(self) -> None:
    ...         self.factor = 2
    ...
    ...     @method
    ...     def double(self, x: int) -> int:
    ...         return self.factor * x
    >>> Doubler().double(21)
    42
    """
    return _mark(hook, "enter")


@overload
def method(call: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Method[P, Coroutine[Any, Any, T], T]: ...
@overload
def method(call: Callable[Concatenate[Any, P], AsyncIterator[T]]) -> Method[P, AsyncIterator[T], list[T]]: ...
@overload
def method(call: Callable[Concatenate[Any, P], Iterator[T]]) -> Method[P, Iterator[T], list[T]]: ...
@overload
def method(call: Callable[Concatenate[Any, P], R]) -> Method[P, R, R]: ...
@overload
def method(*, batch: Batch | None) -> Callable[[Callable[Concatenate[Any, P], R]], Method[P, R, R]]: ...
def method(call: Any = None, *, batch: Any = msgspec.UNSET) -> Any:
    """Mark a method of a `@gpu_function` class as remotely callable. With `batch` its calls are gathered; `batch=None`
    excludes it from the batching of its class.

    >>> @gpu_function
    ... class Greeter:
    ...     @method
    ...     def greet(self, name: str) -> str:
    ...         return f"Hello {name}"
    >>> Greeter().greet("Ada")
    'Hello Ada'
    >>> from gpufn.testing import run_locally
    >>> with run_locally():
    ...     Greeter.greet.remote("Ada")
    'Hello Ada'
    """
    if batch is not msgspec.UNSET and not isinstance(batch, (Batch, type(None))):
        raise InvalidSpec(f"batch is a Batch, such as Batch(max_size=32, max_wait_ms=5), not {batch!r}")
    if call is None:
        return functools.partial(method, batch=batch)
    if batch is not msgspec.UNSET:
        vars(call)[BATCH] = batch
    return _mark(call, "method")


@overload
def exit(hook: F, /) -> F: ...  # noqa: A001  the counterpart of `enter`
@overload
def exit() -> Callable[[F], F]: ...  # noqa: A001
def exit(hook: Any = None, /) -> Any:  # noqa: A001
    """Mark a method that runs when a worker stops, after its last call.

    With a parameter beside `self`, it receives the cause: `"idle"`, `"deploy"`, `"delete"`, `"room"` (another worker
    needs the place), `"max_calls"`, `"stop"` (the platform stops) or `"error"`. All exit methods of a worker together
    have 30 seconds.

    >>> from gpufn.testing import run_locally
    >>> @gpu_function
    ... class Counter:
    ...     count = 0
    ...
    ...     @method
    ...     def add(self) -> int:
    ...         self.count += 1
    ...         return self.count
    ...
    ...     @exit
    ...     def report(self) -> None:
    ...         print("counted to", self.count)
    >>> with run_locally():
    ...     _ = Counter.add.remote(), Counter.add.remote()
    counted to 2
    """
    return _mark(hook, "exit")


@overload
def park(hook: F, /) -> F: ...
@overload
def park() -> Callable[[F], F]: ...
def park(hook: Any = None, /) -> Any:
    """Mark a method that moves the instance's GPU data to host memory when the worker is parked.

    No call runs meanwhile. With a parameter beside `self`, it receives the cause: `"idle"`, `"room"` or `"deploy"`. An
    exception in the method ends the worker. A class does not need this method for its
    `models`, nor for torch modules and tensors in its attributes: without it, gpufn moves them itself.

    >>> @gpu_function(gpu="any")
    ... class Table:
    ...     @enter
    ...     def load(self) -> None:
    ...         self.device, self.host = [1, 2, 3], None
    ...
    ...     @park
    ...     def move_out(self) -> None:
    ...         self.device, self.host = None, self.device
    ...
    ...     @resume
    ...     def move_in(self) -> None:
    ...         self.device, self.host = self.host, None
    ...
    ...     @method
    ...     def at(self, index: int) -> int:
    ...         return self.device[index]
    >>> Table().at(2)
    3
    """
    return _mark(hook, "park")


@overload
def resume(hook: F, /) -> F: ...
@overload
def resume() -> Callable[[F], F]: ...
def resume(hook: Any = None, /) -> Any:
    """Mark a method that moves the data of `@park` back to the GPU. Calls run again after it.

    With a parameter beside `self`, it receives the cause: `"calls"` that wait, or `"capacity"` for later ones. An
    exception in the method ends the worker, and another worker starts cold.

    >>> from gpufn import park, resume
    >>> @gpu_function(park_timeout=3600)
    ... class Cache:
    ...     @park
    ...     def shrink(self) -> None:
    ...         self.entries = {}
    ...
    ...     @resume
    ...     def grow(self) -> None:
    ...         self.entries = {"first": 1}
    ...
    ...     @method
    ...     def size(self) -> int:
    ...         return len(getattr(self, "entries", {}))
    >>> Cache().size()
    0
    """
    return _mark(hook, "resume")


# The public attributes of FunctionClass. Python finds them before the user's methods, so `Class.name.remote()` would
# not reach a method with such a name.
_RESERVED = {name for name in (*dir(FunctionClass), "raw", "settings") if not name.startswith("_")}


def _mark(function: Any, hook: str) -> Any:
    """Mark a method; without one, return the decorator, as `@enter()` needs it."""
    if function is None:
        return functools.partial(_mark, hook=hook)
    if not inspect.isfunction(function):
        raise InvalidSpec(f"@{hook} decorates a plain method, not {function!r}")
    vars(function)[HOOK] = hook
    return function


def declare(target: Any, options: dict[str, Any], *, web: WebSpec | msgspec.UnsetType = msgspec.UNSET) -> Any:
    """Declare a function or a class. `web` is set for a web function. Raises InvalidSpec."""
    if isinstance(target, (Function, FunctionClass)):
        raise InvalidSpec(f"{target.__qualname__} is already a @gpu_function")
    if not inspect.isfunction(target) and not inspect.isclass(target):
        raise InvalidSpec(f"@gpu_function takes a function or a class, not {target!r}")
    if target.__name__ == "<lambda>" and "name" not in options:
        raise InvalidSpec("a lambda has no name: define a function, or set name=...")
    try:
        settings = msgspec.structs.replace(settings_from(options, function_name(target.__name__)), web=web)
        models = settings.declared_models
        methods = _class_methods(target, models) if inspect.isclass(target) else _function_methods(target, models)
        settings.spec(settings.web_methods or methods, is_class=inspect.isclass(target))
    except InvalidSpec as error:
        label = target.__qualname__
        message = error.message.removeprefix(f"{options.get('name') or function_name(target.__name__)}: ")
        raise InvalidSpec(message if message.startswith(label) else f"{label}: {message}") from None
    if inspect.isclass(target):
        return FunctionClass(target, settings)
    return Function(cast("Callable[..., Any]", target), settings)


def _function_methods(function: Callable[..., Any], models: Collection[str]) -> tuple[MethodSpec, ...]:
    *outer, _ = function.__qualname__.split(".")
    if outer and outer[-1] != "<locals>":
        raise InvalidSpec("for a method, put @gpu_function on the class and @method on the method")
    parameters = signature_of(function).parameters
    if missing := [name for name in models if name not in parameters]:
        raise InvalidSpec(f"models: the function has no parameter {missing[0]} to receive the model")
    _check_parameters(list(parameters.values()))
    return (MethodSpec(kind=kind_of(function)),)


def _class_methods(cls: type, models: Collection[str]) -> tuple[MethodSpec, ...]:
    _check_constructor(cls)
    _check_hooks(cls)
    methods = hooks(cls, "method")
    _check_method_names(cls, methods, models)
    for name, function in methods.items():
        try:
            _check_parameters(list(signature_of(function).parameters.values())[1:])
        except InvalidSpec as error:
            raise InvalidSpec(f"{name}: {error.message}") from None
    return tuple(
        MethodSpec(name=name, kind=kind_of(function), batch=vars(function).get(BATCH, msgspec.UNSET))
        for name, function in methods.items()
    )


def _check_constructor(cls: type) -> None:
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    constructor = signature_of(cls).parameters.values()
    if required := [p.name for p in constructor if p.default is p.empty and p.kind not in optional]:
        raise InvalidSpec(
            f"a worker creates the instance without arguments: give {', '.join(required)} of __init__ a default"
        )


def _check_hooks(cls: type) -> None:
    for hook in ("enter", *HOOKS_WITH_CAUSE):
        for name, function in hooks(cls, hook).items():
            number = len(signature_of(function).parameters)
            if hook == "enter" and number != 1:
                raise InvalidSpec(f"@enter {name} takes no parameter but self")
            if number not in (1, 2):
                raise InvalidSpec(f"@{hook} {name} takes self, and the cause if it needs it")
    if bool(hooks(cls, "park")) != bool(hooks(cls, "resume")):
        present, missing = ("park", "resume") if hooks(cls, "park") else ("resume", "park")
        raise InvalidSpec(f"the class has @{present} but no @{missing}: @resume moves back the data that @park moved")


def _check_method_names(cls: type, methods: Collection[str], models: Collection[str]) -> None:
    if taken := [name for name in models if name in methods]:
        raise InvalidSpec(f"models: {taken[0]} is a @method; a model is an attribute of the class, so rename one")
    if taken := sorted(_RESERVED.intersection(methods)):
        raise InvalidSpec(f"{cls.__qualname__}.{taken[0]} is an attribute of gpufn: give the @method another name")
    if special := [name for name in methods if name.startswith("__") and name.endswith("__")]:
        raise InvalidSpec(f"callers use the name of a @method: give {special[0]} a name without double underscores")


def _check_parameters(parameters: list[inspect.Parameter]) -> None:
    """Raise InvalidSpec for parameters without a name: callers over HTTP name their arguments."""
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise InvalidSpec(
                f"*{parameter.name} cannot be passed by name, but callers name their arguments; "
                f"take a list instead, or **{parameter.name}"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise InvalidSpec(f"{parameter.name} is positional only, but callers name their arguments; remove the '/'")
