"""`gpufn init [TEMPLATE] [FOLDER]`."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Final

import click

from gpufn.cli.terminal.command import PATH, Argument, Command
from gpufn.cli.terminal.output import WrongUsage, say

TEMPLATES: Final = ("function", "model", "map", "web")


@click.command(cls=Command)
@click.argument(
    "template",
    cls=Argument,
    type=click.Choice(TEMPLATES),
    default="function",
    help="function; model, with an ONNX model; map, over many items; or web, a page and an endpoint. "
    "Default: function.",
)
@click.argument("folder", cls=Argument, type=PATH, required=False, help="New folder. Default: my-TEMPLATE.")
def init(template: str, folder: Path | None) -> None:
    """Make a project folder.

    It has app.py, a test that passes, README.md and pyproject.toml. The command needs no network, and overwrites no
    file.
    """
    folder = folder or Path(f"my-{template}")
    files = template_files(template, project_name(folder.absolute().name))
    if existing := [name for name in files if (folder / name).exists()]:
        raise WrongUsage(f"{folder} has {', '.join(sorted(existing))} already: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        with (folder / name).open("xb") as file:
            file.write(data)
    say(f"made {folder}: {', '.join(sorted(files))}")
    say(f"next: cd {folder} && gpufn serve app.py")


def project_name(folder: str) -> str:
    """Return a project's name for a folder.

    >>> project_name("My project"), project_name("...")
    ('my-project', 'app')
    """
    return re.sub(r"[^a-z0-9]+", "-", folder.lower()).strip("-") or "app"


def template_files(template: str, name: str) -> dict[str, bytes]:
    """Return the files of a template by name. Sources have the suffix .txt in the package, so that no tool imports
    them."""
    folder = resources.files("gpufn.cli.develop") / "templates" / template
    files = {each.name.removesuffix(".txt"): each.read_bytes() for each in folder.iterdir() if each.is_file()}
    return {
        file: data.replace(b"NAME", name.encode()) if file.endswith((".md", ".toml")) else data
        for file, data in files.items()
    }
