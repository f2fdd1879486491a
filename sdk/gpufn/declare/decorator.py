"""`@gpu_function`, and the marks of a class's methods: `@enter`, `@method`, `@park`, `@resume`, `@exit`.

Decoration checks what can be checked without resolving type hints (`_schema` does that, at deploy), because workers
decorate again at every cold start.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack, cast, overload

from gpufn.call.remote import kind_of
from gpufn.declare.function import Function, FunctionClass, Method
from gpufn.declare.hooks import HOOK, hooks
from gpufn.declare.model import Model
from gpufn.declare.options import PlainOptions, settings_from, signature
from gpufn.declare.type_hints import signature_of
from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.function_spec import MethodSpec, function_name

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
    """Nobody gives the parameters that receive models, and no type says `all parameters but these`."""

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
    """Make a function, or a class, one that gpufn can run elsewhere. Called as before, it still runs here.

    Its options, each with type, default and meaning, are a table in docs/reference/python.md.

    Raises InvalidSpec, which names the option.

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
        settings_from(options, "unnamed")  # so that a wrong option is reported at its own line
        return lambda target: _declare(target, options)
    if options:
        raise InvalidSpec("write @gpu_function(...) with options only; the function comes below it")
    return _declare(target, {})


vars(gpu_function)["__signature__"] = signature()


def enter(hook: F) -> F:
    """Mark a method that runs once when a worker starts, before its first call: load the model here.

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
def method(call: Any) -> Any:
    """Mark a method of a `@gpu_function` class that can be called from outside.

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
    return _mark(call, "method")


def exit(hook: F) -> F:  # noqa: A001  named as its siblings are elsewhere
    """Mark a method that runs when a worker stops, after its last call.

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
    ...     def tell(self) -> None:
    ...         print("counted to", self.count)
    >>> with run_locally():
    ...     _ = Counter.add.remote(), Counter.add.remote()
    counted to 2
    """
    return _mark(hook, "exit")


def park(hook: F) -> F:
    """Mark a method that moves what the instance has on its GPU to the memory of the host, when its worker is parked.

    A class without it needs none for torch modules and tensors in its attributes, nor for its `models`: gpufn moves
    them. No call runs meanwhile. What it raises ends the worker.

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


def resume(hook: F) -> F:
    """Mark a method that moves back to the GPU what `@park` moved out; then calls run again.

    What it raises ends the worker, and another one is started cold.

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


# What a FunctionClass has itself, which is found before the user's methods: `Class.name.remote()` would not reach one.
_OURS = {name for name in (*dir(FunctionClass), "raw", "settings") if not name.startswith("_")}


def _mark(function: F, hook: str) -> F:
    if not inspect.isfunction(function):
        raise InvalidSpec(f"@{hook} marks a plain method, not {function!r}")
    vars(function)[HOOK] = hook
    return function


def _declare(target: Any, options: dict[str, Any]) -> Any:
    if isinstance(target, (Function, FunctionClass)):
        raise InvalidSpec(f"{target.__qualname__} is a @gpu_function already")
    if not inspect.isfunction(target) and not inspect.isclass(target):
        raise InvalidSpec(f"@gpu_function takes a function or a class, not {target!r}")
    if target.__name__ == "<lambda>" and "name" not in options:
        raise InvalidSpec("a lambda has no name: define a function, or give it one by name=...")
    try:
        settings = settings_from(options, function_name(target.__name__))
        models = settings.declared_models
        methods = _class_methods(target, models) if inspect.isclass(target) else _function_methods(target, models)
        settings.spec(methods, is_class=inspect.isclass(target))
    except InvalidSpec as error:
        label = target.__qualname__
        told = error.message.removeprefix(f"{options.get('name') or function_name(target.__name__)}: ")
        raise InvalidSpec(told if told.startswith(label) else f"{label}: {told}") from None
    if inspect.isclass(target):
        return FunctionClass(target, settings)
    return Function(cast("Callable[..., Any]", target), settings)


def _function_methods(function: Callable[..., Any], models: Collection[str]) -> tuple[MethodSpec, ...]:
    *outer, _ = function.__qualname__.split(".")
    if outer and outer[-1] != "<locals>":
        raise InvalidSpec("for a method, put @gpu_function on the class and @method on the method")
    parameters = signature_of(function).parameters
    if missing := [name for name in models if name not in parameters]:
        raise InvalidSpec(f"models: it has no parameter {missing[0]} to receive the model")
    _check_parameters(list(parameters.values()))
    return (MethodSpec(kind=kind_of(function)),)


def _class_methods(cls: type, models: Collection[str]) -> tuple[MethodSpec, ...]:
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    constructor = signature_of(cls).parameters.values()
    if needed := [p.name for p in constructor if p.default is p.empty and p.kind not in optional]:
        raise InvalidSpec(f"a worker makes it without arguments: give {', '.join(needed)} of __init__ a default")
    for hook in ("enter", "exit", "park", "resume"):
        for name, function in hooks(cls, hook).items():
            if len(signature_of(function).parameters) != 1:
                raise InvalidSpec(f"@{hook} {name} takes self only")
    if bool(hooks(cls, "park")) != bool(hooks(cls, "resume")):
        there, lacking = ("park", "resume") if hooks(cls, "park") else ("resume", "park")
        raise InvalidSpec(f"it has @{there} and no @{lacking}: what one moves the other moves back")
    methods = hooks(cls, "method")
    if taken := [name for name in models if name in methods]:
        raise InvalidSpec(f"models: {taken[0]} is a @method; a class receives a model as an attribute of its own")
    if taken := sorted(methods.keys() & _OURS):
        raise InvalidSpec(f"{cls.__qualname__}.{taken[0]} is not the @method but gpufn's own: give it another name")
    if special := [name for name in methods if name.startswith("__") and name.endswith("__")]:
        raise InvalidSpec(f"callers use a @method's name: give {special[0]} one without underscores")
    for name, function in methods.items():
        try:
            _check_parameters(list(signature_of(function).parameters.values())[1:])
        except InvalidSpec as error:
            raise InvalidSpec(f"{name}: {error.message}") from None
    return tuple(MethodSpec(name=name, kind=kind_of(function)) for name, function in methods.items())


def _check_parameters(parameters: list[inspect.Parameter]) -> None:
    """Callers over HTTP name their arguments, so each parameter needs a name that they can use."""
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise InvalidSpec(
                f"*{parameter.name} has no names that a caller could use; take a list instead, or **{parameter.name}"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise InvalidSpec(f"{parameter.name} is positional only, but callers name their arguments; remove the '/'")
