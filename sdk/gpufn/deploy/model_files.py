"""A Model's files at deploy: which they are, and their digests.

1. `external_data` reads from the ONNX file which files beside it hold its weights
2. each file is hashed as a stream; a ModelSpec names them by digest
3. `Client.put_artifact` uploads those that the gateway lacks, from where `Prepared` says that they lie
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

# A StringStringEntryProto as every protobuf writer makes it: field 1 is the key "location", field 2 the file's name,
# after its length in one or two bytes. Read like this, the SDK needs no ONNX package, and no more than a scan.
_LOCATION = re.compile(rb"\x0a\x08location\x12(?:([\x01-\x7f])|([\x80-\xff])([\x01-\x1f]))")


class Prepared(NamedTuple):
    """A model with the digests of its files, and where on this machine each digest's file lies."""

    spec: ModelSpec
    paths: dict[str, Path]


def prepare(parameter: str, model: Model, folder: Path) -> Prepared:
    """Hash the files of `model`, whose paths start from `folder`. Raises InvalidSpec when one is missing."""
    onnx = folder / model.path
    listed = [folder / name for name in model.files] if model.files is not None else None
    if not onnx.is_file():
        raise InvalidSpec(f"{parameter}: there is no file {onnx}")
    paths: dict[str, Path] = {}

    keeps = "" if listed is not None else f": {onnx.name} keeps its weights there"

    def hashed(path: Path, why: str = keeps) -> ModelFile:
        if not path.is_file():
            raise InvalidSpec(f"{parameter}: there is no file {path}{why}")
        file = file_of(path)
        paths[file.digest] = path
        return file

    beside = listed if listed is not None else [onnx.parent / name for name in external_data(onnx)]
    files = tuple(map(hashed, [onnx, *beside]))
    samples = None if model.samples is None else hashed(folder / model.samples, ", which samples names")
    return Prepared(model.spec(parameter, files, samples), paths)


def external_data(onnx: Path) -> list[str]:
    """The names of the files that the ONNX file gives as the location of external data, each once, in its order.

    Raises InvalidSpec for a name that leaves the model's folder.
    """
    names = list(dict.fromkeys(_locations(onnx)))
    for name in names:
        ModelFile(name, "0" * 64, 0)
    return names


def file_of(path: Path) -> ModelFile:
    """Its name, digest and size; read as a stream."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return ModelFile(path.name, digest, os.fstat(file.fileno()).st_size)


def folder_of(declared: Any) -> Path:
    """Where a function's relative paths start: beside the file of its module, or here when it has none."""
    file = getattr(sys.modules.get(declared.__module__), "__file__", None)
    return Path(file).resolve().parent if file else Path.cwd()


def prepare_all(models: Mapping[str, Model], folder: Path) -> tuple[Prepared, ...]:
    return tuple(prepare(parameter, model, folder) for parameter, model in models.items())


def _locations(onnx: Path) -> Iterator[str]:
    if onnx.stat().st_size == 0:
        return
    with onnx.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for match in _LOCATION.finditer(data):
            short, low, high = match.groups()
            length = short[0] if short else (low[0] & 0x7F) | high[0] << 7
            yield data[match.end() : match.end() + length].decode(errors="replace")
