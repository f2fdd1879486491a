"""`Image`: declares the Python, packages and files of a function's workers.

A declaration reads no files, because a worker declares again when it starts. `prepare` reads them, at deploy.
"""

from __future__ import annotations

import dataclasses
import os
import posixpath
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gpufn_core.errors import InvalidSpec
from gpufn_core.ids import digest_of
from gpufn_core.spec.image_spec import FILES_FOLDER, MACHINES, ImageFile, ImageSpec

if TYPE_CHECKING:
    from pathlib import Path  # the import takes 6 ms of a cold start

_ANY_PYTHON = "3.11"  # version of a declaration, until the deploy knows it
_MOUNTED_OVER = ("/tmp/", "/gpufn/", "/dev/", "/proc/", "/sys/")  # noqa: S108  in a worker's container


@dataclass(frozen=True)
class Image:
    """The Python, packages and files of a function's workers. Each method returns a new Image.

    A deploy locks the packages. Each node makes them once: as an environment for processes, or as an image for
    containers. `gpufn logs` shows the progress. `Image()` has the Python version of the deploying interpreter.

    >>> Image.python("3.12").pip_install("torch>=2", "numpy").pip
    ('torch>=2', 'numpy')
    """

    version: str = ""
    base: str = ""
    apt: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    lock: str = ""
    files: tuple[tuple[str, str], ...] = ()  # (local path, path in the image)
    sources: tuple[tuple[str, str], ...] = ()  # (kind, path) of files that name packages
    copies: tuple[tuple[str, str], ...] = ()  # (local path, path in the working folder)
    variables: tuple[tuple[str, str], ...] = ()
    commands: tuple[str, ...] = ()
    builds: bool = False
    machine: str = ""

    def __post_init__(self) -> None:
        python = "" if self.base else self.version or _ANY_PYTHON
        ImageSpec(python=python, base=self.base, apt=self.apt, pip=self.pip, commands=self.commands)
        if self.base and (self.sources or self.builds):
            raise InvalidSpec(
                "image: the Python version of a base image is unknown: use pip_install or pip_lock with from_name, or "
                "start with Image.python('3.12')"
            )
        if self.machine and self.machine not in MACHINES:
            raise InvalidSpec(f"image: machine={self.machine!r}: use {' or '.join(map(repr, MACHINES))}")

    @classmethod
    def python(cls, version: str, *, machine: str = "") -> Image:
        """Start from this version of Python, such as ``"3.12"``. `machine` is the kind of the nodes, ``"x86_64"`` or
        ``"aarch64"``. Default: the kind of the deploying machine."""
        return cls(version=_check_str(version, "the version of Python is a string, such as '3.12'"), machine=machine)

    @classmethod
    def from_name(cls, base: str) -> Image:
        """Start from a container image that the nodes have or can pull. It needs Python 3.11 or newer, and pip."""
        if not _check_str(base, "the name of a base image is a string"):
            raise InvalidSpec("image: '' is not the name of an image")
        return cls(base=base)

    def apt_install(self, *packages: str) -> Image:
        """Install packages of the base image's distribution (Debian or Ubuntu). The workers run in containers."""
        usage = "each package is an argument of its own, as in apt_install('git', 'curl')"
        return dataclasses.replace(self, apt=(*self.apt, *(_check_str(package, usage) for package in packages)))

    def pip_install(self, *requirements: str, builds: bool = False) -> Image:
        """Install Python packages: names, with extras and versions in pip's syntax. `builds` allows packages without a
        wheel, whose build runs their code, in a sandbox."""
        usage = "each package is an argument of its own, as in pip_install('torch', 'numpy')"
        packages = tuple(_check_str(package, usage) for package in requirements)
        return dataclasses.replace(self, pip=(*self.pip, *packages), builds=self.builds or builds)

    def requirements(self, file: str | os.PathLike[str] = "requirements.txt") -> Image:
        """Install the packages of a requirements file. The path is relative to the function's file."""
        return dataclasses.replace(self, sources=(*self.sources, ("requirements", _path(file))))

    def pyproject(self, file: str | os.PathLike[str] = "pyproject.toml") -> Image:
        """Install the dependencies of a project, without the project itself."""
        return dataclasses.replace(self, sources=(*self.sources, ("pyproject", _path(file))))

    def uv_lock(self, file: str | os.PathLike[str] = "uv.lock") -> Image:
        """Install the packages of a uv.lock unchanged, without the project itself and its development group."""
        return dataclasses.replace(self, sources=(*self.sources, ("uv_lock", _path(file))))

    def pip_lock(self, file: str | os.PathLike[str]) -> Image:
        """Install a requirements file unchanged, including its hashes. The path is relative to the function's file."""
        return dataclasses.replace(self, lock=_path(file))

    def add_file(self, here: str | os.PathLike[str], there: str | os.PathLike[str]) -> Image:
        """Copy the file `here`, relative to the function's file, to the absolute path `there` in the image."""
        return dataclasses.replace(self, files=(*self.files, (_path(here), _path(there))))

    def copy_local(self, here: str | os.PathLike[str], there: str | os.PathLike[str] = "") -> Image:
        """Copy a file or folder to the working folder of the workers, where it is read-only. `here` is relative to the
        function's file. `there` is relative to the working folder. Default: the name of `here`."""
        target = _path(there) or posixpath.basename(posixpath.normpath(_path(here)))
        if target.startswith("/"):
            raise InvalidSpec(f"image: copy_local copies to the working folder: use add_file for {target}")
        if posixpath.normpath(target).startswith("..") or target in ("", "."):
            raise InvalidSpec(f"image: {target!r} is not a path below the working folder")
        return dataclasses.replace(self, copies=(*self.copies, (_path(here), posixpath.normpath(target))))

    def env(self, variables: Mapping[str, str] | None = None, **more: str) -> Image:
        """Set environment variables of the workers. The function's own `env` goes first."""
        added = {**(variables or {}), **more}
        for name, value in added.items():
            _check_str(name, "the name of a variable is a string")
            _check_str(value, f"the value of {name} is a string")
        return dataclasses.replace(self, variables=tuple({**dict(self.variables), **added}.items()))

    def run(self, command: str) -> Image:
        """Run a shell command after the packages are installed, once per node. Outside of containers it runs in a
        sandbox, and can write to the environment (`$VIRTUAL_ENV`) only."""
        _check_str(command, "a command is a string, such as run('python -m spacy download en_core_web_sm')")
        return dataclasses.replace(self, commands=(*self.commands, command))


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


