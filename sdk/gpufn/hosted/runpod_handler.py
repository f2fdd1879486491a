"""A RunPod handler as a function. Its keyword arguments are the `input` of a job."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gpufn
from gpufn.hosted import runpod_module
from gpufn_core.errors import InvalidSpec


class JobFailed(Exception):
    """The handler returned `{"error": ...}`."""


def run_file(path: Path) -> Mapping[str, Any]:
    """Run a file as a script, up to `runpod.serverless.start`; return the configuration given there. Raises InvalidSpec
    and any exception of the file."""
    runpod_module.install()
    try:
        runpy.run_path(str(path), run_name="__main__")
    except runpod_module.Started as started:
        if not isinstance(started.config, Mapping) or not callable(started.config.get("handler")):
            raise InvalidSpec(f'{path.name}: runpod.serverless.start needs {{"handler": function}}') from None
        return started.config
    raise InvalidSpec(f"{path.name} does not call runpod.serverless.start")


def serve(path: Path, module: str) -> Callable[..., Any]:
    """Run a file and return its handler as a function of `module`. Workers call it."""
    return as_function(run_file(path)["handler"], module)


def as_function(handler: Callable[..., Any], module: str) -> Callable[..., Any]:
    """Return a function of the handler's kind."""
    function = _of_kind(handler)
    function.__module__, function.__name__, function.__qualname__ = module, "function", "function"
    function.__doc__ = inspect.getdoc(handler)
    return function


def _of_kind(handler: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(handler):

        async def async_items(**input: Any) -> AsyncIterator[Any]:  # noqa: A002  as in a job
            async for item in handler(_job(input)):
                yield _checked(item)

        return async_items
    if inspect.isgeneratorfunction(handler):

        def items(**input: Any) -> Iterator[Any]:  # noqa: A002
            for item in handler(_job(input)):
                yield _checked(item)

        return items
    if inspect.iscoroutinefunction(handler):

        async def coroutine(**input: Any) -> Any:  # noqa: A002
            return _checked(await handler(_job(input)))

        return coroutine

    def plain(**input: Any) -> Any:  # noqa: A002
        return _checked(handler(_job(input)))

    return plain


def _job(given: dict[str, Any]) -> dict[str, Any]:
    return {"id": gpufn.current().invocation, "input": given}


def _checked(result: Any) -> Any:
    """Return a result without the flags for RunPod's worker. Raises JobFailed for `{"error": ...}`."""
    if isinstance(result, dict):
        if "error" in result:
            raise JobFailed(str(result["error"]))
        if "refresh_worker" in result:
            return {name: value for name, value in result.items() if name != "refresh_worker"}
    return result
