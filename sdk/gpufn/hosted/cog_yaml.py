"""The file `cog.yaml`: where the predictor is, and the options of its function."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpufn_core.errors import InvalidSpec

_TARGET: Final = re.compile(r"(?P<file>[^:]+\.py):(?P<target>[A-Za-z_]\w*)")
# Keys of `build` for which the node, or an image, has to provide.
_NOT_BUILT: Final = ("python_packages", "python_requirements", "system_packages", "run", "pre_install")


class CogYaml(NamedTuple):
    file: Path
    target: str
    name: str
    options: dict[str, Any]
    notes: tuple[str, ...]


def read(path: Path) -> CogYaml:
    """Read the file. Raises InvalidSpec."""
    try:
        import yaml  # noqa: PLC0415  an extra
    except ImportError:
        raise InvalidSpec("reading cog.yaml needs PyYAML: pip install 'gpufn[cog]'") from None
    try:
        config = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise InvalidSpec(f"there is no {path}: pass the folder of a cog project") from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidSpec(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise InvalidSpec(f"{path} is not a mapping")
    build = config.get("build") or {}
    entry = config.get("predict") or config.get("run")
    found = _TARGET.fullmatch(entry) if isinstance(entry, str) else None
    if found is None or not isinstance(build, dict):
        raise InvalidSpec(f'{path} needs a predictor, as in  predict: "predict.py:Predictor"')
    options: dict[str, Any] = {"gpu": "any"} if build.get("gpu") else {}
    concurrency = config.get("concurrency")
    if isinstance(concurrency, dict) and isinstance(concurrency.get("max"), int):
        options["concurrency"] = concurrency["max"]
    image = config.get("image")
    name = image.rpartition("/")[2].partition(":")[0] if isinstance(image, str) else ""
    missing = [key for key in _NOT_BUILT if build.get(key)]
    notes: tuple[str, ...] = ()
    if missing:
        notes = (f"build.{', build.'.join(missing)} of {path.name} is not installed: the nodes must have it",)
    return CogYaml(path.parent / found["file"], found["target"], name, options, notes)