def prepare(image: Image, folder: Path, on_progress: Callable[[str], None] = lambda progress: None) -> PreparedImage:
    """Read the files of `image`, lock its packages and return its spec. Relative paths start at `folder`. Raises
    InvalidSpec."""
    contents: dict[str, bytes] = {}
    for _, target in image.files:
        if target.startswith(_MOUNTED_OVER):
            raise InvalidSpec(f"image: a mount hides {target} from workers: put the file elsewhere, such as below /opt")

    def add(path: str) -> str:
        """Add a file to `contents` and return its digest."""
        return add_data(_read(folder, path))

    def add_data(data: bytes) -> str:
        digest = digest_of(data)
        contents[f"{FILES_FOLDER}/{digest}"] = data
        return digest

    locked, machine, cuda = "", "", 0
    if _is_locked(image):
        from gpufn.deploy import package_lock  # noqa: PLC0415  (workers do not need it)

        machine = image.machine or package_lock.this_machine()
        lock = _lock(image, folder, machine, on_progress)
        locked, cuda = add_data(lock), package_lock.cuda_version(lock)
    spec = ImageSpec(
        python="" if image.base else image.version or "{}.{}".format(*sys.version_info),
        base=image.base,
        apt=image.apt,
        pip=image.pip,
        lock=add(image.lock) if image.lock and not locked else "",
        files=tuple(ImageFile(target, add(local)) for local, target in image.files),
        locked=locked,
        machine=machine,
        cuda=cuda,
        builds=image.builds,
        commands=image.commands,
    )
    for local, target in image.copies:
        contents.update(_copied(folder / local, target))
    return PreparedImage(spec, contents)


def _is_locked(image: Image) -> bool:
    """Return whether a deploy locks the packages. An image that was for containers before is built as before."""
    is_for_containers = bool(image.base or image.apt or image.files)
    return not image.base and bool(image.sources or image.builds or not is_for_containers)


def _lock(image: Image, folder: Path, machine: str, on_progress: Callable[[str], None]) -> bytes:
    from gpufn.deploy import package_lock  # noqa: PLC0415

    files: list[Path] = []
    fixed = [_read(folder, image.lock).decode()] if image.lock else []
    for kind, path in image.sources:
        _read(folder, path)
        if kind == "uv_lock":
            fixed.append(package_lock.export_uv_lock(folder / path))
        else:
            files.append(folder / path)
    if fixed and "--hash=" not in "".join(fixed):
        raise InvalidSpec("image: a lock file needs hashes: use requirements(...) for a file without hashes")
    return package_lock.lock(
        image.pip,
        files,
        "\n".join(fixed),
        python=image.version or package_lock.this_python(),
        machine=machine,
        builds=image.builds,
        on_progress=on_progress,
    )


def _read(folder: Path, path: str) -> bytes:
    try:
        return (folder / path).read_bytes()
    except OSError as error:
        raise InvalidSpec(f"image: cannot read {path}: {error.strerror}") from error


def _copied(source: Path, target: str) -> Iterator[tuple[str, bytes]]:
    """Yield the bundle entries of a file or folder."""
    if not source.is_dir():
        yield target, _read(source.parent, source.name)
        return
    for path in sorted(each for each in source.rglob("*") if each.is_file() and "__pycache__" not in each.parts):
        yield f"{target}/{path.relative_to(source).as_posix()}", _read(path.parent, path.name)
