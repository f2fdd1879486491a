"""The functions there are, for a shell that completes what is typed. Where no gateway tells them there are none."""

from __future__ import annotations

from gpufn.errors import GpufnError


def function_names(incomplete: str) -> list[str]:
    return [
        name
        for name in dict.fromkeys(name.partition(".")[0] for name in callable_names(""))
        if name.startswith(incomplete)
    ]


def callable_names(incomplete: str) -> list[str]:
    """A class's are those of its methods."""
    from gpufn._client import Client  # noqa: PLC0415

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
