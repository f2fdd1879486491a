"""`gpufn deploy FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpufn.cli._render import Json, print_json, say, size, step
from gpufn.errors import FunctionNotFound, InvalidSpec

if TYPE_CHECKING:
    from gpufn import _bundle
    from gpufn._views import FunctionView
    from gpufn.spec import FunctionSpec


def deploy(  # noqa: PLR0917  Typer passes them by name
    file: Annotated[Path, typer.Argument(help="A Python file with @gpu_function in it.")],
    name: Annotated[list[str] | None, typer.Option(help="Deploy only this one; may be given again.")] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(help="Send these files too: a glob below the file's folder, such as 'data/*'."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return when calls go to the new revision, or at once.")
    ] = True,
    timeout: Annotated[
        float | None, typer.Option(help="Wait so many seconds; else the function's startup_timeout.", min=0)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="A new revision even when nothing changed.")] = False,
    json: Json = False,
) -> None:
    """Deploy the functions of a file.

    The file and the modules beside it that it imports are sent; other files only with --include. While a worker of the
    old revision is warm, calls stay there until the new one has a worker too; one that cannot start takes no calls.
    """
    from gpufn import _bundle, _deployment  # noqa: PLC0415
    from gpufn._client import Client  # noqa: PLC0415

    with step(f"Importing {file}"):
        functions = _chosen(_bundle.load(file).functions, name or [], file)
        prepared = [
            (function.spec(packaging, bundle.modules), bundle)
            for function, packaging, bundle in _bundle.bundles_of(functions, include or [])
        ]
    made = []
    with Client() as client:
        for spec, bundle in prepared:
            with step(f"Deploying {spec.name}, {size(len(bundle.data))}"):
                deployment = _deployment.deploy(client, spec, bundle.digest, bundle.data, force=force)
            if deployment.lacking:
                say(f"gpufn: warning: calls of {spec.name} will wait: {deployment.lacking}", err=True)
            made.append((spec, deployment))
        views = []
        for spec, deployment in made:
            view = deployment.view
            if wait and view.serving != view.active:
                patience_s = spec.startup_timeout_s if timeout is None else timeout
                with step(f"Starting {spec.name}@{view.active}") as tell:
                    view = _deployment.wait_until_it_serves(client, view, patience_s, told=tell)
            views.append(view)
            if not json:
                _say(spec, view, client.url, is_new=deployment.is_new)
    if json:
        print_json(views)


def _say(spec: FunctionSpec, view: FunctionView, url: str, *, is_new: bool) -> None:
    notes = "" if is_new else "  unchanged"
    if view.serving != view.active:
        notes += f"  {view.serving} serves until it is ready"
    for method in spec.methods:
        call = f"{spec.name}.{method.name}" if method.name else spec.name
        say(f"{spec.name}@{view.active}  {url}/v1/functions/{call}/invoke{notes}")


def _chosen(functions: list[_bundle.AnyFunction], names: list[str], file: Path) -> list[_bundle.AnyFunction]:
    if not functions:
        raise InvalidSpec(f"{file} declares no @gpu_function")
    by_name: dict[str, _bundle.AnyFunction] = {}
    for function in functions:
        if by_name.setdefault(function.name, function) is not function:
            raise InvalidSpec(f"{file} declares two functions that are deployed as {function.name}: give one name=...")
    wanted = [wanted.replace("_", "-") for wanted in names] or list(by_name)
    if missing := [one for one in wanted if one not in by_name]:
        raise FunctionNotFound(f"{file} declares no {missing[0]}; it has {', '.join(by_name)}")
    return [by_name[one] for one in wanted]
