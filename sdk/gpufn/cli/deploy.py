"""`gpufn deploy FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpufn.cli._render import Json, print_json, say, size, step
from gpufn.errors import FunctionNotFound, InvalidSpec

if TYPE_CHECKING:
    from gpufn import _bundle


def deploy(
    file: Annotated[Path, typer.Argument(help="A Python file with @gpu_function in it.")],
    name: Annotated[list[str] | None, typer.Option(help="Deploy only this one; may be given again.")] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(help="Send these files too: a glob below the file's folder, such as 'data/*'."),
    ] = None,
    json: Json = False,
) -> None:
    """Deploy the functions of a file.

    The file and the modules beside it that it imports are sent; other files only with --include.
    """
    from gpufn import _bundle  # noqa: PLC0415
    from gpufn._client import Client  # noqa: PLC0415

    with step(f"Importing {file}"):
        functions = _chosen(_bundle.load(file).functions, name or [], file)
        prepared = [
            (function.spec(packaging, bundle.modules), bundle)
            for function, packaging, bundle in _bundle.bundles_of(functions, include or [])
        ]
    deployed = []
    with Client() as client:
        for spec, bundle in prepared:
            with step(f"Uploading {size(len(bundle.data))}"):
                client.put_bundle(bundle.digest, bundle.data)
            with step(f"Deploying {spec.name}"):
                view = client.create_revision(spec, bundle.digest)
            deployed.append(view)
            if not json:
                calls = [f"{spec.name}.{method.name}" if method.name else spec.name for method in spec.methods]
                for call in calls:
                    say(f"{spec.name}@{view.active}  {client.url}/v1/functions/{call}/invoke")
    if json:
        print_json(deployed)


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
