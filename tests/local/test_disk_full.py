"""Detection of a full disk under nats-server, from its log and the free space."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufn_local.disk_full import StoreWatch

_FAILED = "[ERR] JetStream failed to store a msg on stream 'x': write x/1.blk: no space left on device\n"
_MIB = 1 << 20


class _Store:
    def __init__(self, folder: Path) -> None:
        self.log = folder / "nats.log"
        self.log.write_text("[INF] Server is ready\n")
        self.total, self.free = 1024 * _MIB, 1024 * _MIB
        self.messages: list[str] = []
        self.watch = StoreWatch(folder, self.log, self.messages.append, usage=lambda _: (self.total, 0, self.free))

    def write(self, text: str) -> None:
        with self.log.open("a") as log:
            log.write(text)


@pytest.fixture
def store(tmp_path: Path) -> _Store:
    return _Store(tmp_path)


def test_a_server_with_failed_writes_restarts_once_there_is_space_and_both_are_reported_once(store: _Store) -> None:
    assert not store.watch.must_restart()
    store.free = 0
    store.write(_FAILED)
    assert [store.watch.must_restart() for _ in range(3)] == [False, False, False]
    assert [" is full: " in line for line in store.messages] == [True]
    store.free = 16 * _MIB
    assert store.watch.must_restart()
    store.watch.started()
    assert not store.watch.must_restart()
    assert [" has space again" in line for line in store.messages] == [False, True]


def test_a_disk_that_is_full_while_nothing_is_written_is_no_reason_to_restart(store: _Store) -> None:
    store.free = 0
    assert not store.watch.must_restart()
    store.free = 16 * _MIB
    assert not store.watch.must_restart()
    assert store.messages == []


def test_a_tenth_of_a_small_disk_is_room(store: _Store) -> None:
    store.total, store.free = 4 * _MIB, 300 << 10
    store.write(_FAILED)
    assert not store.watch.must_restart()
    store.free = 500 << 10
    assert store.watch.must_restart()


def test_a_line_that_was_half_written_is_read_when_it_is_whole(store: _Store) -> None:
    store.write(_FAILED[:-12])
    assert not store.watch.must_restart()
    store.write(_FAILED[-12:])
    assert store.watch.must_restart()


def test_log_lines_of_an_earlier_start_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "nats.log").write_text(_FAILED)
    watch = StoreWatch(tmp_path, tmp_path / "nats.log", lambda text: None)
    assert not watch.must_restart()


def test_a_missing_log_requires_no_restart(tmp_path: Path) -> None:
    assert not StoreWatch(tmp_path, tmp_path / "nats.log", lambda text: None).must_restart()
