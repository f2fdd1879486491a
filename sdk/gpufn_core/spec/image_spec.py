"""The Python, packages and files of a worker: ImageSpec, a part of FunctionSpec. Frozen and self-validating.

With a lock it can be an environment of a process; otherwise, or with more than packages, it is a container's image.

Its names reach package managers and a build file on the nodes, so each is restricted to the characters that it needs.
"""

from __future__ import annotations

import hashlib
import posixpath
import re

import msgspec

from gpufn_core.errors import InvalidSpec
from gpufn_core.ids import is_digest

FILES_FOLDER = ".image"  # in the bundle; holds the image's files, each named by its digest

PYTHON = re.compile(r"3\.(1[1-9]|[2-9]\d)")
BASE = re.compile(r"[a-z0-9][a-z0-9._:/-]{0,200}(@sha256:[0-9a-f]{64})?")
APT = re.compile(r"[a-z0-9][a-z0-9+.-]{1,100}(=[A-Za-z0-9.+:~-]{1,100})?")
# A requirement in pip's syntax: name, extras, version, or `name @ https://...`; never an option.
PIP = re.compile(r"[A-Za-z0-9][\w.\[\], <>=!~;'\"@:/+*()%#&?=-]{0,500}", re.ASCII)
PATH = re.compile(r"/[\w./+@-]{1,500}", re.ASCII)  # no `$`, which a build file would expand
MAX_PACKAGES = 500
MAX_FILES = 500
MACHINES = ("x86_64", "aarch64")
MAX_COMMANDS = 50
MAX_CUDA = 1000
COMMAND = re.compile(r"[^\0\r\n]{1,2000}")  # one line


class ImageFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A user's file at `path` in the image. Its bytes are in the bundle, by digest."""

    path: str
    digest: str

    def __post_init__(self) -> None:
        if PATH.fullmatch(self.path) is None or posixpath.normpath(self.path) != self.path:
            raise InvalidSpec(f"image: {self.path[:120]!r} is not a file's absolute path in the image")
        if not is_digest(self.digest):
            raise InvalidSpec(f"image: {self.digest[:80]!r} is not a digest")


class ImageSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A container image: `python` selects the node's base image of that version, `base` an image by name. Exactly one
    of the two is set.

    `lock` is the digest of a requirements file, which is installed unchanged. `locked` is the digest of the file that a
    deploy resolved: all packages with their versions and hashes, for `machine`. It replaces `pip` and `lock`. `cuda` is
    the major version of the CUDA libraries among them, 0 if there are none. `builds` allows packages without a wheel,
    whose build runs their code. `commands` run after the packages are installed.

    >>> ImageSpec(python="3.12", pip=("numpy>=2",)).digest[:12]
    '80681d06d821'
    >>> ImageSpec(python="3.12", pip=("--pre",))
    Traceback (most recent call last):
        ...
    gpufn.errors.InvalidSpec: image: '--pre' is not a requirement that pip installs, such as 'torch>=2'
    """

    python: str = ""
    base: str = ""
    apt: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    lock: str = ""
    files: tuple[ImageFile, ...] = ()
    locked: str = ""
    machine: str = ""
    cuda: int = 0
    builds: bool = False
    commands: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.python) == bool(self.base):
            raise InvalidSpec("image: give the version of Python or the name of a base image, and not both")
        if self.python and PYTHON.fullmatch(self.python) is None:
            raise InvalidSpec(
                f"image: Python {self.python[:20]!r}: gpufn needs 3.11 or newer; write for example '3.12'"
            )
        if self.base and BASE.fullmatch(self.base) is None:
            raise InvalidSpec(f"image: {self.base[:120]!r} is not the name of an image")
        for name in self.apt:
            if APT.fullmatch(name) is None:
                raise InvalidSpec(f"image: {name[:120]!r} is not a package that apt installs, such as 'libgl1'")
        for name in self.pip:
            if PIP.fullmatch(name) is None:
                raise InvalidSpec(f"image: {name[:120]!r} is not a requirement that pip installs, such as 'torch>=2'")
        for digest in filter(None, (self.lock, self.locked)):
            if not is_digest(digest):
                raise InvalidSpec(f"image: {digest[:80]!r} is not a digest")
        self._check_lock()
        self._check_commands()
        if len(self.apt) + len(self.pip) > MAX_PACKAGES or len(self.files) > MAX_FILES:
            raise InvalidSpec(f"image: more than {MAX_PACKAGES} packages or {MAX_FILES} files")
        if len({file.path for file in self.files}) < len(self.files):
            raise InvalidSpec("image: two files have the same path")

    def _check_lock(self) -> None:
        if self.locked and not self.python:
            raise InvalidSpec("image: packages are locked for a version of Python: start with Image.python('3.12')")
        if self.locked and self.machine not in MACHINES:
            raise InvalidSpec(f"image: {self.machine[:40]!r} is not a kind of machine: use {' or '.join(MACHINES)}")
        if not 0 <= self.cuda <= MAX_CUDA:
            raise InvalidSpec(f"image: {self.cuda} is not a major version of CUDA")

    def _check_commands(self) -> None:
        if len(self.commands) > MAX_COMMANDS:
            raise InvalidSpec(f"image: {len(self.commands)} commands are more than the {MAX_COMMANDS} allowed")
        for command in self.commands:
            if COMMAND.fullmatch(command) is None:
                raise InvalidSpec(f"image: {command[:120]!r} is not a command: a line has 1 to 2,000 characters")

    @property
    def needs_container(self) -> bool:
        """Whether only a container can provide it: a process has the files of its node."""
        return bool(self.base or self.apt or self.files or not self.locked)

    @property
    def digest(self) -> str:
        """Digest of the spec, the same in every process."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    @property
    def file_digests(self) -> tuple[str, ...]:
        """Digests of all files that a build reads from the bundle."""
        digests = [file.digest for file in self.files]
        lock = self.locked or self.lock
        return tuple(dict.fromkeys([*digests, lock] if lock else digests))
