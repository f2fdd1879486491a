"""`gpufn volume put`, `get`, `ls`, `versions`, `rm`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from gpufn.cli.data.short_names import full_name, name_for_writing
from gpufn.cli.terminal.command import PATH, Argument, Group, IntRange, connect, json_option, yes_option
from gpufn.cli.terminal.output import WrongUsage, ago, confirm, print_json, print_table, say_or_json
from gpufn.volumes.progress import Progress
from gpufn_core.spec.units import format_bytes
from gpufn_core.spec.volume_spec import EXECUTABLE

app = Group("volume", help="Copy files to and from volumes, and list and delete them.")

_name_argument = click.argument("name", cls=Argument, help="Name of the volume, such as prod/search/models or models.")
_version_option = click.option("--version", type=IntRange(1), help="Number of the version. Default: the newest.")


@app.command()
@_name_argument
@click.argument("source", cls=Argument, type=PATH, help="File or folder to copy.")
@click.option("--to", default="", help="Folder in the volume, or path of the file. Default: the top of the volume.")
@click.option("--replace", is_flag=True, help="Remove what else is in that folder of the volume.")
@json_option
def put(name: str, source: Path, to: str, replace: bool, json: bool) -> None:
    """Copy a file or a folder into a volume.

    All files become visible at once, as a new version. Files that the platform has already are not sent again, so an
    interrupted copy can be repeated. Running workers keep their version; new ones read the new version.
    """
    with connect() as client, _progress("sending") as progress:
        name = name_for_writing(client, name, client.volumes)
        version = client.put_files(name, source, to, replace=replace, progress=progress)
    sent = f"sent {_files(progress.sent_files)}, {format_bytes(progress.sent_bytes)}"
    done = f"{name} version {version.number}: {_files(version.files)}, {format_bytes(version.bytes)}; {sent}"
    say_or_json(done, version, json=json)


@app.command()
@_name_argument
@click.argument("path", cls=Argument, default="", help="File or folder in the volume. Default: `.`, all files.")
@click.option("--to", type=PATH, default=Path("."), help="Folder to copy to. Default: the working folder.")
@_version_option
@json_option
def get(name: str, path: str, to: Path, version: int | None, json: bool) -> None:
    """Copy files of a volume to this machine.

    Equal files that are there already are not copied again, so an interrupted copy can be repeated. Files of the same
    name with other contents are replaced, and other files stay.
    """
    if to.exists() and not to.is_dir():
        raise WrongUsage(f"{to} is a file: name a folder to copy to", field="--to")
    with connect() as client, _progress("fetching") as progress:
        name = full_name(client, name, client.volumes)
        tree = client.get_files(name, to, path, version=version, progress=progress)
    fetched = f"fetched {progress.sent_files}, {format_bytes(progress.sent_bytes)}"
    say_or_json(f"{to} has {_files(len(tree.files))} of {name} version {tree.version}; {fetched}", tree, json=json)


@app.command("ls")
@click.argument("name", cls=Argument, required=False, help="Name of a volume. Default: list the volumes.")
@_version_option
@json_option
def list_volumes(name: str | None, version: int | None, json: bool) -> None:
    """List the volumes, or the files of a volume."""
    with connect() as client:
        if name is not None:
            name = full_name(client, name, client.volumes)
            tree = client.volume_tree(name, version)
        else:
            volumes = client.volumes()
    if name is not None:
        if json:
            print_json(tree)
            return
        files = [(file.path, format_bytes(file.size), "x" if file.mode == EXECUTABLE else "") for file in tree.files]
        print_table(("file", "size", ""), files, empty=f"{name} version {tree.version} has no files")
        return
    if json:
        print_json(volumes)
        return
    rows = [
        (
            each.name,
            str(each.newest.number),
            str(each.newest.files),
            format_bytes(each.newest.bytes),
            format_bytes(each.stored_bytes),
            ago(each.newest.created_at),
        )
        for each in volumes
    ]
    headings = ("name", "version", "files", "size", "stored", "updated")
    print_table(headings, rows, empty="no volumes: see `gpufn volume put --help`")


@app.command()
@_name_argument
@json_option
def versions(name: str, json: bool) -> None:
    """List the kept versions of a volume, newest first."""
    with connect() as client:
        record = client.volume(full_name(client, name, client.volumes))
    if json:
        print_json(record)
        return
    rows = [
        (str(each.number), str(each.files), format_bytes(each.bytes), ago(each.created_at))
        for each in reversed(record.versions)
    ]
    print_table(("version", "files", "size", "created"), rows, empty="no versions")


@app.command("rm")
@_name_argument
@click.argument("paths", cls=Argument, nargs=-1, help="Files to remove; a slash at the end means a folder.")
@yes_option
@json_option
def remove(name: str, paths: tuple[str, ...], yes: bool, json: bool) -> None:
    """Remove files from a volume, or delete the volume.

    Earlier versions keep removed files. A deleted volume is gone with all versions; running workers keep their files.
    """
    with connect() as client:
        name = full_name(client, name, client.volumes)
        if paths:
            version = client.commit_volume(name, remove=paths)
            say_or_json(f"{name} version {version.number}: {version.files} files", version, json=json)
            return
        confirm(f"Delete the volume {name} with all of its versions?", yes=yes)
        client.delete_volume(name)
    say_or_json(f"deleted the volume {name}", {"deleted": name}, json=json)


@contextlib.contextmanager
def _progress(verb: str) -> Iterator[Progress]:
    """Show the progress of a copy at a terminal."""
    is_shown = sys.stderr.isatty()
    shown = ""

    def report(done: int, total: int) -> None:
        nonlocal shown
        text = f"{verb} {format_bytes(done)} of {format_bytes(total)}"
        if is_shown and text != shown:
            shown = text
            sys.stderr.write(f"\r{text}\033[K")
            sys.stderr.flush()

    try:
        yield Progress(report)
    finally:
        if is_shown and shown:
            sys.stderr.write("\r\033[K")


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"
