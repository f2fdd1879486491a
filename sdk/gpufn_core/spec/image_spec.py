"""The contents of a worker's container image: ImageSpec, a part of FunctionSpec. Frozen and self-validating.

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

    `lock` is the digest of a requirements file, which is installed unchanged.

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
        if self.lock and not is_digest(self.lock):
            raise InvalidSpec(f"image: {self.lock[:80]!r} is not a digest")
        if len(self.apt) + len(self.pip) > MAX_PACKAGES or len(self.files) > MAX_FILES:
            raise InvalidSpec(f"image: more than {MAX_PACKAGES} packages or {MAX_FILES} files")
        if len({file.path for file in self.files}) < len(self.files):
            raise InvalidSpec("image: two files have the same path")

    @property
    def digest(self) -> str:
        """Digest of the spec, the same in every process."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    @property
    def file_digests(self) -> tuple[str, ...]:
        """Digests of all files that a build reads from the bundle."""
        digests = [file.digest for file in self.files]
        return tuple(dict.fromkeys([*digests, self.lock] if self.lock else digests))
