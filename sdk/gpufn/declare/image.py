"""`Image`: declares the container image that a function's workers run in.

A declaration reads no files, because a worker declares again when it starts. `prepare` reads them, at deploy.
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
    from pathlib import Path  # the import takes 6 ms of a cold start

_MOUNTED_OVER = ("/tmp/", "/gpufn/", "/dev/", "/proc/", "/sys/")  # noqa: S108  in a worker's container


@dataclass(frozen=True)
class Image:
    """The Python, packages and files of a function's workers. Each method returns a new Image.

    The nodes build the image at the first deploy that uses it. `gpufn logs` shows the build.

    >>> Image.python("3.12").apt_install("libgl1").pip_install("torch>=2", "numpy")
    Image(version='3.12', base='', apt=('libgl1',), pip=('torch>=2', 'numpy'), lock='', files=())
    """

    version: str = ""
    base: str = ""
    apt: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    lock: str = ""
    files: tuple[tuple[str, str], ...] = ()  # (local path, path in the image)

    def __post_init__(self) -> None:
        ImageSpec(python=self.version, base=self.base, apt=self.apt, pip=self.pip)

    @classmethod
    def python(cls, version: str) -> Image:
        """Start from the nodes' base image for this version of Python, such as ``"3.12"``."""
        return cls(version=_check_str(version, "the version of Python is a string, such as '3.12'"))

    @classmethod
    def from_name(cls, base: str) -> Image:
        """Start from an image that the nodes have or can pull. It needs Python 3.11 or newer, and pip."""
        if not _check_str(base, "the name of a base image is a string"):
            raise InvalidSpec("image: '' is not the name of an image")
        return cls(base=base)

    def apt_install(self, *packages: str) -> Image:
        """Install packages of the base image's distribution (Debian or Ubuntu)."""
        usage = "each package is an argument of its own, as in apt_install('git', 'curl')"
        return dataclasses.replace(self, apt=(*self.apt, *(_check_str(package, usage) for package in packages)))

    def pip_install(self, *requirements: str) -> Image:
        """Install Python packages: names, with extras and versions in pip's syntax."""
        usage = "each package is an argument of its own, as in pip_install('torch', 'numpy')"
        return dataclasses.replace(self, pip=(*self.pip, *(_check_str(package, usage) for package in requirements)))

    def pip_lock(self, file: str | os.PathLike[str]) -> Image:
        """Install a requirements file unchanged, including its hashes. The path is relative to the function's file."""
        return dataclasses.replace(self, lock=_path(file))

    def add_file(self, here: str | os.PathLike[str], there: str | os.PathLike[str]) -> Image:
        """Copy the file `here`, relative to the function's file, to the absolute path `there` in the image."""
        return dataclasses.replace(self, files=(*self.files, (_path(here), _path(there))))


def _check_str(value: str, usage: str) -> str:
    if not isinstance(value, str):
        raise InvalidSpec(f"image: {usage}, not {value!r}")
    return value


def _path(value: str | os.PathLike[str]) -> str:
    return _check_str(os.fspath(value) if isinstance(value, os.PathLike) else value, "the name of a file is a string")


class PreparedImage(NamedTuple):
    """The spec of an image, and `contents`: the bundle entries that the build reads."""

    spec: ImageSpec
    contents: dict[str, bytes]


def prepare(image: Image, folder: Path) -> PreparedImage:
    """Read the files of `image` and return its spec. Relative paths start at `folder`. Raises InvalidSpec."""
    contents: dict[str, bytes] = {}
    for _, target in image.files:
        if target.startswith(_MOUNTED_OVER):
            raise InvalidSpec(f"image: a mount hides {target} from workers: put the file elsewhere, such as below /opt")

    def add(path: str) -> str:
        """Add a file to `contents` and return its digest."""
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
        lock=add(image.lock) if image.lock else "",
        files=tuple(ImageFile(target, add(local)) for local, target in image.files),
    )
    return PreparedImage(spec, contents)
