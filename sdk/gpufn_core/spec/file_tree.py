"""Trees of files: weights, and versions of volumes. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from gpufn_core.errors import InvalidSpec

LONGEST_PATH: Final = 500  # bytes
LONGEST_PART: Final = 240  # bytes; file systems allow 255, and a file that is being fetched has a longer name


class TreeFile(Protocol):
    """One file of a tree. `digest` is its sha256, or "" if only its etag is known."""

    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def digest(self) -> str: ...


class FileTree(Protocol):
    """A tree of files that nodes fetch and keep: weights, or one version of a volume.

    `title` names it in messages, `source` is its origin. `digest` is the address of its content. `key` is the name of a
    file's content on a node's disk, and `sizes` the size of each content. With `is_file`, it is one file.
    """

    @property
    def title(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def commit(self) -> str: ...
    @property
    def is_file(self) -> bool: ...
    @property
    def files(self) -> Sequence[TreeFile]: ...
    @property
    def digest(self) -> str: ...
    @property
    def sizes(self) -> dict[str, int]: ...
    @property
    def size(self) -> int: ...
    def key(self, file: TreeFile, /) -> str: ...


def digest_of_tree(tree: FileTree) -> str:
    """Return the address of the content: equal for equal files, independent of their origin."""
    lines = sorted(f"{tree.key(file)} {file.size} {file.path}\n" for file in tree.files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def sizes_of_tree(tree: FileTree) -> dict[str, int]:
    """Return the size of each content, by key."""
    return {tree.key(file): file.size for file in tree.files}


def check_path(path: str, what: str) -> None:
    """Raise InvalidSpec unless `path` is relative, with forward slashes, and stays inside the folder of `what`."""
    parts = path.split("/")
    if any(part in ("", ".", "..") or len(part.encode(errors="replace")) > LONGEST_PART for part in parts):
        raise InvalidSpec(f"{what}: {path[:120]!r} is not a relative path inside the folder of the {what}")
    if set(path) & set("\\\0") or len(path.encode(errors="replace")) > LONGEST_PATH or not path.isprintable():
        raise InvalidSpec(f"{what}: the path {path[:120]!r} has characters that no file of {what} may have")


def check_paths(source: str, paths: Sequence[str], what: str) -> None:
    """Raise InvalidSpec if a tree names a file twice, or as a folder too."""
    files = set(paths)
    if len(files) < len(paths):
        raise InvalidSpec(f"{what}: {source} names a file twice")
    for path in paths:
        if any(folder in files for folder in folders_of(path)):
            raise InvalidSpec(f"{what}: {source}: a file and a folder have the same name in {path}")


def folders_of(path: str) -> Iterable[str]:
    """Return the folders that a path goes through.

    >>> list(folders_of("a/b/c.bin"))
    ['a', 'a/b']
    """
    parts = path.split("/")
    return ("/".join(parts[:depth]) for depth in range(1, len(parts)))
