"""A user's code as one archive, named by its digest.

From a file:
1. `load` imports it, as Python would from its own folder
2. `pack_source` collects the file and the project's modules that it needs, and `include`d files, into a zip

From a notebook, `__main__` or a closure: `pack_pickle` puts the Function itself there, by value, as `function.pkl`,
beside the project's modules that the pickle names.

The same files give the same bytes, so an unchanged project is not uploaded again.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import linecache
import pickletools
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import msgspec

from gpufn.declare import type_hints
from gpufn.declare.declarations import declared_in
from gpufn.declare.function import Function, FunctionClass
from gpufn.deploy import import_guard, missing_packages
from gpufn.deploy.import_collector import Bundle, Collector, import_name, imports_of, is_below
from gpufn_core.errors import GpufnError, InvalidBundle
from gpufn_core.spec.function_spec import Packaging

PICKLE_NAME = "function.pkl"

_NOTHING: Mapping[str, bytes] = MappingProxyType({})

AnyFunction = Function[..., Any, Any] | FunctionClass


@dataclass(frozen=True)
class Project:
    """An imported file: the folder that its imports start from, and the modules that its import loaded. It was imported
    without the packages in `missing`, which are not installed here."""

    module: ModuleType
    root: Path
    loaded: frozenset[str]
    missing: tuple[str, ...] = ()

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


def load(path: Path, *, to_run: bool = True) -> Project:
    """Import a user's file. Raises InvalidBundle with the line that fails.

    Where its code is not `to_run` here, a package that is not installed gets a stand-in. That is tried when the import
    has failed for the lack of it: a file that does without the package is imported as it is.
    """
    check_file(path)
    file = path.resolve()
    root, name = import_name(file)
    before = frozenset(sys.modules)
    import_guard.import_from(root, Path.cwd())
    missing: list[str] = []
    while True:
        try:
            module = importlib.import_module(name)
            break
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            package = None if to_run else missing_packages.missing_package(error)
            if package is None:
                why = where_it_failed(error, file, root) + import_guard.advice(error, root)
                if missing:
                    why += f" (read without {', '.join(missing)}: not installed here)"
                raise InvalidBundle(f"cannot import {path}: {why}") from error
        missing_packages.stand_in_for(package)
        missing_packages.forget_project(root, before)
        missing.append(package)
    if Path(getattr(module, "__file__", None) or "").resolve() != file:
        raise InvalidBundle(f"{path} has the name of another module, {name} ({module.__file__}): rename the file")
    if hidden := _hidden_in(module):
        raise InvalidBundle(
            f"{hidden} has a decorator above @gpu_function, which hides it: write @gpu_function above the others"
        )
    return Project(module, root, frozenset(sys.modules) - before, tuple(missing))


def pack_source(project: Project, include: Sequence[str] = (), contents: Mapping[str, bytes] = _NOTHING) -> Bundle:
    """The project's file, the modules beside it that it needs, the files that `include`'s globs match, `contents`."""
    files = Collector([project.root, Path.cwd()])
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
            "function, or move the function to the top level of a file and deploy that"
        ) from error
    files = Collector([Path.cwd(), *_roots_of("__main__"), *_roots_of(function.raw.__module__)])
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
                imported.update(dict.fromkeys(imports_of(obj)))
            elif isinstance(obj, (FunctionType, type)) and (
                obj.__module__ == "__main__" or "<locals>" in obj.__qualname__
            ):
                if isinstance(obj, type) and issubclass(obj, msgspec.Struct):
                    raise TypeError(f"{obj.__qualname__} is a msgspec.Struct, which would arrive without its fields")
                type_hints.read_in(obj)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    Pickler(buffer).dump(function)
    return buffer.getvalue(), list(imported)


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


def _hidden_in(module: ModuleType) -> str | None:
    """The name of a function whose name stands for something else, which holds it: what a decorator made of it."""
    for function in declared_in(module.__name__):
        named = vars(module).get(function.raw.__qualname__)
        is_declared = named is function.raw or isinstance(named, (Function, FunctionClass))
        if callable(named) and not is_declared and getattr(function.raw, "__globals__", vars(module)) is vars(module):
            return function.__qualname__
    return None


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
            if frame.filename.startswith("/") and is_below(Path(frame.filename).resolve(), root)
        ]
        if not frames:
            return what
        where, line = Path(frames[-1].filename), frames[-1].lineno or 0
    text = linecache.getline(str(where), line).strip()
    name = "" if where.resolve() == file else f"{where.name}, "
    return f"{name}line {line}, `{text}`: {what}" if text else f"{name}line {line}: {what}"


EMPTY = Collector([]).bundle()  # of a function without code
