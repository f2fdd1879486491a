"""Processes report that their event loop is alive, and silent ones are detected."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufn_local.watchdog_listener import HeartbeatMonitor, Watchdog
from gpufn_platform.process.watchdog import ALIVE, notify_watchdog


def test_a_process_without_a_first_message_is_not_silent() -> None:
    """It is still connecting to its bus."""
    silence = HeartbeatMonitor(limit_s=60)
    assert [silence.over(now) for now in (0, 30, 60, 90)] == [[], [], [], []]


def test_each_silence_is_reported_once() -> None:
    silence = HeartbeatMonitor(limit_s=60)
    for pid in (1, 2):
        silence.received(pid, now=0)
    assert silence.over(30) == []
    silence.received(2, now=31)
    assert [silence.over(now) for now in (59, 60, 75, 91)] == [[], [1], [], [2]]


def test_after_a_pause_of_all_processes_none_is_blamed() -> None:
    """After a suspended machine or our own pause, the reports of others are read only after the check."""
    silence = HeartbeatMonitor(limit_s=60)
    silence.received(1, now=0)
    assert silence.over(20) == []
    assert silence.over(3600) == []
    assert [silence.over(now) for now in (3630, 3660)] == [[], [1]]


def test_an_ended_process_is_not_silent() -> None:
    silence = HeartbeatMonitor(limit_s=60)
    silence.received(1, now=0)
    silence.forget(1)
    assert [silence.over(now) for now in (30, 60)] == [[], []]


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    made = Watchdog(limit_s=60)
    yield made
    made.close()


def _said(watchdog: Watchdog) -> None:
    asyncio.run(_tell(watchdog.environment))


async def _tell(environ: dict[str, str]) -> None:
    """Run in a running event loop."""
    notify_watchdog(environ)


def test_only_messages_of_started_processes_count(watchdog: Watchdog) -> None:
    _said(watchdog)
    assert [watchdog.look(now) for now in (0, 30, 60)] == [[], [], []]
    watchdog.watch(os.getpid())
    _said(watchdog)
    assert [watchdog.look(now) for now in (60, 90, 120)] == [[], [], [os.getpid()]]
    watchdog.forget(os.getpid())
    _said(watchdog)
    assert [watchdog.look(now) for now in (120, 150, 180)] == [[], [], []]


def test_other_messages_are_ignored(watchdog: Watchdog) -> None:
    watchdog.watch(os.getpid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        for words in (b"", b"READY=1", b"x" * 4096):
            other.sendto(words, "\0" + watchdog.environment["NOTIFY_SOCKET"][1:])
    assert [watchdog.look(now) for now in (0, 30, 60)] == [[], [], []]


def test_the_greeting_of_a_nats_server_counts_as_a_message(watchdog: Watchdog) -> None:
    """A stopped process still accepts connections, because the kernel does."""
    with socket.create_server(("127.0.0.1", 0)) as nats:
        watchdog.watch_nats(7, nats.getsockname()[1], now=0)
        assert watchdog.look(0) == []
        client, _ = nats.accept()
        client.sendall(b'INFO {"server_name":"gpufn"}\r\n')
        assert [watchdog.look(now) for now in (1, 16, 31, 46, 60)] == [[], [], [], [], []]
        assert watchdog.look(61) == [7]
        client.close()


def test_a_nats_server_that_has_not_greeted_is_not_dialled_again(watchdog: Watchdog) -> None:
    """It may be busy; a single connection takes only one place in its backlog."""
    with socket.create_server(("127.0.0.1", 0)) as nats:
        watchdog.watch_nats(7, nats.getsockname()[1], now=0)
        for now in (0, 16, 32):
            watchdog.look(now)
        nats.accept()[0].close()
        nats.setblocking(False)
        with pytest.raises(BlockingIOError):
            nats.accept()


def test_a_nats_server_that_never_greets_is_silent_from_its_start(watchdog: Watchdog) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nats:
        port = nats.getsockname()[1]
    watchdog.watch_nats(7, port, now=0)
    assert [watchdog.look(now) for now in (0, 30, 60, 90)] == [[], [], [7], []]


@pytest.mark.parametrize(
    ("settings", "is_told"),
    [
        ({"WATCHDOG_USEC": "30000000"}, True),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, True),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, False),
        ({"WATCHDOG_USEC": "soon"}, False),
        ({}, False),
    ],
)
def test_systemd_receives_messages_in_its_format(tmp_path: Path, settings: dict[str, str], is_told: bool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.setblocking(False)
        systemd.bind(str(tmp_path / "notify"))
        asyncio.run(_tell({"NOTIFY_SOCKET": str(tmp_path / "notify"), **settings}))
        if is_told:
            assert systemd.recv(64) == ALIVE
        else:
            with pytest.raises(BlockingIOError):
                systemd.recv(64)


def test_a_lost_listener_is_no_failure(tmp_path: Path) -> None:
    asyncio.run(_tell({"NOTIFY_SOCKET": str(tmp_path / "nobody"), "WATCHDOG_USEC": "30000000"}))
