"""A user's code as one archive, named by its digest.

From a file:
1. `load` imports it, as Python would from its own folder
2. `pack_source` collects the file and the project's modules that it needs, and `include`d files, into a zip

From a notebook, `__main__` or a closure: `pack_pickle` puts the Function itself there, by value, as `function.pkl`,
beside the project's modules that the pickle names.

The same files give the same bytes, so an unchanged project is not uploaded again.
"""

from __future__ import annotations

import ast
import dis
import importlib
import importlib.util
import io
import linecache
import os
import pickletools
import sys
import sysconfig
import traceback
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

from gpufn import _hints, _shadows
from gpufn._function import Function, FunctionClass, declared_in
from gpufn.errors import GpufnError, InvalidBundle
from gpufn.ids import Digest, digest_of
from gpufn.spec import Packaging

PICKLE_NAME = "function.pkl"
_OURS = ("gpufn", "gpufn_gateway", "gpufn_runtime", "gpufn_builder")
_ALWAYS_LOADED = (*_OURS, "__main__", "cloudpickle", "msgspec")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first instant that a zip can say
_INSTALLED = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in {os.path.dirname(__file__), *(path for name, path in sysconfig.get_paths().items() if "lib" in name)}
)

_NOTHING: Mapping[str, bytes] = MappingProxyType({})

AnyFunction = Function[..., Any, Any] | FunctionClass


@dataclass(frozen=True)
class Bundle:
    """`modules` are third-party: what the worker's process can have in memory before it reads the bundle."""

    data: bytes
    files: tuple[str, ...]
    modules: tuple[str, ...]

    @property
    def digest(self) -> Digest:
        return digest_of(self.data)


@dataclass(frozen=True)
class Project:
    """An imported file: the folder that its imports start from, and the modules that its import loaded."""

    module: ModuleType
    root: Path
    loaded: frozenset[str]

    @property
    def functions(self) -> list[AnyFunction]:
        """The functions that the file declares, in its order; imported ones belong to their own file."""
        name = self.module.__name__
        found = (value for value in vars(self.module).values() if isinstance(value, (Function, FunctionClass)))
        return list(dict.fromkeys(function for function in found if function.raw.__module__ == name))


def check_file(path: Path) -> None:
    """Raises InvalidBundle for what is no Python file."""
    if path.is_dir():
        raise InvalidBundle(f"{path} is a folder: name the file in it that declares the functions")
    if not path.is_file():
        raise InvalidBundle(f"there is no file {path}")
    if path.resolve().suffix != ".py":
        raise InvalidBundle(f"{path} is not a Python file (.py)")


def check_globs(root: Path, globs: Sequence[str]) -> None:
    """Raises InvalidBundle for what would leave `root`, or is empty."""
    for glob in globs:
        parts = PurePosixPath(glob).parts
        if not parts or parts[0] == "/" or ".." in parts:
            raise _no_glob(root, glob)


def _no_glob(root: Path, glob: str) -> InvalidBundle:
    return InvalidBundle(f"include={glob!r} is not a glob below {root}: write for example 'data/*'")


def load(path: Path) -> Project:
    """Import a user's file. Raises InvalidBundle with the line that fails."""
    check_file(path)
    file = path.resolve()
    root, name = _import_name(file)
    before = frozenset(sys.modules)
    _shadows.import_from(root, Path.cwd())
    try:
        module = importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        why = where_it_failed(error, file, root) + _shadows.advice(error, root)
        raise InvalidBundle(f"cannot import {path}: {why}") from error
    if Path(getattr(module, "__file__", None) or "").resolve() != file:
        raise InvalidBundle(f"{path} has the name of another module, {name} ({module.__file__}): rename the file")
    if hidden := _hidden_in(module):
        raise InvalidBundle(
            f"{hidden} has a decorator above @gpu_function, which hides it: write @gpu_function above the others"
        )
    return Project(module, root, frozenset(sys.modules) - before)


