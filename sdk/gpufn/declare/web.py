"""`@asgi_app`, `@wsgi_app` and `@web_endpoint`: functions that serve their own HTTP requests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, ParamSpec, Protocol, TypeVar, Unpack, overload

from gpufn.call.remote import kind_of
from gpufn.declare.decorator import Decorator, declare
from gpufn.declare.function import Function
from gpufn.declare.hints.type_hints import signature_of
from gpufn.declare.options import PlainOptions
from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.function_spec import CallKind
from gpufn_core.spec.web_spec import WebKind, WebSpec

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# The requests and WebSockets that one worker serves at once, unless `concurrency` is set. Each request to a WSGI
# application needs a thread.
_CONCURRENCY: Final = {WebKind.ASGI: 100, WebKind.WSGI: 16}


class AppDecorator(Protocol):
    """The decorator for a function without parameters that returns a web application."""

    def __call__(self, target: Callable[[], T], /) -> Function[[], T, T]: ...


@overload
def asgi_app(target: Callable[[], T], /) -> Function[[], T, T]: ...
@overload
def asgi_app(*, public: bool = False, **options: Unpack[PlainOptions]) -> AppDecorator: ...
def asgi_app(target: Any = None, /, *, public: bool = False, **options: Any) -> Any:
    """Declare a function that returns an ASGI application, such as one of FastAPI, Starlette or Gradio.

    A worker calls the function once, when it starts. The application then serves requests and WebSockets at
    `/web/{env}/{app}/{function}/`. `concurrency` is how many of them one worker serves at once, 100 by default. Without
    `public=True` each request needs an API key. It also takes the options of `gpu_function`. Raises InvalidSpec.

    >>> async def app(scope, receive, send): ...
    >>> @asgi_app(public=True)
    ... def site():
    ...     return app
    >>> site.name, callable(site())
    ('site', True)
    """
    return _app(WebKind.ASGI, target, public, options)


@overload
def wsgi_app(target: Callable[[], T], /) -> Function[[], T, T]: ...
@overload
def wsgi_app(*, public: bool = False, **options: Unpack[PlainOptions]) -> AppDecorator: ...
def wsgi_app(target: Any = None, /, *, public: bool = False, **options: Any) -> Any:
    """Declare a function that returns a WSGI application, such as one of Flask or Django.

    It is like `asgi_app`, but without WebSockets. Each request takes a thread; `concurrency` is 16 by default.

    >>> def app(environ, start_response): ...
    >>> @wsgi_app
    ... def site():
    ...     return app
    >>> site
    <Function site>
    """
    return _app(WebKind.WSGI, target, public, options)


@overload
def web_endpoint(target: Callable[P, R], /) -> Function[P, R, R]: ...
@overload
def web_endpoint(
    *, methods: Sequence[str] = ("GET",), public: bool = False, **options: Unpack[PlainOptions]
) -> Decorator: ...
def web_endpoint(
    target: Any = None, /, *, methods: Sequence[str] = ("GET",), public: bool = False, **options: Any
) -> Any:
    """Declare a function that HTTP requests call at `/web/{env}/{app}/{function}/`.

    Its arguments are the query parameters, a JSON object, or the fields of a form. `methods` are the HTTP methods that
    it serves. It can also be called like any other function. Without `public=True` each request needs an API key. It
    also takes the options of `gpu_function`. Raises InvalidSpec.

    >>> @web_endpoint(methods=["GET", "POST"])
    ... def area(width: float, height: float = 1.0) -> float:
    ...     return width * height
    >>> area(3.0)
    3.0
    """
    if isinstance(methods, str) or not all(isinstance(method, str) for method in methods):
        raise InvalidSpec(f"methods is a list of HTTP methods, such as ['GET', 'POST'], not {methods!r}")
    web = WebSpec(WebKind.ENDPOINT, _checked(public), tuple(dict.fromkeys(method.upper() for method in methods)))
    return (
        declare(target, options, web=web) if target is not None else lambda each: declare(each, dict(options), web=web)
    )


def _app(kind: WebKind, target: Any, public: bool, options: dict[str, Any]) -> Any:
    web = WebSpec(kind, _checked(public))
    options = {"concurrency": _CONCURRENCY[kind], **options}

    def decorate(target: Any) -> Any:
        decorator = f"@{kind.value}_app"
        if inspect.isclass(target) or not inspect.isfunction(target):
            raise InvalidSpec(f"{decorator} takes a function that returns the application, not {target!r}")
        if signature_of(target).parameters:
            raise InvalidSpec(f"{target.__qualname__}: a worker calls it without arguments: remove its parameters")
        if kind_of(target) is not CallKind.SYNC:
            raise InvalidSpec(f"{target.__qualname__}: write a plain function that returns the application")
        return declare(target, options, web=web)

    return decorate if target is None else decorate(target)


def _checked(public: Any) -> bool:
    if not isinstance(public, bool):
        raise InvalidSpec(f"public is True or False, not {public!r}")
    return public
