"""`Image`: what a user writes to have a function's workers run in containers of an image of its own.

Declaring one reads no file, for a worker declares again at its start; `prepare` does, at deploy.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gpufn_core.errors import InvalidSpec
from gpufn_core.ids import digest_of
from gpufn_core.spec.image_spec import FILES_FOLDER, ImageFile, ImageSpec

if TYPE_CHECKING:
    from pathlib import Path  # 6 ms of a cold start

_MOUNTED_OVER = ("/tmp/", "/gpufn/", "/dev/", "/proc/", "/sys/")  # noqa: S108  (of a worker's container)


@dataclass(frozen=True)
class Image:
    """Python, packages and files that a function's workers have. Each method returns a new Image.

    It is built on the nodes at the first deploy that asks for it; `gpufn logs` shows the build.

    >>> Image.python("3.12").apt_install("libgl1").pip_install("torch>=2", "numpy")
    Image(version='3.12', base='', apt=('libgl1',), pip=('torch>=2', 'numpy'), lock='', files=())
    """

    version: str = ""
    base: str = ""
    apt: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    lock: str = ""
    files: tuple[tuple[str, str], ...] = ()  # here, and in the image

    def __post_init__(self) -> None:
        ImageSpec(python=self.version, base=self.base, apt=self.apt, pip=self.pip)

    @classmethod
    def python(cls, version: str) -> Image:
        """Of the nodes' base image for this version of Python, such as ``"3.12"``."""
        return cls(version=_text(version, "the version of Python is text, such as '3.12'"))

    @classmethod
    def from_name(cls, base: str) -> Image:
        """Of an image that the nodes have, or can pull; it needs Python 3.11 or newer, and pip."""
        if not _text(base, "the name of a base image is text"):
            raise InvalidSpec("image: '' is not the name of an image")
        return cls(base=base)

    def apt_install(self, *packages: str) -> Image:
        """Install packages of the base image's distribution (Debian's or Ubuntu's)."""
        told = [_text(each, "packages are given one by one, such as apt_install('git', 'curl')") for each in packages]
        return dataclasses.replace(self, apt=(*self.apt, *told))

    def pip_install(self, *requirements: str) -> Image:
        """Install Python packages: names, with extras and versions as pip takes them."""
        told = [
            _text(each, "packages are given one by one, such as pip_install('torch', 'numpy')") for each in requirements
        ]
        return dataclasses.replace(self, pip=(*self.pip, *told))

    def pip_lock(self, file: str | os.PathLike[str]) -> Image:
        """Install a requirements file as it is, hashes and all. The path is relative to the function's file."""
        return dataclasses.replace(self, lock=_path(file))

    def add_file(self, here: str | os.PathLike[str], there: str | os.PathLike[str]) -> Image:
        """A file of this machine, relative to the function's file, at an absolute path of the image."""
        return dataclasses.replace(self, files=(*self.files, (_path(here), _path(there))))


def _text(given: str, what: str) -> str:
    if not isinstance(given, str):
        raise InvalidSpec(f"image: {what}, not {given!r}")
    return given


def _path(given: str | os.PathLike[str]) -> str:
    return _text(os.fspath(given) if isinstance(given, os.PathLike) else given, "a file's name is text")


class PreparedImage(NamedTuple):
    """`contents` are the bundle's entries that the build reads."""

    spec: ImageSpec
    contents: dict[str, bytes]


def prepare(image: Image, folder: Path) -> PreparedImage:
    """Reads the image's files; relative paths start at `folder`. Raises InvalidSpec."""
    contents: dict[str, bytes] = {}
    for _, there in image.files:
        if there.startswith(_MOUNTED_OVER):
            raise InvalidSpec(f"image: no worker would see {there}: put the file elsewhere, such as below /opt")

    def take(path: str) -> str:
        try:
            data = (folder / path).read_bytes()
        except OSError as error:
            raise InvalidSpec(f"image: cannot read {path}: {error.strerror}") from error
        digest = digest_of(data)
        contents[f"{FILES_FOLDER}/{digest}"] = data
        return digest

    spec = ImageSpec(
        python=image.version,
        base=image.base,
        apt=image.apt,
        pip=image.pip,
        lock=take(image.lock) if image.lock else "",
        files=tuple(ImageFile(there, take(here)) for here, there in image.files),
    )
    return PreparedImage(spec, contents)