def pack_source(project: Project, include: Sequence[str] = (), contents: Mapping[str, bytes] = _NOTHING) -> Bundle:
    """The project's file, the modules beside it that it needs, the files that `include`'s globs match, `contents`."""
    files = _Collector([project.root, Path.cwd()])
    files.add(project.module.__name__)
    for name in sorted(project.loaded):
        files.add(name)
    files.include(project.root, include)
    files.put_all(contents)
    return files.bundle()


def pack_pickle(function: AnyFunction, include: Sequence[str] = (), contents: Mapping[str, bytes] = _NOTHING) -> Bundle:
    """`function` by value. Raises InvalidBundle when something that it refers to cannot be pickled."""
    try:
        data, imported = _by_value(function)
    except Exception as error:
        raise InvalidBundle(
            f"{function.__qualname__} cannot be sent by value: {error}. Create what cannot be pickled inside the "
            "function, or put the function in a file and deploy that"
        ) from error
    files = _Collector([Path.cwd(), *_roots_of("__main__"), *_roots_of(function.raw.__module__)])
    for _, text, _ in pickletools.genops(data):
        if isinstance(text, str) and text in sys.modules and text != "__main__":
            files.add(text)
    for name in imported:
        files.add(name)
    files.include(Path.cwd(), include)
    files.put(PICKLE_NAME, data)
    files.put_all(contents)
    return files.bundle()


def _by_value(function: AnyFunction) -> tuple[bytes, list[str]]:
    """Its pickle, and the modules that code in that imports when it runs: these are nowhere in the pickle by name.

    Nor are names that stand in type hints alone, so these travel as what they mean.
    """
    import cloudpickle  # noqa: PLC0415

    imported: dict[str, None] = {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, CodeType):
                imported.update(dict.fromkeys(_imports_of(obj)))
            elif isinstance(obj, (FunctionType, type)) and (
                obj.__module__ == "__main__" or "<locals>" in obj.__qualname__
            ):
                _hints.read_in(obj)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    Pickler(buffer).dump(function)
    return buffer.getvalue(), list(imported)


def _imports_of(code: CodeType) -> Iterator[str]:
    """As `_imports`, of compiled code but not of functions within it; without relative names."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "IMPORT_NAME" and not level.argval:
            yield from _with_parents(step.argval)
            yield from (f"{step.argval}.{name}" for name in names.argval or () if name != "*")


def _roots_of(name: str) -> list[Path]:
    """The folder that the imports of module `name` start from, where that has a file."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return []
    depth = 0 if name == "__main__" else name.count(".") + (Path(file).stem == "__init__")
    return [Path(file).resolve().parents[depth]]


def bundles_of(
    functions: Iterable[AnyFunction], include: Sequence[str] = (), contents: Mapping[str, bytes] = _NOTHING
) -> Iterator[tuple[AnyFunction, Packaging, Bundle]]:
    """How each function of this process travels: by source if its module is a project's file, else by value. `contents`
    are more entries, of each bundle."""
    by_module: dict[str, Bundle] = {}
    for function in functions:
        name = function.raw.__module__
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None or file is None or not can_be_imported(function):
            yield function, Packaging.PICKLE, pack_pickle(function, include, contents)
            continue
        if name not in by_module:
            (root,) = _roots_of(name)
            by_module[name] = pack_source(Project(module, root, frozenset()), include, contents)
        yield function, Packaging.SOURCE, by_module[name]


def can_be_imported(function: AnyFunction) -> bool:
    """Whether a worker finds it by module and name; not what a notebook, `__main__` or another function made."""
    module = sys.modules.get(function.raw.__module__)
    return function.raw.__module__ != "__main__" and getattr(module, function.raw.__qualname__, None) is function


