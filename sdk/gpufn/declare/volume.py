"""`Volume`: a named, versioned tree of files that functions read and commit to.

A declaration reads no files and no network: a worker declares again when it starts. The node has the newest version in
a folder before the worker starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, NamedTuple

from gpufn_core.errors import ArtifactUnavailable, InvalidInput, InvalidSpec
from gpufn_core.spec.volume_spec import check_name

if TYPE_CHECKING:
    from pathlib import Path  # the import takes 6 ms of a cold start

    from gpufn.volumes.draft import Draft


class Mounted(NamedTuple):
    """The version of a volume that this worker reads."""

    path: str
    version: int


_installed: dict[str, Mounted] | None = None  # in a worker, by name


@dataclass(frozen=True)
class Volume:
    """A named, versioned tree of files. Fill it with `gpufn volume put NAME FOLDER`.

    A function that declares `volumes=Volume("models")` finds the files in `path`: the version that was the newest when
    its worker started. Treat them as read-only. The name belongs to the app of the function; `"env/app/name"` names a
    volume of another app. With `writable`, the function may `commit` files.

    Raises InvalidSpec.

    >>> from gpufn import gpu_function
    >>> MODELS = Volume("models")
    >>> @gpu_function(volumes=MODELS)
    ... def labels() -> list[str]:
    ...     return (MODELS.path / "labels.txt").read_text().splitlines()
    >>> Volume("My models")
    Traceback (most recent call last):
        ...
    gpufn.errors.InvalidSpec: 'My models' is not a name: use a to z, 0 to 9 and hyphens, at most 40 characters, with a \
letter or digit at both ends; or env/app/name
    """

    name: str
    _: KW_ONLY
    writable: bool = False

    def __post_init__(self) -> None:
        check_name(self.name)
        if not isinstance(self.writable, bool):
            raise InvalidSpec(f"volume: writable is True or False, not {self.writable!r}")

    @property
    def path(self) -> Path:
        """The folder with the files, in a worker. Raises ArtifactUnavailable elsewhere."""
        from pathlib import Path  # noqa: PLC0415

        return Path(self._mounted.path)

    @property
    def version(self) -> int:
        """The number of the version in `path`. Raises ArtifactUnavailable outside of a worker."""
        return self._mounted.version

    @property
    def draft(self) -> Path:
        """An empty folder of this worker, for the files of the next `commit`. Raises InvalidInput unless the volume is
        declared with writable=True."""
        return _draft_of(self).folder

    def remove(self, path: str) -> None:
        """Let the next `commit` remove a file; with a slash at the end, a folder. Raises InvalidInput like `draft`."""
        _draft_of(self).removed.append(path)

    def commit(self) -> int:
        """Publish the files of `draft`, without the removed ones, as a new version, and empty `draft`. Return the
        number of the version.

        The other files of the newest version stay. Workers that start later read the new version; `path` stays as it
        is. Commits at the same time all take effect; of two that write one path, the later one stays. Raises
        InvalidInput for files that cannot be stored, PayloadTooLarge and Conflict for limits, PlatformError.
        """
        from gpufn.data.channel import of_worker  # noqa: PLC0415
        from gpufn.volumes.commit import commit  # noqa: PLC0415

        draft = _draft_of(self)
        with draft.lock:
            version = commit(of_worker(), self.name, draft.folder, draft.removed)
            draft.empty()
        return version.number

    @property
    def _mounted(self) -> Mounted:
        if _installed is None:
            raise ArtifactUnavailable(
                f"the volume {self.name} is on the nodes: in this process, use the function with .remote, or copy the "
                f"files with `gpufn volume get {self.name}`"
            )
        if (mounted := _installed.get(self.name)) is None:
            raise ArtifactUnavailable(f"{self.name} is not among the volumes of this function: add it to volumes=")
        return mounted


def install(volumes: Mapping[str, Mounted]) -> None:
    """Set the volumes of this worker's function."""
    global _installed  # noqa: PLW0603  one function per process
    _installed = dict(volumes)


def _draft_of(volume: Volume) -> Draft:
    if _installed is None:
        raise InvalidInput(f"only a worker changes the volume {volume.name}: elsewhere, use `gpufn volume put`")
    if not volume.writable:
        raise InvalidInput(f"declare Volume({volume.name!r}, writable=True) to change it")
    from gpufn.volumes.draft import draft_of  # noqa: PLC0415  most functions commit to none

    return draft_of(volume.name)
