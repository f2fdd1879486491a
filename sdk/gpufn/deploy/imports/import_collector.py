"""Files of a bundle: the project's modules, found by following imports, and the files that `include` adds."""

from __future__ import annotations

import ast
import dis
import importlib.util
import io
import os
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import CodeType

import gpufn_core
from gpufn.deploy.imports import import_guard
from gpufn_core.errors import InvalidBundle
from gpufn_core.ids import Digest, digest_of

_GPUFN_PACKAGES = (
    "gpufn",
    "gpufn_core",
    "gpufn_platform",
    "gpufn_gateway",
    "gpufn_runtime",
    "gpufn_builder",
    "gpufn_local",
)
_ALWAYS_LOADED = (*_GPUFN_PACKAGES, "__main__", "cloudpickle", "msgspec")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest timestamp of the zip format
_INSTALLED = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in {
        os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
        os.path.dirname(str(gpufn_core.__file__)),
        *(path for name, path in sysconfig.get_paths().items() if "lib" in name),
    }
)


@dataclass(frozen=True)
class Bundle:
    """A zip archive. `modules` are third-party modules, which a worker can import before it reads the bundle."""

    data: bytes
    files: tuple[str, ...]
    modules: tuple[str, ...]

    @property
    def digest(self) -> Digest:
        return digest_of(self.data)

    def contents(self) -> dict[str, bytes]:
        with zipfile.ZipFile(io.BytesIO(self.data)) as archive:
            return {name: archive.read(name) for name in self.files}


def check_globs(root: Path, globs: Sequence[str]) -> None:
    """Raises InvalidBundle for a glob that is empty or leaves `root`."""
    for glob in globs:
        parts = PurePosixPath(glob).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise _invalid_glob(root, glob)


def _invalid_glob(root: Path, glob: str) -> InvalidBundle:
    return InvalidBundle(f"include={glob!r} is not a glob below {root}: write for example 'data/*'")


class Collector:
    """Collects a project's modules by following their imports, executed or not."""

    def __init__(self, roots: list[Path]) -> None:
        self._roots = [root.resolve() for root in dict.fromkeys(roots)]
        self._seen: set[str] = set()
        self._files: dict[str, bytes] = {}
        self._third_party: set[str] = set()

    def add(self, name: str) -> None:
        if name in self._seen:
            return
        self._seen.add(name)
        file = self._file_of(name)
        if file is None:
            top = name.partition(".")[0]
            if top in sys.modules and top not in sys.stdlib_module_names and top not in _ALWAYS_LOADED:
                self._third_party.add(top)
            return
        if parent := name.rpartition(".")[0]:
            self.add(parent)
        is_package = file.stem == "__init__"
        arcname = PurePosixPath(*name.split("."), file.name) if is_package else PurePosixPath(*name.split("."))
        self.put(str(arcname) if is_package else f"{arcname}{''.join(file.suffixes)}", data := file.read_bytes())
        if file.suffix == ".py":
            for imported in _imports(data, name if is_package else name.rpartition(".")[0]):
                self.add(imported)

    def put(self, name: str, data: bytes) -> None:
        self._files[name] = data

    def put_all(self, contents: Mapping[str, bytes]) -> None:
        self._files.update(contents)

    def include(self, root: Path, globs: Sequence[str]) -> None:
        check_globs(root, globs)
        for glob in globs:
            try:
                # With ** as the last part, Python before 3.13 matches folders only.
                pattern = f"{glob}/*" if PurePosixPath(glob).name == "**" else glob
                matches = [path for path in root.glob(pattern) if path.is_file()]
            except ValueError as error:  # Python before 3.13 accepts ** as a whole part only
                raise _invalid_glob(root, glob) from error
            if not matches and (root / glob).is_dir():
                below = str(PurePosixPath(glob, "**"))
                raise InvalidBundle(f"include={glob!r} is a folder: write {below!r} to include the files below it")
            if not matches:
                raise InvalidBundle(f"include={glob!r} matches no file below {root}")
            for path in matches:
                self.put(path.relative_to(root).as_posix(), path.read_bytes())

    @property
    def files(self) -> Mapping[str, bytes]:
        return self._files

    def bundle(self) -> Bundle:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in sorted(self._files):
                info = zipfile.ZipInfo(name, _EPOCH)
                info.external_attr = 0o644 << 16
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, self._files[name])
        local = {module.partition(".")[0] for module in self._seen if self._file_of(module)}
        return Bundle(buffer.getvalue(), tuple(sorted(self._files)), tuple(sorted(self._third_party - local)))

    def _file_of(self, name: str) -> Path | None:
        """Return the file of module `name` if it belongs to the project."""
        if import_guard.is_reserved(name.partition(".")[0]):
            return None
        if (module := sys.modules.get(name)) is not None:
            file = getattr(module, "__file__", None)
            return Path(file) if isinstance(file, str) and self._is_local(Path(file)) else None
        for root in self._roots:
            base = root.joinpath(*name.split("."))
            for candidate in (base / "__init__.py", base.with_name(f"{base.name}.py")):
                if candidate.is_file() and self._is_local(candidate):
                    return candidate
        return None

    def _is_local(self, file: Path) -> bool:
        """Return whether the file, or the link to it, is in one of the roots and not installed."""
        path = file.resolve()
        locations = (path, file.absolute())
        is_own = any(is_below(location, root) for location in locations for root in self._roots)
        return path.is_file() and is_own and not _is_installed(path)


def _imports(source: bytes, package: str) -> Iterator[str]:
    """Yield every module that the source may import, at any nesting level.

    `from a import b` yields `a.b` too, since it may be a module.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                try:
                    base = importlib.util.resolve_name("." * node.level + base, package)
                except ImportError:
                    continue
            if base:
                yield from _with_parents(base)
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def imports_of(code: CodeType) -> Iterator[str]:
    """Yield the modules that compiled code imports, without its nested functions and without relative imports."""
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    for level, names, each in zip(instructions, instructions[1:], instructions[2:], strict=False):
        if each.opname == "IMPORT_NAME" and not level.argval:
            yield from _with_parents(each.argval)
            yield from (f"{each.argval}.{name}" for name in names.argval or () if name != "*")


def _with_parents(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def is_below(path: Path, root: Path) -> bool:
    """Return whether the path lies below `root` and is not installed: a virtual environment is often in the project."""
    return path.is_relative_to(root) and not _is_installed(path)


def _is_installed(path: Path) -> bool:
    """Return whether the path is in an installed package or in gpufn itself."""
    return "site-packages" in path.parts or f"{path}".startswith(_INSTALLED)


def import_root(file: Path) -> Path:
    """Return the folder where the file's imports start: its own folder, or the folder that contains its outermost
    package."""
    root = file.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    return root


def import_name(file: Path) -> tuple[Path, str]:
    """Return the file's import root and its module name."""
    root = import_root(file)
    names = list(file.relative_to(root).with_suffix("").parts)
    if names[-1] == "__init__":
        names.pop()
    if not all(name.isidentifier() for name in names):
        raise InvalidBundle(f"{'.'.join(names)} cannot be imported: use letters, digits and underscores in the name")
    return root, ".".join(names)
