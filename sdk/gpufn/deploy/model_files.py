"""Files of a Model at deploy, and their digests.

1. `external_data` reads the names of the weight files from the ONNX file
2. each file is hashed as a stream; a ModelSpec names the files by digest
3. `Client.put_artifact` uploads the files that the gateway does not have, from the paths in `PreparedModel`
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpufn.declare.model import Model
from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.model_spec import ModelFile, ModelSpec

# A serialized StringStringEntryProto: field 1 is the key "location", field 2 the file's name, with its length in one or
# two bytes before it. A scan for this pattern avoids a dependency on the ONNX package.
_LOCATION = re.compile(rb"\x0a\x08location\x12(?:([\x01-\x7f])|([\x80-\xff])([\x01-\x1f]))")


class PreparedModel(NamedTuple):
    """A model with the digests of its files, and the local path of each digest's file."""

    spec: ModelSpec
    paths: dict[str, Path]


def prepare(parameter: str, model: Model, folder: Path) -> PreparedModel:
    """Hash the files of `model`, relative to `folder`. Raises InvalidSpec if a file is missing."""
    onnx = folder / model.path
    declared = [folder / name for name in model.files] if model.files is not None else None
    if not onnx.is_file():
        raise InvalidSpec(f"{parameter}: there is no file {onnx}")
    paths: dict[str, Path] = {}

    weights_note = "" if declared is not None else f", which holds the weights of {onnx.name}"

    def hash_file(path: Path, note: str = weights_note) -> ModelFile:
        if not path.is_file():
            raise InvalidSpec(f"{parameter}: there is no file {path}{note}")
        file = file_of(path)
        paths[file.digest] = path
        return file

    weights = declared if declared is not None else [onnx.parent / name for name in external_data(onnx)]
    files = tuple(map(hash_file, [onnx, *weights]))
    samples = None if model.samples is None else hash_file(folder / model.samples, ", which samples names")
    return PreparedModel(model.spec(parameter, files, samples), paths)


def external_data(onnx: Path) -> list[str]:
    """Return the names of the ONNX file's external data files, without duplicates, in order.

    Raises InvalidSpec for a name that leaves the model's folder.
    """
    names = list(dict.fromkeys(_locations(onnx)))
    for name in names:
        ModelFile(name, "0" * 64, 0)
    return names


def file_of(path: Path) -> ModelFile:
    """Return a file's name, digest and size. Reads the file as a stream."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return ModelFile(path.name, digest, os.fstat(file.fileno()).st_size)


def folder_of(declared: Any) -> Path:
    """Return the folder where a function's relative paths start: its module's folder, else the working folder."""
    file = getattr(sys.modules.get(declared.__module__), "__file__", None)
    return Path(file).resolve().parent if file else Path.cwd()


def prepare_all(models: Mapping[str, Model], folder: Path) -> tuple[PreparedModel, ...]:
    return tuple(prepare(parameter, model, folder) for parameter, model in models.items())


def _locations(onnx: Path) -> Iterator[str]:
    if onnx.stat().st_size == 0:
        return
    with onnx.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for match in _LOCATION.finditer(data):
            short, low, high = match.groups()
            length = short[0] if short else (low[0] & 0x7F) | high[0] << 7
            yield data[match.end() : match.end() + length].decode(errors="replace")