class _Collector:
    """Follows imports through the project's own modules, whether they were executed yet or not."""

    def __init__(self, roots: list[Path]) -> None:
        self._roots = [root.resolve() for root in dict.fromkeys(roots)]
        self._seen: set[str] = set()
        self._files: dict[str, bytes] = {}
        self._foreign: set[str] = set()

    def add(self, name: str) -> None:
        if name in self._seen:
            return
        self._seen.add(name)
        file = self._file_of(name)
        if file is None:
            top = name.partition(".")[0]
            if top in sys.modules and top not in sys.stdlib_module_names and top not in _ALWAYS_LOADED:
                self._foreign.add(top)
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
                # With ** as the last part, Pythons before 3.13 find folders only.
                whole = f"{glob}/*" if PurePosixPath(glob).name == "**" else glob
                matches = [path for path in root.glob(whole) if path.is_file()]
            except ValueError as error:  # Pythons before 3.13 know ** as a whole part only
                raise _no_glob(root, glob) from error
            if not matches and (root / glob).is_dir():
                below = str(PurePosixPath(glob, "**"))
                raise InvalidBundle(f"include={glob!r} is a folder: write {below!r} for all below it")
            if not matches:
                raise InvalidBundle(f"include={glob!r} matches no file below {root}")
            for path in matches:
                self.put(path.relative_to(root).as_posix(), path.read_bytes())

    def bundle(self) -> Bundle:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in sorted(self._files):
                info = zipfile.ZipInfo(name, _EPOCH)
                info.external_attr = 0o644 << 16
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, self._files[name])
        local = {module.partition(".")[0] for module in self._seen if self._file_of(module)}
        return Bundle(buffer.getvalue(), tuple(sorted(self._files)), tuple(sorted(self._foreign - local)))

    def _file_of(self, name: str) -> Path | None:
        """The project's file that holds module `name`, if it is the project's."""
        if _shadows.is_kept(name.partition(".")[0]):
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
        """Where it lies, or where a link to it does."""
        path = file.resolve()
        return path.is_file() and any(
            _below(path, root) or (not _is_installed(path) and _below(file.absolute(), root)) for root in self._roots
        )


def _import_name(file: Path) -> tuple[Path, str]:
    """Where imports start, and what the file is called from there: the folder above the outermost package."""
    root, names = file.parent, [file.stem] if file.stem != "__init__" else []
    while (root / "__init__.py").is_file():
        names.insert(0, root.name)
        root = root.parent
    if not all(name.isidentifier() for name in names):
        raise InvalidBundle(f"{'.'.join(names)} cannot be imported: use letters, digits and underscores in the name")
    return root, ".".join(names)


def _hidden_in(module: ModuleType) -> str | None:
    """The name of a function whose name stands for something else, which holds it: what a decorator made of it."""
    for function in declared_in(module.__name__):
        named = vars(module).get(function.raw.__qualname__)
        is_declared = named is function.raw or isinstance(named, (Function, FunctionClass))
        if callable(named) and not is_declared and getattr(function.raw, "__globals__", vars(module)) is vars(module):
            return function.__qualname__
    return None


def _imports(source: bytes, package: str) -> Iterator[str]:
    """Every module that the source may import, wherever the statement stands; `from a import b` may mean a module."""
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


def _with_parents(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def where_it_failed(error: BaseException, file: Path, root: Path) -> str:
    """One line: which of the user's lines, its text, and the error."""
    what = error.message if isinstance(error, GpufnError) else traceback.format_exception_only(error)[-1].strip()
    what = what.partition("\n")[0]
    if isinstance(error, SyntaxError) and error.filename:
        where, line = Path(error.filename), error.lineno or 0
    else:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename.startswith("/") and _below(Path(frame.filename).resolve(), root)
        ]
        if not frames:
            return what
        where, line = Path(frames[-1].filename), frames[-1].lineno or 0
    text = linecache.getline(str(where), line).strip()
    name = "" if where.resolve() == file else f"{where.name}, "
    return f"{name}line {line}, `{text}`: {what}" if text else f"{name}line {line}: {what}"


def _below(path: Path, root: Path) -> bool:
    """The user's own: not installed, though environments often stand in a project's folder."""
    return path.is_relative_to(root) and not _is_installed(path)


def _is_installed(path: Path) -> bool:
    """Or ours."""
    return "site-packages" in path.parts or f"{path}".startswith(_INSTALLED)


EMPTY = _Collector([]).bundle()  # of a function without code
