"""The files of Weights at deploy: their paths, sizes and digests.

local path   each file is hashed as a stream, and uploaded like a model's file
hf://        the revision becomes a commit; the hub knows the sha256 of large files, and small ones are read here
s3://        the store knows sizes and etags, and the sha256 of objects that were uploaded with one

Hidden files, such as `.gitattributes`, are skipped.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gpufn.declare.weights import Weights
from gpufn.deploy.model_files import file_of
from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.weights_spec import HUB, LOCAL, WeightsFile, WeightsSpec, check_count, parse_source
from gpufn_core.weights import safetensors


class PreparedWeights(NamedTuple):
    """Weights with their manifest, and the local path of each digest's file, if the files have to be uploaded."""

    spec: WeightsSpec
    paths: dict[str, Path]


def prepare_each(declared: Iterable[Weights]) -> dict[Weights, PreparedWeights]:
    """Find out the files of each Weights, once. Raises InvalidSpec and ArtifactUnavailable."""
    return {weights: prepare(weights) for weights in dict.fromkeys(declared)}


def prepare(weights: Weights) -> PreparedWeights:
    source = parse_source(weights.source)
    if source.scheme == LOCAL:
        return _prepare_local(weights)
    from gpufn.deploy.weights import origins  # noqa: PLC0415  (only deploys of such weights need httpx this early)

    found = origins.hub_files(source) if source.scheme == HUB else origins.s3_files(source)
    files = [file for file in found.files if found.is_file or is_selected(file.path, weights.include, weights.exclude)]
    with_digests = origins.add_digests(source, found, files)
    return PreparedWeights(_spec(weights, with_digests, commit=found.commit, is_file=found.is_file), {})


def is_selected(path: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Return whether the patterns select a file.

    >>> is_selected("fp16/model.safetensors", ["*.safetensors"], []), is_selected(".gitattributes", [], [])
    (True, False)
    """
    if any(part.startswith(".") for part in path.split("/")):
        return False
    is_included = not include or any(fnmatch.fnmatchcase(path, pattern) for pattern in include)
    return is_included and not any(fnmatch.fnmatchcase(path, pattern) for pattern in exclude)


def _prepare_local(weights: Weights) -> PreparedWeights:
    root = weights.local_path
    is_file = root.is_file()
    if not is_file and not root.is_dir():
        raise InvalidSpec(f"weights: there is no file or folder {root}")
    files, paths = [], {}
    try:
        for name in [root.name] if is_file else _selected(root, weights):
            path = root if is_file else root / name
            if not path.is_file():
                raise InvalidSpec(f"weights: {path} is no file, or a link to none: remove it, or use exclude=[...]")
            hashed = file_of(path)
            _check_layout(path, hashed.size)
            files.append(WeightsFile(name, hashed.size, hashed.digest))
            paths[hashed.digest] = path
    except OSError as error:
        raise InvalidSpec(
            f"weights: cannot read {error.filename}: {error.strerror}: make it readable, or remove it"
        ) from error
    return PreparedWeights(_spec(weights, files, is_file=is_file), paths)


def _selected(root: Path, weights: Weights) -> list[str]:
    """Return the selected files below `root`. Raises InvalidSpec for too many, before they are hashed; and OSError."""
    below = (path.relative_to(root).as_posix() for path in _walk(root))
    names = [name for name in below if is_selected(name, weights.include, weights.exclude)]
    check_count(weights.source, len(names))
    return sorted(names)


def _walk(folder: Path, above: tuple[tuple[int, int], ...] = ()) -> Iterator[Path]:
    """Yield the files below `folder`, except files in hidden folders. Links are followed, as in the caches of model
    hubs, but not to a folder `above`, given by device and inode."""
    status = folder.stat()
    identity = status.st_dev, status.st_ino
    if identity in above:
        return
    for path in folder.iterdir():
        if not path.is_dir():
            yield path
        elif not path.name.startswith("."):
            yield from _walk(path, (*above, identity))


def _check_layout(path: Path, size: int) -> None:
    if path.suffix == safetensors.SUFFIX:
        with path.open("rb") as file:
            if (damage := safetensors.damage_of(file, size)) is not None:
                raise InvalidSpec(f"weights: {path} is not a complete safetensors file: {damage}")


def _spec(weights: Weights, files: Sequence[WeightsFile], *, commit: str = "", is_file: bool = False) -> WeightsSpec:
    source, include, exclude = weights.declaration
    return WeightsSpec(
        source=source, include=include, exclude=exclude, commit=commit, is_file=is_file, files=tuple(files)
    )
