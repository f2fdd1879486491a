"""Remove a folder that somebody else has filled.

Whatever is there goes, folders that were closed and those that lie deeper than Python's stack or a path may be; and
nothing of what links point to, though somebody change folders into links meanwhile. One level at a time: what folders a
folder has are moved up beside it, so that no more than two are ever open.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: str | os.PathLike[str]) -> OSError | None:
    """What keeps it, when something does. Absent is fine."""
    failure: OSError | None = None
    try:
        with _opened(os.fspath(path), None) as top:
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
    """What it has of folders is in `top` then."""
    if not _is_folder(name, top):
        return
    with _opened(name, top) as folder:
        for inner in os.listdir(folder):
            if _is_folder(inner, folder):
                with _opened(inner, folder):  # ours to move
                    os.rename(inner, os.urandom(16).hex(), src_dir_fd=folder, dst_dir_fd=top)
    os.rmdir(name, dir_fd=top)


def _is_folder(name: str, within: int) -> bool:
    """What is none is gone."""
    try:
        os.unlink(name, dir_fd=within)
    except FileNotFoundError:
        return False
    except IsADirectoryError:
        return True
    return False


@contextlib.contextmanager
def _opened(name: str, within: int | None) -> Iterator[int]:
    try:
        folder = os.open(name, _FOLDER, dir_fd=within)
    except PermissionError:
        closed = os.open(name, _FOLDER | os.O_PATH, dir_fd=within)
        try:
            os.chmod(f"/proc/self/fd/{closed}", 0o700)
        finally:
            os.close(closed)
        folder = os.open(name, _FOLDER, dir_fd=within)
    try:
        with contextlib.suppress(PermissionError):  # not ours, but perhaps ours to empty
            os.fchmod(folder, 0o700)
        yield folder
    finally:
        os.close(folder)
