"""WeightsSpec: the manifest of a function's weights, with the size and digest of each file.

A user writes `Weights`, which becomes a WeightsSpec at deploy, when the files are known (`gpufn.declare.weights`).
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from gpufn_core.errors import InvalidSpec
from gpufn_core.ids import is_digest
from gpufn_core.protocol.limits import LARGEST_INTEGER
from gpufn_core.spec.file_tree import TreeFile, check_path, check_paths, digest_of_tree, sizes_of_tree

MAX_WEIGHTS = 16  # per function
MAX_FILES = 1000  # per Weights; the manifest is part of the revision's record
_WHAT = "weights"
_LONGEST_SOURCE = 1000
_LONGEST_ETAG = 200
_REPO = re.compile(r"[A-Za-z0-9_.-]{1,96}(?:/[A-Za-z0-9_.-]{1,96})?")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_COMMIT = re.compile(r"[0-9a-f]{40}")

LOCAL, HUB, S3 = "", "hf", "s3"


class Source(NamedTuple):
    """The parts of a source. `place` is a local path, a repository or a bucket; `path` is a file or folder in it."""

    scheme: str
    place: str
    path: str = ""
    revision: str = ""

    def file_path(self, name: str, *, is_file: bool) -> str:
        """Return the path in the place of the file `name` below `path`. With `is_file`, `path` is the file."""
        return self.path if is_file else "/".join(filter(None, (self.path, name)))


def parse_source(source: str) -> Source:
    """Split the source of weights into its parts. Raises InvalidSpec.

    >>> parse_source("hf://org/model@v1.0/fp16")
    Source(scheme='hf', place='org/model', path='fp16', revision='v1.0')
    >>> parse_source("s3://bucket/models/llama/"), parse_source("./weights").scheme
    (Source(scheme='s3', place='bucket', path='models/llama', revision=''), '')
    """
    if not source or len(source) > _LONGEST_SOURCE or "\0" in source:
        raise InvalidSpec(
            f"weights: {source[:80]!r} is not a source: write 'hf://org/model', 's3://bucket/folder' or a path"
        )
    scheme, separator, rest = source.partition("://")
    if not separator:
        return Source(LOCAL, source)
    if scheme == HUB:
        return _parse_repository(source, rest)
    if scheme == S3:
        bucket, _, path = rest.partition("/")
        path = path.rstrip("/")
        if path:
            check_path(path, _WHAT)
        if _BUCKET.fullmatch(bucket) is None:
            raise InvalidSpec(f"weights: {source!r} does not name a bucket: write 's3://bucket/folder'")
        return Source(S3, bucket, path)
    raise InvalidSpec(f"weights: {source!r} starts with {scheme}://: a source is hf://, s3:// or a local path")


def _parse_repository(source: str, rest: str) -> Source:
    """Parse `org/model@revision/path`. A slash in the name of a revision is written as %2F."""
    parts = rest.split("/")
    repository, at, revision = "/".join(parts[:2]).partition("@")
    path = "/".join(parts[2:]).strip("/")
    if _REPO.fullmatch(repository) is None or repository.count("/") != 1 or (at and not revision):
        raise InvalidSpec(f"weights: {source!r} does not name a repository: write 'hf://org/model@revision'")
    if path:
        check_path(path, _WHAT)
    return Source(HUB, repository, path, revision.replace("%2F", "/").replace("%2f", "/") or "main")


class WeightsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One file of weights. `digest` is its sha256. A store that knows none identifies the content by an `etag`."""

    path: str  # relative, with forward slashes
    size: int
    digest: str = ""
    etag: str = ""

    def __post_init__(self) -> None:
        check_path(self.path, _WHAT)
        if not 0 <= self.size <= LARGEST_INTEGER:
            raise InvalidSpec(f"weights: the size of {self.path} is from 0 to less than 8 EiB, not {self.size}")
        if self.digest and not is_digest(self.digest):
            raise InvalidSpec(f"weights: {self.path}: {self.digest[:80]!r} is not a sha256")
        if not self.digest and not self.etag:
            raise InvalidSpec(f"weights: {self.path} has neither a sha256 nor an etag")
        if len(self.etag) > _LONGEST_ETAG or not self.etag.isascii() or not self.etag.isprintable():
            raise InvalidSpec(f"weights: {self.path}: {self.etag[:80]!r} is not an etag of printable ASCII")


class WeightsSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, dict=True):
    """The weights of a function: the declaration, and its resolved form at the deploy.

    `source`, `include` and `exclude` are as declared. `commit` is the commit of the repository. With `is_file`, the
    source is one file instead of a folder.
    """

    source: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    commit: str = ""
    is_file: bool = False
    files: tuple[WeightsFile, ...]

    def __post_init__(self) -> None:
        scheme = parse_source(self.source).scheme
        if not self.files:
            raise InvalidSpec(f"weights: {self.source} has no files, or include and exclude select none of them")
        check_count(self.source, len(self.files))
        if self.size > LARGEST_INTEGER:
            raise InvalidSpec(f"weights: the files of {self.source} have 8 EiB or more together")
        check_paths(self.source, [file.path for file in self.files], _WHAT)
        if self.is_file and (len(self.files) != 1 or "/" in self.files[0].path):
            raise InvalidSpec(f"weights: {self.source} is a file, but its manifest is not that of one file")
        if scheme != S3 and not all(file.digest for file in self.files):
            raise InvalidSpec(f"weights: a file of {self.source} lacks its sha256")
        if (_COMMIT.fullmatch(self.commit) is not None) != (scheme == HUB):
            raise InvalidSpec(f"weights: {self.source} is pinned to {self.commit[:80]!r}, which is not a commit of it")

    @property
    def title(self) -> str:
        """The weights, as messages name them."""
        return f"weights {self.source}"

    @property
    def declaration(self) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        """The key by which a worker finds the folder of a `Weights`."""
        return self.source, self.include, self.exclude

    @functools.cached_property
    def digest(self) -> str:
        return digest_of_tree(self)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        return sizes_of_tree(self)

    @property
    def size(self) -> int:
        return sum(self.sizes.values())

    def key(self, file: TreeFile, /) -> str:
        """Return the name of a file's content: its sha256, or a digest of the place and the etag."""
        if file.digest:
            return file.digest
        etag = getattr(file, "etag", "")
        return hashlib.sha256(f"{self.source}\0{file.path}\0{etag}\0{file.size}".encode()).hexdigest()

    def origin_path(self, file: WeightsFile) -> str:
        """Return the path of a file in its repository or bucket."""
        return parse_source(self.source).file_path(file.path, is_file=self.is_file)

    @property
    def uploads(self) -> tuple[WeightsFile, ...]:
        """The files of a local path, which the platform's store has."""
        return self.files if parse_source(self.source).scheme == LOCAL else ()


def check_count(source: str, files: int) -> None:
    """Check the number of files of one Weights. Raises InvalidSpec."""
    if files > MAX_FILES:
        raise InvalidSpec(
            f"weights: {source} has {files} files, more than the {MAX_FILES} allowed: "
            "select some with include=['*.safetensors', '*.json']"
        )


def check_weights(weights: Iterable[WeightsSpec]) -> None:
    """Check all weights of a function. Raises InvalidSpec."""
    declared = [each.declaration for each in weights]
    if len(declared) > MAX_WEIGHTS:
        raise InvalidSpec(f"{len(declared)} weights are more than the {MAX_WEIGHTS} allowed")
    if len(set(declared)) < len(declared):
        raise InvalidSpec("two weights have the same source: a function declares each of them once")
