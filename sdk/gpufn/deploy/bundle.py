"""Bundles: a user's code as one archive, named by its digest.

From a file:
1. `load` imports the file, as Python would from its own folder
2. `pack_source` collects the file, the project's modules that it needs, and `include`d files into a zip

From a notebook, `__main__` or a closure, `pack_pickle` stores the Function itself by value as `function.pkl`, with the
project's modules that the pickle names, and the source of a notebook's cells (`gpufn.deploy.by_value`).

Equal files give equal bytes, so an unchanged project is not uploaded again.
"""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import pickletools
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from gpufn.declare.declarations import declarations_in
from gpufn.declare.function import Function, FunctionClass
from gpufn.deploy.imports import import_guard, missing_packages
from gpufn.deploy.imports.import_collector import Bundle, Collector, import_name, is_below
from gpufn_core.errors import GpufnError, InvalidBundle
from gpufn_core.spec.function_spec import Packaging
from gpufn_core.spec.units import format_bytes

if TYPE_CHECKING:
    from gpufn.deploy.by_value.pickler import Pickled

PICKLE_NAME = "function.pkl"

_LARGE_BYTES = 8 << 20  # a pickle above it is rarely intended
_NO_CONTENTS: Mapping[str, bytes] = MappingProxyType({})

AnyFunction = Function[..., Any, Any] | FunctionClass


@dataclass(frozen=True)
class Project:
    """An imported file, its import root, and the modules that its import loaded.

    `missing` are packages that are not installed here; stand-ins replaced them.
    """

    module: ModuleType
    root: Path
    loaded: frozenset[str]
    missing: tuple[str, ...] = ()

    @property
    def functions(self) -> list[AnyFunction]:
        """The functions that the file declares, in order, without imported ones."""
        name = self.module.__name__
        functions = (value for value in vars(self.module).values() if isinstance(value, (Function, FunctionClass)))
        return list(dict.fromkeys(function for function in functions if function.raw.__module__ == name))


def check_file(path: Path) -> None:
    """Raises InvalidBundle if `path` is not a Python file."""
    if path.is_dir():
        raise InvalidBundle(f"{path} is a folder: pass the file in it that declares the functions")
    if not path.is_file():
        file, _, function = str(path).partition("::")
        hint = f": pass {file}, and --name {function}" if function and Path(file).is_file() else ""
        raise InvalidBundle(f"there is no file {path}{hint}")
    if path.resolve().suffix != ".py":
        raise InvalidBundle(f"{path} is not a Python file (.py); `gpufn deploy` also takes models, such as .onnx files")


