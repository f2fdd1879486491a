"""Large results: shared-memory files, which the worker reuses."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.encoding import media
from gpufn_platform.shared_bodies.bodies import MIN_SHARED_BYTES, SharedBodies
from gpufn_runtime.worker import link
from gpufn_runtime.worker.link import Link

Start = Any


def test_a_result_that_was_taken_leaves_its_memory_to_a_later_one(start: Start, tmp_path: Path) -> None:
    parcels = SharedBodies(tmp_path / "w-1")
    worker = start(f"def f(letter: str): return letter.encode() * {MIN_SHARED_BYTES}", parcels=parcels.folder)

    def call(letter: str) -> str:
        worker.run(f'{{"letter": "{letter}"}}'.encode(), accept=media.BYTES, takes_parcel=True)
        result, body = worker.result()
        assert (result.error, body) == (None, b"")
        return str(result.parcel)

    first = call("a")
    file = os.stat(tmp_path / "w-1" / first).st_ino
    second = call("b")
    assert os.stat(tmp_path / "w-1" / second).st_ino != file, "the first was not taken yet"
    assert bytes(parcels.take(first)) == b"a" * MIN_SHARED_BYTES
    third = call("c")
    assert os.stat(tmp_path / "w-1" / third).st_ino == file
    assert bytes(parcels.take(second)) == b"b" * MIN_SHARED_BYTES
    assert bytes(parcels.take(third)) == b"c" * MIN_SHARED_BYTES


def test_what_a_link_owner_wants_done_when_nothing_comes_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_RECEIVE_TIMEOUT", struct.pack("ll", 0, 1000))
    quiet: list[bool] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        ours = Link(str(tmp_path / "s"), "w-1")
        ours.on_quiet = lambda: quiet.append(True)
        assert ours.connect(1)
        with listener.accept()[0] as theirs:
            theirs.recv(1000)
            assert ours.receive()
            assert quiet == [True]
        assert not ours.receive()
    ours.close()
