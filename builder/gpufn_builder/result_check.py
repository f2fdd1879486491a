"""Checks of a build process's result. It is not trusted, because a hostile model may have taken the process over."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from gpufn_builder.processes.process_messages import BuiltEngine
from gpufn_core.domain.devices.engine import BuildStage, EngineIdentity
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import ModelFile


def check(built: BuiltEngine, requested: Collection[EngineIdentity], folder: Path) -> None:
    """Check that the engine is one of the `requested` ones and that its files are in the build's `folder`. Under
    another EngineKey it would replace an engine of another model, and a file from elsewhere may be secret.

    Raises BuildFailed(stage="publish").
    """
    manifest = built.manifest
    if manifest.identity not in requested or manifest.key != manifest.identity.key:
        raise BuildFailed("the build produced an engine that was not requested", stage=BuildStage.PUBLISH)
    if not manifest.files:
        raise BuildFailed("the build produced an engine without files", stage=BuildStage.PUBLISH)
    for file in manifest.files:
        if not _is_present(file, Path(built.folder), folder):
            raise BuildFailed(
                f"the file {file.name} of the engine is missing or not as reported", stage=BuildStage.PUBLISH
            )


def _is_present(file: ModelFile, engine: Path, folder: Path) -> bool:
    try:
        path = (engine / file.name).resolve(strict=True)
        return path.is_relative_to(folder.resolve()) and path.is_file() and path.stat().st_size == file.size
    except (OSError, RuntimeError):  # a missing file; a loop of links
        return False
