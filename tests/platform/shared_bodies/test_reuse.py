"""Reuse of shared-memory files (gpufn_platform.shared_bodies.reuse)."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
from pathlib import Path

import pytest

from gpufn_core.errors import ArtifactUnavailable, CapacityError
from gpufn_platform.shared_bodies import reuse
from gpufn_platform.shared_bodies.bodies import SharedBodies

BODY = b"x" * 5000
BOUND = 1 << 20


def inode(parcels: SharedBodies, name: str) -> int:
    return os.stat(os.path.join(parcels.folder, name)).st_ino


@pytest.fixture
def parcels(tmp_path: Path) -> SharedBodies:
    return SharedBodies(tmp_path / "gw", spare_bytes=BOUND)


def test_a_file_that_nobody_needs_is_written_again_under_another_name(parcels: SharedBodies) -> None:
    first = parcels.write([BODY])
    file = inode(parcels, first)
    assert bytes(parcels.take(first)) == BODY
    second = parcels.write([b"short"])
    assert second != first
    assert inode(parcels, second) == file
    assert bytes(parcels.take(second)) == b"short", "nothing of what it was"
    third = parcels.write([BODY, BODY])
    assert inode(parcels, third) == file
    assert bytes(parcels.take(third)) == BODY + BODY


def test_one_that_is_still_to_be_taken_is_left_alone(parcels: SharedBodies, tmp_path: Path) -> None:
    kept = parcels.write([BODY])
    worker = SharedBodies(tmp_path / "w-1")
    worker.make()
    theirs = parcels.link_into(kept, worker)
    parcels.remove(kept)
    assert inode(parcels, parcels.write([b"y" * 5000])) != inode(worker, theirs)
    assert bytes(worker.take(theirs)) == BODY


def test_one_that_is_mapped_is_left_alone(parcels: SharedBodies) -> None:
    """A function keeps an array of its input."""
    view = parcels.take(parcels.write([BODY]))
    for _ in range(3):
        parcels.take(parcels.write([b"y" * 5000]))
    assert bytes(view) == BODY
    del view


def test_one_that_is_being_read_is_left_alone(parcels: SharedBodies) -> None:
    """A client reads a response slowly."""
    with parcels.reader(parcels.write([BODY])) as reader:
        parcels.take(parcels.write([b"y" * 5000]))
        parcels.take(parcels.write([b"z" * 5000]))
        assert b"".join(reader.parts()) == BODY


def test_other_readers_get_another_file(parcels: SharedBodies) -> None:
    """A previous reader may have kept a path descriptor, which the kernel does not count, and open it later."""
    name = parcels.write([BODY], "mine")
    kept = os.open(os.path.join(parcels.folder, name), os.O_PATH)
    parcels.take(name)
    parcels.take(parcels.write([b"secret" * 1000], "theirs"))
    with open(f"/proc/self/fd/{kept}", "rb") as file:
        assert file.read() == BODY
    os.close(kept)


def test_the_oldest_go_beyond_a_bound_and_what_is_in_use_stays(parcels: SharedBodies) -> None:
    names = [parcels.write([bytes(BOUND // 4)]) for _ in range(8)]
    own = set(os.listdir(parcels.folder)) - set(names)
    assert len(own) == 4
    for name in names:
        assert len(parcels.take(name)) == BOUND // 4


def test_they_are_a_part_of_the_memory_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has 64 MiB of shared memory by default, and other processes use some of it."""
    monkeypatch.setattr(reuse, "_free_bytes", lambda folder: 4 * len(BODY))
    parcels = SharedBodies(tmp_path, spare_bytes=BOUND)
    for name in [parcels.write([BODY]), parcels.write([BODY])]:
        parcels.remove(name)
    assert len(os.listdir(tmp_path)) == 1


def test_one_that_is_too_large_to_be_kept_costs_no_other(parcels: SharedBodies) -> None:
    parcels.remove(parcels.write([BODY]))
    small = os.listdir(parcels.folder)
    parcels.remove(parcels.write([bytes(2 * BOUND)], "others"))
    assert os.listdir(parcels.folder) == small


