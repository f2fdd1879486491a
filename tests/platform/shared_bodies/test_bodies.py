"""Large bodies passed by reference (gpufn_platform.shared_bodies.bodies)."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from gpufn_core.errors import ArtifactUnavailable, CapacityError, ProtocolMismatch
from gpufn_core.protocol.limits import LARGE_BODY_BYTES
from gpufn_platform.shared_bodies.bodies import SharedBodies


def test_a_written_body_is_read_and_its_name_is_removed(tmp_path: Path) -> None:
    shared_bodies = SharedBodies(tmp_path / "a")
    name = shared_bodies.write([b"one", memoryview(b"two")])
    view = shared_bodies.take(name)
    assert bytes(view) == b"onetwo"
    assert view.readonly
    assert list((tmp_path / "a").iterdir()) == []
    with pytest.raises(ArtifactUnavailable):
        shared_bodies.take(name)


def test_each_body_is_a_new_file(tmp_path: Path) -> None:
    """A process that still has an earlier file open or mapped sees nothing of a later body."""
    shared_bodies = SharedBodies(tmp_path)
    first = shared_bodies.write([b"one"])
    path_only = os.open(tmp_path / first, os.O_PATH)
    view = shared_bodies.take(first)
    second = shared_bodies.write([b"two"])
    assert os.stat(tmp_path / second).st_ino != os.fstat(path_only).st_ino
    with open(f"/proc/self/fd/{path_only}", "rb") as file:
        assert (file.read(), bytes(view)) == (b"one", b"one")
    os.close(path_only)
    assert bytes(shared_bodies.take(second)) == b"two"
    assert list(tmp_path.iterdir()) == []


def test_a_body_that_cannot_be_mapped_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: its call was lost with the worker's thread."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    shared_bodies = SharedBodies(tmp_path)
    name = shared_bodies.write([b"one"])
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(ArtifactUnavailable, match="Cannot allocate memory"):
        shared_bodies.take(name)


def test_an_empty_shared_body_is_one(tmp_path: Path) -> None:
    shared_bodies = SharedBodies(tmp_path)
    assert bytes(shared_bodies.take(shared_bodies.write([]))) == b""


def test_a_shared_body_is_read_part_by_part_and_its_name_is_removed(tmp_path: Path) -> None:
    shared_bodies = SharedBodies(tmp_path)
    body = os.urandom((1 << 20) + 1)
    with shared_bodies.reader(shared_bodies.write([body])) as reader:
        assert list(tmp_path.iterdir()) == []
        parts = list(reader.parts())
        assert (reader.size, len(parts) > 1, b"".join(parts) == body) == (len(body), True, True)
    with shared_bodies.reader(shared_bodies.write([])) as empty:
        assert (empty.size, list(empty.parts())) == (0, [])


def test_a_shared_body_that_its_writer_cuts_short_is_an_error_and_no_signal(tmp_path: Path) -> None:
    shared_bodies = SharedBodies(tmp_path)
    name = shared_bodies.write([bytes(1 << 20)])
    with open(tmp_path / name, "r+b") as theirs, shared_bodies.reader(name) as reader:
        parts = reader.parts()
        next(parts)
        theirs.truncate(0)
        with pytest.raises(ArtifactUnavailable, match="truncated"):
            list(parts)


def test_a_shared_body_that_has_grown_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    shared_bodies = SharedBodies(tmp_path)
    name = shared_bodies.write([])
    os.truncate(tmp_path / name, LARGE_BODY_BYTES + 1)
    with pytest.raises(ArtifactUnavailable, match="has grown"):
        shared_bodies.reader(name)


def test_a_shared_body_that_is_handed_on_is_there_twice_and_once_in_memory(tmp_path: Path) -> None:
    ours, theirs = SharedBodies(tmp_path / "a"), SharedBodies(tmp_path / "b")
    name = ours.write([b"shared"])
    with pytest.raises(ArtifactUnavailable):
        ours.link_into(name, theirs)
    theirs.make()
    other = ours.link_into(name, theirs)
    assert os.stat(tmp_path / "a" / name).st_ino == os.stat(tmp_path / "b" / other).st_ino
    assert bytes(theirs.take(other)) == b"shared"
    assert ours.size(name) == 6, "ours stays: the call may run again"
    ours.remove(name)
    ours.remove(name)


def test_a_folder_that_is_made_again_is_for_its_owner_only(tmp_path: Path) -> None:
    SharedBodies(tmp_path / "gpufn-0" / "w-1").write([])
    modes = [os.stat(path).st_mode & 0o777 for path in (tmp_path / "gpufn-0", tmp_path / "gpufn-0" / "w-1")]
    assert modes == [0o700, 0o700]


def test_bodies_of_a_worker_are_removed_with_its_folders(tmp_path: Path) -> None:
    """Regression: the rest stayed in the host's memory without an owner."""
    shared_bodies = SharedBodies(tmp_path / "all" / "w-1")
    shared_bodies.make()
    for place in ("", "own", "own/deeper"):
        (tmp_path / "all" / "w-1" / place).mkdir(exist_ok=True)
        (tmp_path / "all" / "w-1" / place / "file").write_bytes(b"x")
    shared_bodies.remove_all()
    assert os.listdir(tmp_path) == []


def test_a_shared_body_that_is_not_kept_is_removed(tmp_path: Path) -> None:
    with SharedBodies(tmp_path / "a").writer() as writer:
        writer.write(b"half of it")
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "x", "/etc/passwd", "a" * 25 + "/", "A" * 26])
def test_a_name_is_nothing_but_a_name(tmp_path: Path, name: str) -> None:
    shared_bodies = SharedBodies(tmp_path)
    for use in (shared_bodies.take, shared_bodies.look, shared_bodies.reader, shared_bodies.size, shared_bodies.remove):
        with pytest.raises(ProtocolMismatch):
            use(name)


def test_a_path_that_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    shared_bodies = SharedBodies(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("x")
    link, fifo, folder = "0" * 26, "1" * 26, "2" * 26
    (tmp_path / link).symlink_to(secret)
    os.mkfifo(tmp_path / fifo)
    (tmp_path / folder).mkdir()
    for name in (link, fifo, folder):
        with pytest.raises((ArtifactUnavailable, ProtocolMismatch)):
            shared_bodies.look(name)
        with pytest.raises((ArtifactUnavailable, ProtocolMismatch)):
            shared_bodies.reader(name)
        with pytest.raises(ProtocolMismatch):
            shared_bodies.size(name)


def test_full_memory_is_a_capacity_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CapacityError, match="No space left"):
        SharedBodies(tmp_path / "a").write([b"x"])
    assert list((tmp_path / "a").iterdir()) == []
