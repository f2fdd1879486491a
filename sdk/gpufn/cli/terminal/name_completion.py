"""Function name arguments with shell completion. Without a gateway there are no completions."""

from __future__ import annotations

import click

from gpufn.cli.terminal.command import Argument, connect
from gpufn_core.errors import GpufnError


def _function_names(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    names = dict.fromkeys(name.partition(".")[0] for name in _callables())
    return [name for name in names if name.startswith(incomplete)]


def _callable_names(context: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in _callables() if name.startswith(incomplete)]


def _callables() -> list[str]:
    """Return the names that can be called: functions, and FUNCTION.METHOD for classes."""
    try:
        with connect() as client:
            views = client.functions()
    except GpufnError:
        return []
    return [
        f"{view.name}.{method['name']}" if method.get("name") else view.name
        for view in views
        for method in view.spec.get("methods", ())
    ]


function_name = click.argument("name", cls=Argument, help="Name of the function.", shell_complete=_function_names)
callable_name = click.argument(
    "name", cls=Argument, help="Name of the function, or FUNCTION.METHOD for a class.", shell_complete=_callable_names
)
