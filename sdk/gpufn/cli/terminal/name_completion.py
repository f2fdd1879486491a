"""Function name arguments with shell completion. Without a gateway there are no completions."""

from __future__ import annotations

from typing import Annotated

import typer

from gpufn_core.errors import GpufnError


def function_names(incomplete: str) -> list[str]:
    return [
        name
        for name in dict.fromkeys(name.partition(".")[0] for name in callable_names(""))
        if name.startswith(incomplete)
    ]


def callable_names(incomplete: str) -> list[str]:
    """Return the names that can be called: functions, and FUNCTION.METHOD for classes."""
    from gpufn.client.client import Client  # noqa: PLC0415

    try:
        with Client() as client:
            views = client.functions()
    except GpufnError:
        return []
    names = [
        f"{view.name}.{method['name']}" if method.get("name") else view.name
        for view in views
        for method in view.spec.get("methods", ())
    ]
    return [name for name in names if name.startswith(incomplete)]


FunctionName = Annotated[str, typer.Argument(help="Name of the function.", autocompletion=function_names)]
CallableName = Annotated[
    str, typer.Argument(help="Name of the function, or FUNCTION.METHOD for a class.", autocompletion=callable_names)
]
