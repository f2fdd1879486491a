"""Deploys of code that was written for another platform.

The bundle gets the module `gpufn_entry`, which a worker imports. It has the function that callers call.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpufn.declare.function import Function
from gpufn.declare.options import settings_from
from gpufn.deploy import bundle
from gpufn.deploy.deploy_source import source_of_file
from gpufn.deploy.deployables import Deployable
from gpufn.deploy.imports import import_guard, missing_packages
from gpufn.deploy.imports.import_collector import Collector, import_name
from gpufn.hosted import cog_predictor, cog_yaml, runpod_handler
from gpufn_core.errors import InvalidBundle, InvalidSpec
from gpufn_core.spec.function_spec import Packaging
from gpufn_core.spec.naming.names import Home

ENTRY: Final = "gpufn_entry"
_REPLACED: Final = frozenset({"cog", "runpod"})
_SKIPPED: Final = frozenset({"__pycache__", "venv", "node_modules"})
_COG_ENTRY: Final = '''"""Written by `gpufn deploy --as cog`."""

from gpufn.hosted import cog_predictor

cog_predictor.install()
from {module} import {target} as target

function = cog_predictor.serve(target, __name__)
'''
_RUNPOD_ENTRY: Final = '''"""Written by `gpufn deploy --as runpod`."""

from pathlib import Path

from gpufn.hosted import runpod_handler

function = runpod_handler.serve(Path(__file__).parent / {file!r}, __name__)
'''


class Hosted(NamedTuple):
    """A function to deploy, and notes about differences from its own platform."""

    deployable: Deployable
    notes: tuple[str, ...]


def cog(path: Path, name: str, options: Mapping[str, Any], include: Sequence[str], home: Home) -> Hosted:
    """Read the project of a `cog.yaml`. `options` take precedence over it. All files of the folder are sent.

    Raises InvalidSpec and InvalidBundle.
    """
    file = path / "cog.yaml" if path.is_dir() else path
    config = cog_yaml.read(file)
    cog_predictor.install()
    project = bundle.load(config.file, to_run=False)
    target = getattr(project.module, config.target, None)
    if target is None:
        raise InvalidSpec(f"{config.file.name} has no {config.target}, which cog.yaml names")
    function = cog_predictor.as_function(target, ENTRY)
    files = Collector([project.root])
    for module in (project.module.__name__, *sorted(project.loaded)):
        files.add(module)
    for each in sorted(file.parent.rglob("*")):
        parts = each.relative_to(file.parent).parts
        is_skipped = any(part.startswith(".") or part in _SKIPPED for part in parts)
        if each.is_file() and not is_skipped:
            files.put("/".join(parts), each.read_bytes())
    files.include(file.parent, include)
    files.put(f"{ENTRY}.py", _COG_ENTRY.format(module=project.module.__name__, target=config.target).encode())
    named = {"name": name or config.name or _name_of(file.resolve().parent.name)}
    notes = (*config.notes, *_missing(project.missing))
    return Hosted(_deployable(function, {**config.options, **options, **named}, files, config.file, home), notes)


def runpod(path: Path, name: str, options: Mapping[str, Any], include: Sequence[str], home: Home) -> Hosted:
    """Read the file of a handler. The project's modules that it imports are sent, and files that match `include`.

    Raises InvalidSpec and InvalidBundle.
    """
    bundle.check_file(path)
    file = path.resolve()
    root, module = import_name(file)
    config, loaded, missing = _run(file, root)
    files = Collector([root])
    for each in (module, *sorted(loaded)):
        files.add(each)
    files.include(root, include)
    files.put(f"{ENTRY}.py", _RUNPOD_ENTRY.format(file=file.relative_to(root).as_posix()).encode())
    function = runpod_handler.as_function(config["handler"], ENTRY)
    notes = list(_missing(missing))
    if "concurrency_modifier" in config:
        notes.append("concurrency_modifier is ignored: a worker runs one job at a time")
    named = {"name": name or _name_of(file.stem)}
    return Hosted(_deployable(function, {**options, **named}, files, file, home), tuple(notes))


def _run(file: Path, root: Path) -> tuple[Mapping[str, Any], frozenset[str], tuple[str, ...]]:
    """Run a file up to `start`, with stand-ins for packages that are not installed here. Return the configuration, the
    modules that it loaded, and the missing packages."""
    before = frozenset(sys.modules)
    import_guard.import_from(root, Path.cwd())
    missing: list[str] = []
    while True:
        try:
            config = runpod_handler.run_file(file)
        except InvalidSpec:
            raise
        except Exception as error:
            package = missing_packages.missing_package(error)
            if package is None:
                reason = bundle.describe_failure(error, file, root) + import_guard.advice(error, root)
                raise InvalidBundle(f"cannot run {file.name}: {reason}") from error
            missing_packages.add_stand_in(package)
            missing_packages.unload_project(root, before)
            missing.append(package)
        else:
            return config, frozenset(sys.modules) - before, tuple(missing)


def _deployable(
    function: Callable[..., Any], options: Mapping[str, Any], files: Collector, file: Path, home: Home
) -> Deployable:
    declared: Function[..., Any, Any] = Function(function, settings_from(options, str(options["name"])))
    made = files.bundle()
    made = replace(made, modules=tuple(module for module in made.modules if module not in _REPLACED))
    spec = declared.spec(Packaging.SOURCE, made.modules, home=home)
    return Deployable(spec, made.digest, made.data, source=source_of_file(file))


def _missing(packages: Sequence[str]) -> tuple[str, ...]:
    return (f"read without {', '.join(packages)}: not installed here",) if packages else ()


def _name_of(text: str) -> str:
    """
    >>> _name_of("My_Handler")
    'my-handler'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].rstrip("-")
