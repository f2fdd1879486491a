"""Source of a deploy: the file's path in its project, and the deploying user.

A project is the folder that has `.git`, otherwise the folder that has `pyproject.toml`, otherwise the file's own
folder. Its identity is a digest of the URL of the git remote `origin`, which is the same in every clone, or else of the
folder's path.
"""

from __future__ import annotations

import getpass
import hashlib
import re
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpufn.deploy import deployed_code
from gpufn_core.domain.revision import Source

if TYPE_CHECKING:
    from gpufn.deploy.bundle import AnyFunction

_ROOT_MARKS = (".git", "pyproject.toml")
_ORIGIN = re.compile(r'^\[remote "origin"\][^\[]*?^\s*url\s*=\s*(\S+)', re.MULTILINE)
_SCHEME = re.compile(r"^\w[\w+.-]*://")


def source_of(function: AnyFunction) -> Source:
    """Return the Source of a function of this process.

    For a notebook: no file, and the project of the working folder.
    """
    file = getattr(sys.modules.get(function.raw.__module__), "__file__", None)
    if file is None:
        return _source(Path.cwd(), "")
    return msgspec.structs.replace(source_of_file(Path(file)), code=deployed_code.digest_of_function(function))


def source_of_file(file: Path) -> Source:
    path = file.resolve()
    root = project_root(path.parent)
    return _source(root, path.relative_to(root).as_posix())


def _source(folder: Path, file: str) -> Source:
    root = project_root(folder)
    return Source(file=file, project=root.name, project_id=project_id(root), deployer=_deployer())


def project_root(folder: Path) -> Path:
    for mark in _ROOT_MARKS:
        for parent in (folder, *folder.parents):
            if (parent / mark).exists():
                return parent
    return folder


def project_id(root: Path) -> str:
    origin = _origin(root)
    identity = f"folder {root}" if origin is None else f"git {origin}"
    return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _origin(root: Path) -> str | None:
    git = root / ".git"
    try:
        if git.is_file():  # a worktree, or a submodule
            git = (root / git.read_text().partition("gitdir:")[2].strip()).resolve()
            common = git / "commondir"
            git = git / common.read_text().strip() if common.is_file() else git
        match = _ORIGIN.search((git / "config").read_text(errors="replace"))
    except OSError:
        return None
    return None if match is None else normal_remote(match[1])


def normal_remote(url: str) -> str:
    """Normalize a remote's URL, and remove user and password.

    >>> {normal_remote(each) for each in ("git@host:a/b.git", "https://me:secret@host/a/b", "ssh://git@host/a/b.git/")}
    {'host/a/b'}
    """
    address, is_url = _SCHEME.subn("", url)
    host, slash, path = address.partition("/")
    host = host.rpartition("@")[2]
    if not is_url:
        host = host.replace(":", "/", 1)
    return f"{host}{slash}{path}".rstrip("/").removesuffix(".git")


def _deployer() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in a container
        user = "?"
    return f"{user}@{socket.gethostname()}"
