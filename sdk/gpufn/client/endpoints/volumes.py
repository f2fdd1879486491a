"""Volume endpoints of `Client`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpufn.client.http import JSON_BODY, Requests
from gpufn_core.encoding import media
from gpufn_core.errors import PayloadTooLarge
from gpufn_core.spec.units import format_bytes
from gpufn_core.spec.volume_spec import VolumeChange, VolumeFile, VolumeRecord, VolumeTree, VolumeVersion

if TYPE_CHECKING:
    from gpufn.volumes.progress import Progress


class VolumeRequests(Requests):
    """Volume endpoints. A name without an environment is in the client's environment, or in `default`."""

    def volumes(self) -> list[VolumeRecord]:
        """List the volumes by name."""
        return self._member(list[VolumeRecord], "volumes", "GET", "/v1/volumes")

    def volume(self, name: str) -> VolumeRecord:
        """Return a volume and its kept versions. Raises DataNotFound."""
        return self._json(VolumeRecord, "GET", self._volume_url(name))

    def volume_tree(self, name: str, version: int | None = None) -> VolumeTree:
        """List the files of a version, by default of the newest. Raises DataNotFound."""
        params = {} if version is None else {"version": str(version)}
        return self._json(VolumeTree, "GET", f"{self._volume_url(name)}/tree", params=params)

    def missing_volume_files(self, name: str, digests: Sequence[str]) -> list[str]:
        """Return which files, at most 1,000 by their sha256, have to be uploaded before a commit names them."""
        body = msgspec.json.encode({"digests": digests})
        path = f"{self._volume_url(name)}/missing"
        return self._member(list[str], "missing", "POST", path, content=body, headers=JSON_BODY)

    def put_volume_file(self, name: str, digest: str, chunks: Iterable[bytes], size: int) -> None:
        """Upload a file for a commit. `chunks` is iterated again after a lost connection."""
        headers = {"content-type": media.BYTES, "content-length": str(size)}
        path = f"{self._volume_url(name)}/blobs/{digest}"
        try:
            self._request("PUT", path, content=chunks, headers=headers, timeout=self._no_timeout)
        except PayloadTooLarge as error:
            raise PayloadTooLarge(
                f"a file of {format_bytes(size)} exceeds the gateway's limit for a volume's file "
                "(GPUFN_MAX_MODEL_BYTES): split it, or read it in the worker from a disk or a URL"
            ) from error

    def read_volume_file(self, name: str, digest: str) -> Iterator[bytes]:
        """Yield the bytes of a file. Raises DataNotFound, ArtifactUnavailable."""
        with self._stream("GET", f"{self._volume_url(name)}/blobs/{digest}", read_timeout_s=60.0) as response:
            yield from self._chunks(response)

    def commit_volume(
        self, name: str, put: Iterable[VolumeFile] = (), remove: Iterable[str] = (), *, base: int | None = None
    ) -> VolumeVersion:
        """Publish a new version from uploaded files. A path in `remove` that ends with a slash is a folder. Raises
        Conflict if `base` is not the newest version."""
        body = msgspec.json.encode(VolumeChange(tuple(put), tuple(remove), base))
        return self._json(VolumeVersion, "POST", f"{self._volume_url(name)}/commits", content=body, headers=JSON_BODY)

    def delete_volume(self, name: str) -> None:
        """Delete a volume with all of its versions. Running workers keep their files. Raises DataNotFound."""
        self._request("DELETE", self._volume_url(name))

    def put_files(
        self, name: str, source: Path, to: str = "", *, replace: bool = False, progress: Progress | None = None
    ) -> VolumeVersion:
        """Copy a file or a folder into a volume, as one commit. Files that the platform has are not sent again.

        `to` is a folder in the volume, or the path of the file. `replace` removes all other files in that folder.
        """
        from gpufn.volumes.upload import put_files  # noqa: PLC0415

        return put_files(self, name, source, to, replace=replace, progress=progress)

    def get_files(
        self,
        name: str,
        target: Path,
        path: str = "",
        *,
        version: int | None = None,
        progress: Progress | None = None,
    ) -> VolumeTree:
        """Copy the files below `path` of a version into a folder. Equal files that are there stay. Return the files."""
        from gpufn.volumes.download import get_files  # noqa: PLC0415

        return get_files(self, name, target, path, version=version, progress=progress)

    def _volume_url(self, name: str) -> str:
        return f"/v1/volumes/{self._function_path(name)}"
