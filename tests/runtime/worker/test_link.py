"""The worker's end of the connection to its runner."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest

from gpufn_runtime.worker import link
from gpufn_runtime.worker.link import Link, unix_dialer


def test_receive_returns_when_nothing_arrives_and_reports_a_closed_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler of the main thread can run only between two receives."""
    monkeypatch.setattr(link, "_RECEIVE_TIMEOUT", struct.pack("ll", 0, 1000))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        ours = Link(unix_dialer(str(tmp_path / "s")), "w-1")
        assert ours.connect(1)
        with listener.accept()[0] as theirs:
            theirs.recv(1000)
            assert ours.receive()
            assert not ours.frames
        assert not ours.receive()
    ours.close()
