"""Commits of a function to its volume: the files of a folder are sent in parts to the runner, then published."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from gpufn.data.channel import Channel
from gpufn.volumes.upload import hashed, list_files
from gpufn_core.protocol.data import PART_BYTES, STORED, CommitVolume, PutVolumePart
from gpufn_core.spec.volume_spec import VolumeChange, VolumeFile, VolumeVersion


def commit(channel: Channel, name: str, folder: Path, removed: Iterable[str]) -> VolumeVersion:
    """Publish the files of `folder`, except the files in `removed`. Raises InvalidInput, InvalidSpec, Conflict,
    PayloadTooLarge, PlatformError."""
    paths = list_files(folder, "")
    files = [hashed(target, path) for target, path in paths.items()]
    for digest, file in {file.digest: file for file in files}.items():
        _send(channel, name, digest, file, paths[file.path])
    _, version = channel.execute(CommitVolume(name, VolumeChange(tuple(files), tuple(removed))))
    return msgspec.msgpack.decode(version, type=VolumeVersion)


def _send(channel: Channel, name: str, digest: str, file: VolumeFile, path: Path) -> None:
    with path.open("rb") as content:
        for offset in range(0, max(file.size, 1), PART_BYTES):
            part = PutVolumePart(name, digest, file.size, offset)
            if channel.execute(part, content.read(PART_BYTES))[1] == STORED:
                return
