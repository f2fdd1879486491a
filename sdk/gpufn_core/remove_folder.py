"""Removal of a folder whose contents are not trusted.

Removes everything, including folders without permissions and trees deeper than Python's stack or the path limit. Never
follows links, even if another process replaces folders by links meanwhile. Works one level at a time: the subfolders of
a folder are moved up beside it, so that at most three folders are open.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: str | os.PathLike[str]) -> OSError | None:
    """Remove `path` and return the first error, if any. A missing `path` is no error."""
    failure: OSError | None = None
    try:
        with _open_folder(os.fspath(path), None) as top:
            stuck: set[str] = set()
            while names := [name for name in os.listdir(top) if name not in stuck]:
                for name in names:
                    try:
                        _remove(name, top)
                    except OSError as error:
                        stuck.add(name)
                        failure = failure or error
        os.rmdir(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        failure = failure or error
    return failure


def _remove(name: str, top: int) -> None:
    """Remove `name` from the folder `top`. Moves the subfolders of `name` into `top` first."""
    if not _is_folder(name, top):
        return
    with _open_folder(name, top) as folder:
        for inner in os.listdir(folder):
            if _is_folder(inner, folder):
                with _open_folder(inner, folder):  # makes it writable: renaming a folder needs that
                    os.rename(inner, os.urandom(16).hex(), src_dir_fd=folder, dst_dir_fd=top)
    os.rmdir(name, dir_fd=top)


def _is_folder(name: str, within: int) -> bool:
    """Return whether `name` is a folder. Anything else is unlinked."""
    try:
        os.unlink(name, dir_fd=within)
    except FileNotFoundError:
        return False
    except IsADirectoryError:
        return True
    return False


@contextlib.contextmanager
def _open_folder(name: str, within: int | None) -> Iterator[int]:
    """Open a folder and make it accessible to us."""
    try:
        folder = os.open(name, _FOLDER, dir_fd=within)
    except PermissionError:
        path_only = os.open(name, _FOLDER | os.O_PATH, dir_fd=within)
        try:
            os.chmod(f"/proc/self/fd/{path_only}", 0o700)
        finally:
            os.close(path_only)
        folder = os.open(name, _FOLDER, dir_fd=within)
    try:
        with contextlib.suppress(PermissionError):  # another user's folder; we may still be allowed to empty it
            os.fchmod(folder, 0o700)
        yield folder
    finally:
        os.close(folder)
