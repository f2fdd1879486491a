"""Hatch metadata hook: version and requirements of `gpufn-platform`, from the pyproject.toml of the repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_EXTRAS = ("docker", "gpu", "grpc")
_OWN_EXTRAS = re.compile(r"gpufn\[([\w,]+)\]")


class PlatformMetadata(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        project = tomllib.loads(Path(self.root).parent.joinpath("pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        metadata["version"] = project["version"]
        metadata["dependencies"] = [f"gpufn=={project['version']}", *_requirements(extras, "local")]
        metadata["optional-dependencies"] = {name: extras[name] for name in _EXTRAS}


def _requirements(extras: dict[str, list[str]], name: str) -> list[str]:
    """Return the third-party requirements of an extra, and of the extras that it names."""
    requirements: dict[str, None] = {}
    for requirement in extras[name]:
        if match := _OWN_EXTRAS.fullmatch(requirement):
            for part in match[1].split(","):
                requirements |= dict.fromkeys(_requirements(extras, part))
        else:
            requirements[requirement] = None
    return list(requirements)
