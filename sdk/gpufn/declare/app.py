"""`App`: functions that are deployed, removed and rolled back together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from gpufn.declare.decorator import Decorator, DecoratorWithModels, gpu_function
from gpufn.declare.function import Function
from gpufn.declare.model import Model
from gpufn.declare.options import PlainOptions
from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.names import check_group

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
C = TypeVar("C", bound=type)


class App:
    """A named group of functions. Two apps may each have a function of the same name.

    >>> app = App("search")
    >>> @app.function(cpu=2)
    ... def predict(query: str) -> list[str]:
    ...     return [query]
    >>> predict
    <Function search/predict>

    `gpufn deploy app.py --env prod` deploys it as `prod/search/predict`. Raises InvalidSpec for a wrong name.
    """

    def __init__(self, name: str) -> None:
        check_group("app", name)
        self.name = name

    @overload
    def function(self, target: C, /) -> C: ...  # type: ignore[overload-overlap]
    @overload
    def function(self, target: Callable[P, Coroutine[Any, Any, T]], /) -> Function[P, Coroutine[Any, Any, T], T]: ...
    @overload
    def function(self, target: Callable[P, AsyncIterator[T]], /) -> Function[P, AsyncIterator[T], list[T]]: ...
    @overload
    def function(self, target: Callable[P, Iterator[T]], /) -> Function[P, Iterator[T], list[T]]: ...
    @overload
    def function(self, target: Callable[P, R], /) -> Function[P, R, R]: ...
    @overload
    def function(self, *, models: Mapping[str, Model], **options: Unpack[PlainOptions]) -> DecoratorWithModels: ...
    @overload
    def function(self, **options: Unpack[PlainOptions]) -> Decorator: ...
    def function(self, target: Any = None, /, **options: Any) -> Any:  # type: ignore[misc]
        """Declare a function or a class of this app. It takes the options of `gpu_function`. Raises InvalidSpec."""
        if "app" in options:
            raise InvalidSpec(f"the function belongs to the app {self.name}: remove app=...")
        if target is not None and options:
            raise InvalidSpec("write @app.function(...) with options only, above the function")
        decorate: Any = gpu_function(**{**options, "app": self.name})
        return decorate if target is None else decorate(target)

    def __repr__(self) -> str:
        return f"<App {self.name}>"
