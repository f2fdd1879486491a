"""Volumes: named, versioned trees of files. Pure.

A version is a manifest: the path, size, mode and sha256 of each file. A function declares `Volume`, which becomes a
VolumeMount in its spec; the node reads the newest version when a worker starts. A VolumeChange is the additions and
removals of a commit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Final

import msgspec

from gpufn_core.errors import Conflict, InvalidInput, InvalidSpec
from gpufn_core.ids import is_digest
from gpufn_core.protocol.limits import LARGEST_INTEGER
from gpufn_core.spec.file_tree import TreeFile, check_path, check_paths, digest_of_tree, sizes_of_tree
from gpufn_core.spec.naming import names

MAX_VOLUMES: Final = 16  # per function
MAX_FILES: Final = 10_000  # per version
MAX_VERSIONS: Final = 20  # per volume; a commit drops older ones
MODE: Final = 0o644
EXECUTABLE: Final = 0o755
EXECUTABLE_KEY: Final = "-x"  # the end of the key of an executable file
_WHAT: Final = "volume"
_NAME: Final = re.compile(rf"{names.FULL_NAME.pattern}|{names.DEFAULT}/{names.DEFAULT}/{names.BASE_NAME.pattern}")


class VolumeMount(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A volume that a function uses. `name` is as declared; the app of the function completes it."""

    name: str
    writable: bool = False

    def __post_init__(self) -> None:
        check_name(self.name)


class VolumeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One file of a volume. `digest` is its sha256. Only the right to execute is kept of the mode."""

    path: str
    size: int
    digest: str
    mode: int = MODE

    def __post_init__(self) -> None:
        check_path(self.path, _WHAT)
        if not 0 <= self.size <= LARGEST_INTEGER:
            raise InvalidSpec(f"volume: the size of {self.path} is from 0 to less than 8 EiB, not {self.size}")
        if not is_digest(self.digest):
            raise InvalidSpec(f"volume: {self.path}: {self.digest[:80]!r} is not a sha256")
        if self.mode not in (MODE, EXECUTABLE):
            raise InvalidSpec(f"volume: the mode of {self.path} is {MODE} (0o644) or {EXECUTABLE} (0o755)")


class VolumeTree(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The files of one version. It is a `gpufn_core.spec.file_tree.FileTree`."""

    volume: str  # the full name
    version: int
    files: tuple[VolumeFile, ...]

    def __post_init__(self) -> None:
        if len(self.files) > MAX_FILES:
            raise InvalidSpec(
                f"volume: {self.volume} would have {len(self.files):,} files, more than the {MAX_FILES:,} allowed: put "
                "many small files into an archive, or use several volumes"
            )
        check_paths(self.volume, [file.path for file in self.files], _WHAT)

    @property
    def title(self) -> str:
        """The version, as messages name it."""
        return f"volume {self.volume} (version {self.version})"

    @property
    def source(self) -> str:
        return source_of(self.volume, self.version)

    @property
    def commit(self) -> str:
        return ""

    @property
    def is_file(self) -> bool:
        return False

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
        """Return the name of a file's content on a node's disk: an executable file has its own inode."""
        return f"{file.digest}{EXECUTABLE_KEY}" if getattr(file, "mode", MODE) == EXECUTABLE else file.digest


class VolumeChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The files that a commit adds, replaces and removes. A path in `remove` that ends with a slash is a whole folder;
    `/` is everything. With `base`, the commit fails unless that is the newest version; 0 means that there is none."""

    put: tuple[VolumeFile, ...] = ()
    remove: tuple[str, ...] = ()
    base: Annotated[int, msgspec.Meta(ge=0)] | None = None


def changed(volume: str, version: int, files: Iterable[VolumeFile], change: VolumeChange) -> VolumeTree:
    """Return the next version. Raises InvalidSpec; InvalidInput if a path to remove does not exist.

    >>> a, b = VolumeFile("a", 1, "0" * 64), VolumeFile("d/b", 1, "1" * 64)
    >>> [file.path for file in changed("v", 2, [a, b], VolumeChange((VolumeFile("c", 1, "2" * 64),), ("d/",))).files]
    ['a', 'c']
    """
    kept: dict[str, VolumeFile] = {file.path: file for file in files}
    added = [file.path for file in change.put]
    for path in change.remove:
        gone = [known for known in kept if _is_removed(known, path)]
        if not gone and path != "/" and not any(_is_removed(known, path) for known in added):
            raise InvalidInput(f"{volume} has no file {path[:200]!r}: see `gpufn volume ls {volume}`", field="remove")
        for known in gone:
            del kept[known]
    if len(set(added)) < len(added):
        raise InvalidSpec(f"volume: {volume} names a file twice")
    kept |= {file.path: file for file in change.put}
    return VolumeTree(volume, version, tuple(kept[path] for path in sorted(kept)))


def _is_removed(path: str, removed: str) -> bool:
    return path == removed or (removed.endswith("/") and (removed == "/" or path.startswith(removed)))


class VolumeVersion(msgspec.Struct, frozen=True):
    """A version as its volume's record lists it. `manifest` is the digest of the list of files."""

    number: int
    manifest: str
    files: int
    bytes: int
    created_at: float


class VolumeRecord(msgspec.Struct, frozen=True):
    """A volume: its newest versions, oldest first. `stored_bytes`: the contents of all of them, each once."""

    name: str
    versions: tuple[VolumeVersion, ...]
    stored_bytes: int = 0

    @property
    def newest(self) -> VolumeVersion:
        return self.versions[-1]

    def version(self, number: int | None) -> VolumeVersion | None:
        """Return a version by its number, the newest for None."""
        if number is None:
            return self.newest
        return next((version for version in self.versions if version.number == number), None)


def check_base(name: str, record: VolumeRecord | None, change: VolumeChange) -> None:
    """Raises Conflict if the newest version is not the version that the change expects."""
    newest = 0 if record is None else record.newest.number
    if change.base is not None and change.base != newest:
        error = Conflict(f"{name} has version {newest} now, not {change.base}: read it again, then commit")
        error.retryable = False
        raise error


def encode_files(tree: VolumeTree) -> bytes:
    """Return the manifest of a version, as it is stored."""
    return msgspec.json.encode(tree.files)


_files = msgspec.json.Decoder(tuple[VolumeFile, ...])


def decode_files(manifest: bytes) -> tuple[VolumeFile, ...]:
    return _files.decode(manifest)


def source_of(volume: str, version: int | str) -> str:
    """Return how reports name a version. With "", return the start of the names of all versions.

    >>> source_of("prod/search/models", 3)
    'volume://prod/search/models@3'
    """
    return f"volume://{volume}@{version}"


def check_name(name: str) -> None:
    """Raise InvalidSpec unless `name` can name a volume, a dict or a queue.

    >>> check_name("models"), check_name("prod/search/models"), check_name("default/default/models")
    (None, None, None)
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise InvalidSpec(
            f"{str(name)[:130]!r} is not a name: use a to z, 0 to 9 and hyphens, at most 40 characters, with a letter "
            "or digit at both ends; or env/app/name"
        )


def full_name_at(name: str, home: names.Home) -> str:
    """Return the full name of the object that code in `home` calls `name`.

    >>> home = names.Home("prod", "search")
    >>> [full_name_at(name, home) for name in ("models", "dev/ads/models", "default/default/models")]
    ['prod/search/models', 'dev/ads/models', 'models']
    """
    return names.canonical(name) if "/" in name else names.full_name(*home, name)


def check_mounts(mounts: Iterable[VolumeMount]) -> None:
    """Check the volumes of a function. Raises InvalidSpec."""
    declared = [mount.name for mount in mounts]
    if len(declared) > MAX_VOLUMES:
        raise InvalidSpec(f"{len(declared)} volumes are more than the {MAX_VOLUMES} allowed")
    if len(set(declared)) < len(declared):
        raise InvalidSpec("a function declares each volume once")


def stored_bytes(manifests: Iterable[Iterable[VolumeFile]]) -> int:
    """Return the bytes of all contents that versions name, each once."""
    sizes: Mapping[str, int] = {file.digest: file.size for files in manifests for file in files}
    return sum(sizes.values())
