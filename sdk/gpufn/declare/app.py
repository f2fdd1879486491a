"""`App`: functions that are deployed, removed and rolled back together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, overload

from gpufn.declare import web
from gpufn.declare.decorator import Decorator, DecoratorWithModels, gpu_function
from gpufn.declare.function import Function
from gpufn.declare.model import Model
from gpufn.declare.options import PlainOptions
from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.naming.names import check_group

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
C = TypeVar("C", bound=type)


class App:
    """A named group of functions. Two apps may each have a function of the same name. `gpufn deploy app.py --env prod`
    deploys the function below as `prod/search/predict`. Raises InvalidSpec for a wrong name.

    >>> app = App("search")
    >>> @app.function(cpu=2)
    ... def predict(query: str) -> list[str]:
    ...     return [query]
    >>> predict
    <Function search/predict>
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
        if target is not None and options:
            raise InvalidSpec("write @app.function(...) with options only, above the function")
        decorate: Any = gpu_function(**self._options(options))
        return decorate if target is None else decorate(target)

    def asgi_app(self, target: Any = None, /, *, public: bool = False, **options: Any) -> Any:
        """Declare an ASGI application of this app. It takes the options of `gpufn.asgi_app`. Raises InvalidSpec."""
        return _applied(web.asgi_app(public=public, **self._options(options)), target)

    def wsgi_app(self, target: Any = None, /, *, public: bool = False, **options: Any) -> Any:
        """Declare a WSGI application of this app. It takes the options of `gpufn.wsgi_app`. Raises InvalidSpec."""
        return _applied(web.wsgi_app(public=public, **self._options(options)), target)

    def web_endpoint(
        self, target: Any = None, /, *, methods: Sequence[str] = ("GET",), public: bool = False, **options: Any
    ) -> Any:
        """Declare an endpoint of this app. It takes the options of `gpufn.web_endpoint`. Raises InvalidSpec."""
        return _applied(web.web_endpoint(methods=methods, public=public, **self._options(options)), target)

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        if "app" in options:
            raise InvalidSpec(f"the function belongs to the app {self.name}: remove app=...")
        return {**options, "app": self.name}

    def __repr__(self) -> str:
        return f"<App {self.name}>"


def _applied(decorate: Callable[[Any], Any], target: Any) -> Any:
    """Return the decorator, or its result for `target` if it stands above the function without parentheses."""
    return decorate if target is None else decorate(target)