def load(path: Path, *, to_run: bool = True) -> Project:
    """Import a user's file. Raises InvalidBundle with the line that fails.

    Unless its code is `to_run` here, stand-ins replace packages that are not installed. A stand-in is added only after
    an import has failed: a file that handles the missing package is imported unchanged.
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
                reason = describe_failure(error, file, root) + import_guard.advice(error, root)
                if missing:
                    reason += f" (imported without {', '.join(missing)}: not installed here)"
                raise InvalidBundle(f"cannot import {path}: {reason}") from error
        missing_packages.add_stand_in(package)
        missing_packages.unload_project(root, before)
        missing.append(package)
    if Path(getattr(module, "__file__", None) or "").resolve() != file:
        raise InvalidBundle(f"{path} has the same name as the module {name} ({module.__file__}): rename the file")
    if hidden := _hidden_in(module):
        raise InvalidBundle(
            f"{hidden} has a decorator above @gpu_function, which hides it: write @gpu_function above the others"
        )
    return Project(module, root, frozenset(sys.modules) - before, tuple(missing))


def pack_source(project: Project, include: Sequence[str] = (), contents: Mapping[str, bytes] = _NO_CONTENTS) -> Bundle:
    """Bundle the project's file, the project's modules that it needs, files matching `include`, and `contents`."""
    files = Collector([project.root, Path.cwd()])
    files.add(project.module.__name__)
    for name in sorted(project.loaded):
        files.add(name)
    files.include(project.root, include)
    files.put_all(contents)
    return files.bundle()


def pack_pickle(
    function: AnyFunction, include: Sequence[str] = (), contents: Mapping[str, bytes] = _NO_CONTENTS
) -> Bundle:
    """Bundle `function` by value. Raises InvalidBundle if it refers to an object that cannot be pickled."""
    pickled = _pickled(function)
    files = Collector([Path.cwd(), *_import_roots_of("__main__"), *_import_roots_of(function.raw.__module__)])
    for _, text, _ in pickletools.genops(pickled.data):
        if isinstance(text, str) and text in sys.modules and text != "__main__":
            files.add(text)
    for name in pickled.imported:
        files.add(name)
    files.include(Path.cwd(), include)
    files.put(PICKLE_NAME, pickled.data)
    files.put_all(pickled.cells)
    files.put_all(contents)
    return files.bundle()


def _pickled(function: AnyFunction) -> Pickled:
    """Pickle `function`. Raises InvalidBundle, which names the variable; warns of a large one."""
    from gpufn.deploy.by_value.pickler import pickle_by_value  # noqa: PLC0415
    from gpufn.deploy.by_value.variables import describe, largest_variable, refused_variable  # noqa: PLC0415

    try:
        pickled = pickle_by_value(function)
    except Exception as error:
        refused = refused_variable(function)
        raise InvalidBundle(
            f"{function.__qualname__} cannot be sent by value: {error if refused is None else describe(refused)}. "
            "Create the object inside the function or in @enter, or move the function to the top level of a file and "
            "deploy that file"
        ) from error
    if len(pickled.data) > _LARGE_BYTES:
        name, size = largest_variable(function)
        if size > _LARGE_BYTES // 2:
            warnings.warn(
                f"{function.__qualname__} is sent with its variable {name} of {format_bytes(size)}: each worker reads "
                "it at its start. Load large data in the function, or pass it as an argument",
                stacklevel=2,
            )
    return pickled


def _import_roots_of(name: str) -> list[Path]:
    """Return the import root of module `name`, or nothing if the module has no file."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return []
    depth = 0 if name == "__main__" else name.count(".") + (Path(file).stem == "__init__")
    return [Path(file).resolve().parents[depth]]


def bundles_of(
    functions: Iterable[AnyFunction], include: Sequence[str] = (), contents: Mapping[str, bytes] = _NO_CONTENTS
) -> Iterator[tuple[AnyFunction, Packaging, Bundle]]:
    """Bundle each function of this process: by source if its module is a project's file, else by value.

    Each bundle also gets the entries of `contents`.
    """
    by_module: dict[str, Bundle] = {}
    for function in functions:
        name = function.raw.__module__
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None or file is None or not can_be_imported(function):
            yield function, Packaging.PICKLE, pack_pickle(function, include, contents)
            continue
        if name not in by_module:
            (root,) = _import_roots_of(name)
            by_module[name] = pack_source(Project(module, root, frozenset()), include, contents)
        yield function, Packaging.SOURCE, by_module[name]


def can_be_imported(function: AnyFunction) -> bool:
    """Return whether a worker can import the function by module and name.

    False for functions created in a notebook, in `__main__` or in another function.
    """
    module = sys.modules.get(function.raw.__module__)
    return function.raw.__module__ != "__main__" and getattr(module, function.raw.__qualname__, None) is function


def _hidden_in(module: ModuleType) -> str | None:
    """Return the name of a declared function that another decorator has wrapped, if there is one."""
    for function in declarations_in(module.__name__):
        value = vars(module).get(function.raw.__qualname__)
        is_declared = value is function.raw or isinstance(value, (Function, FunctionClass))
        if callable(value) and not is_declared and getattr(function.raw, "__globals__", vars(module)) is vars(module):
            return function.__qualname__
    return None


def describe_failure(error: BaseException, file: Path, root: Path) -> str:
    """Describe an import error on one line: the number and text of the user's line, and the error."""
    message = error.message if isinstance(error, GpufnError) else traceback.format_exception_only(error)[-1].strip()
    message = message.partition("\n")[0]
    if isinstance(error, SyntaxError) and error.filename:
        source, line = Path(error.filename), error.lineno or 0
    else:
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename.startswith("/") and is_below(Path(frame.filename).resolve(), root)
        ]
        if not frames:
            return message
        source, line = Path(frames[-1].filename), frames[-1].lineno or 0
    text = linecache.getline(str(source), line).strip()
    name = "" if source.resolve() == file else f"{source.name}, "
    return f"{name}line {line}, `{text}`: {message}" if text else f"{name}line {line}: {message}"


EMPTY_BUNDLE = Collector([]).bundle()  # for functions without code
