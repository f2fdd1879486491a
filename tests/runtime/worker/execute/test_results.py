"""Large results travel as shared-memory files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gpufn_core.encoding import media
from gpufn_platform.shared_bodies.bodies import MIN_SHARED_BYTES, SharedBodies

Start = Any


def test_each_large_result_is_a_new_file(start: Start, tmp_path: Path) -> None:
    shared_bodies = SharedBodies(tmp_path / "w-1")
    worker = start(
        f"def f(letter: str): return letter.encode() * {MIN_SHARED_BYTES}", shared_bodies=shared_bodies.folder
    )

    def call(letter: str) -> str:
        worker.run(f'{{"letter": "{letter}"}}'.encode(), accept=media.BYTES, takes_shared_body=True)
        result, body = worker.result()
        assert (result.error, body) == (None, b"")
        return str(result.shared_body)

    first = shared_bodies.take(call("a"))
    assert bytes(shared_bodies.take(call("b"))) == b"b" * MIN_SHARED_BYTES
    assert bytes(first) == b"a" * MIN_SHARED_BYTES, "the map of the first result does not change"
    assert os.listdir(shared_bodies.folder) == []
