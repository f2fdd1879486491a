"""What a build's process says that it made, as far as it is believed: a stranger's model may be what speaks."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from gpufn_builder.processes.process_messages import MadeEngine
from gpufn_core.domain.engine import BuildStage, EngineIdentity
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import ModelFile


def check(made: MadeEngine, asked: Collection[EngineIdentity], folder: Path) -> None:
    """Raises BuildFailed(stage="publish") unless it is an engine that was `asked` for, whose files lie in the build's
    `folder`: under another EngineKey it would be some other model's, and a file from elsewhere is nobody's to have."""
    manifest = made.manifest
    if manifest.identity not in asked or manifest.key != manifest.identity.key:
        raise BuildFailed("an engine was made that nobody asked for", stage=BuildStage.PUBLISH)
    if not manifest.files:
        raise BuildFailed("an engine was made that has no files", stage=BuildStage.PUBLISH)
    for file in manifest.files:
        if not _is_there(file, Path(made.folder), folder):
            raise BuildFailed(f"{file.name} of the engine is not there as it was told", stage=BuildStage.PUBLISH)


def _is_there(file: ModelFile, engine: Path, folder: Path) -> bool:
    try:
        path = (engine / file.name).resolve(strict=True)
        return path.is_relative_to(folder.resolve()) and path.is_file() and path.stat().st_size == file.size
    except (OSError, RuntimeError):  # no such file; links in a circle
        return False
