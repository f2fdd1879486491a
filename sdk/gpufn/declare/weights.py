"""`Weights`: declares files that workers read, such as the weights of a large model.

A declaration reads no files and no network: a worker declares again when it starts. The files become known at deploy
(`gpufn.deploy.weights.files`), and the node that starts a worker has them in a folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from gpufn_core.errors import ArtifactUnavailable, InvalidSpec
from gpufn_core.spec.weights_spec import LOCAL, parse_source

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path  # the import takes 6 ms of a cold start

_Declaration = tuple[str, tuple[str, ...], tuple[str, ...]]

_installed: dict[_Declaration, str] | None = None  # in a worker: the path of each declaration


@dataclass(frozen=True)
class Weights:
    """Files that a node fetches once and keeps for all its workers, such as the weights of a large model.

    `source` is a repository of the Hugging Face Hub (`"hf://org/model@revision"`), a folder in an S3 bucket
    (`"s3://bucket/folder"`), or a local path, relative to the file that creates the Weights. A source can also be one
    file. `include` and `exclude` select files by patterns, such as `["*.safetensors", "*.json"]`; a `*` also matches
    slashes.

    A deploy records the name, size and digest of each file. A worker starts when its node has exactly these files.

    Raises InvalidSpec, which names the wrong option.

    >>> from gpufn import gpu_function
    >>> LLAMA = Weights("hf://org/llama@v1.0", include=["*.safetensors", "*.json"])
    >>> @gpu_function(gpu="H100", weights=LLAMA)
    ... def generate(prompt: str) -> str:
    ...     return f"{LLAMA.path}/config.json"
    >>> Weights("gs://bucket/llama")
    Traceback (most recent call last):
        ...
    gpufn.errors.InvalidSpec: weights: 'gs://bucket/llama' starts with gs://: a source is hf://, s3:// or a local path
    """

    source: str
    _: KW_ONLY
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    folder: str = field(default="", init=False, compare=False, repr=False)  # where a relative path starts

    def __post_init__(self) -> None:
        source = os.fspath(self.source) if isinstance(self.source, os.PathLike) else self.source
        if not isinstance(source, str):
            raise InvalidSpec(f"weights: a source is text, such as 'hf://org/model@revision', not {self.source!r}")
        parse_source(source)
        caller = sys._getframe(2).f_globals.get("__file__")
        set_field = object.__setattr__  # the dataclass is frozen
        set_field(self, "source", source)
        set_field(self, "include", _patterns("include", self.include))
        set_field(self, "exclude", _patterns("exclude", self.exclude))
        set_field(self, "folder", os.path.dirname(os.path.abspath(caller)) if caller else os.getcwd())

    @property
    def declaration(self) -> _Declaration:
        return self.source, tuple(self.include), tuple(self.exclude)

    @property
    def path(self) -> Path:
        """The folder of the files, or the file if the source is one file. Treat it as read-only.

        Outside of a worker, this is the local path; other sources have none and raise ArtifactUnavailable.
        """
        from pathlib import Path  # noqa: PLC0415

        if _installed is not None:
            if (path := _installed.get(self.declaration)) is None:
                raise ArtifactUnavailable(
                    f"{self.source} is not among the weights of this function: add it to weights="
                )
            return Path(path)
        if parse_source(self.source).scheme != LOCAL:
            raise ArtifactUnavailable(
                f"{self.source} is fetched by the nodes: in this process, use the function with .remote, or declare a "
                "local path"
            )
        return self.local_path

    @property
    def local_path(self) -> Path:
        """The path of a local source on this machine."""
        from pathlib import Path  # noqa: PLC0415

        return Path(self.folder, self.source)


def install(paths: Mapping[_Declaration, str]) -> None:
    """Set the paths of the weights of this worker's function."""
    global _installed  # noqa: PLW0603  one function per process
    _installed = dict(paths)


def _patterns(option: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(pattern, str) and pattern for pattern in value):
        raise InvalidSpec(f"weights: {option} is a list of patterns, such as ['*.safetensors'], not {value!r}")
    return tuple(value)