def test_a_link_that_comes_too_late_is_no_way_to_what_is_written_next(
    parcels: SharedBodies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has looked up the name and waits for the other folder; meanwhile the call ends."""
    worker = SharedBodies(tmp_path / "w-1")
    worker.make()
    told = parcels.write([BODY])
    link = os.link

    def late(source: str, target: str, **options: bool) -> None:
        monkeypatch.undo()
        parcels.remove(told)
        (own,) = os.listdir(parcels.folder)
        parcels.write([b"another call's"])
        link(os.path.join(parcels.folder, own), target, **options)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(ArtifactUnavailable):
        parcels.link_into(told, worker)
    assert os.listdir(worker.folder) == []


def test_a_reader_that_leases_its_file_keeps_nobody_waiting(parcels: SharedBodies) -> None:
    """Otherwise the kernel makes the file's writer wait for 45 s."""
    name = parcels.write([BODY])
    with open(os.path.join(parcels.folder, name), "rb") as file:
        parcels.remove(name)
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        assert bytes(parcels.take(parcels.write([b"y"]))) == b"y"
        assert file.read() == BODY


def test_full_memory_takes_the_spare_files_first(
    parcels: SharedBodies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = parcels.write([BODY])
    parcels.remove(parcels.write([BODY], "others"))
    write = os.write

    def full(file: int, data: memoryview) -> int:
        if len(os.listdir(parcels.folder)) > 2:  # the one in use, and the one being written
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    name = parcels.write([b"new"])
    assert bytes(parcels.take(name)) == b"new"
    assert bytes(parcels.take(busy)) == BODY
    kept = [parcels.write([b"small"])]
    parcels.spares.drop()
    kept += [parcels.write([b"small"])]
    parcels.spares.drop()
    with pytest.raises(CapacityError):
        parcels.write([b"there is no room, and none to make"])
    assert [bytes(parcels.take(name)) for name in kept] == [b"small"] * 2


def test_where_files_know_no_leases_each_is_new(parcels: SharedBodies, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    first = parcels.take(parcels.write([BODY]))
    second = parcels.take(parcels.write([b"y"]))
    assert (bytes(first), bytes(second)) == (BODY, b"y")
    assert os.listdir(parcels.folder) == [], "nothing is kept that cannot be used"


def test_nothing_is_left_of_what_a_file_was_though_leases_end_meanwhile(
    parcels: SharedBodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    parcels.take(parcels.write([BODY]))
    with parcels.writer() as writer:
        writer.write(b"short")

        def refuse(*_: object) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

        monkeypatch.setattr(fcntl, "fcntl", refuse)
        for _ in range(2):
            parcels.take(parcels.write([b"another thread's"]))
        assert not parcels.spares.are_kept
        assert bytes(parcels.take(writer.keep())) == b"short"


def test_one_that_was_removed_meanwhile_is_forgotten(parcels: SharedBodies) -> None:
    parcels.remove(parcels.write([BODY]))
    for name in os.listdir(parcels.folder):
        parcels.remove(name)
    assert bytes(parcels.take(parcels.write([BODY]))) == BODY


def test_dropped_when_unused_and_at_once(parcels: SharedBodies) -> None:
    def write() -> None:
        parcels.take(parcels.write([BODY]))

    write()
    write()  # again in the same file
    parcels.spares.drop_unused()
    assert len(os.listdir(parcels.folder)) == 1
    parcels.spares.drop_unused()
    assert os.listdir(parcels.folder) == []
    write()
    assert parcels.spares.drop()
    assert not parcels.spares.drop()
    assert os.listdir(parcels.folder) == []


def test_many_threads_write_and_take_and_each_reads_what_it_wrote(parcels: SharedBodies) -> None:
    wrong: list[int] = []

    def use(number: int) -> None:
        body = bytes([number]) * 4000
        for _ in range(200):
            if bytes(parcels.take(parcels.write([body]))) != body:
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_folder_without_spare_files_keeps_none(tmp_path: Path) -> None:
    parcels = SharedBodies(tmp_path)
    parcels.take(parcels.write([BODY]))
    assert os.listdir(tmp_path) == []
