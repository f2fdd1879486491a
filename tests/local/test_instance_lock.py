"""A running platform with a damaged record."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpufn_core.home import Home
from gpufn_local.instance_lock import Instance, claimed, unrecorded


@pytest.mark.parametrize("damaged", [None, b"", b"\xff{", b"[1]", b'{"pid": 4194305'])
def test_a_platform_with_an_unreadable_record_is_not_reported_as_down(damaged: bytes | None, tmp_path: Path) -> None:
    home = Home(tmp_path)
    with claimed(home):
        if damaged is not None:
            home.up_file.write_bytes(damaged)
        assert Instance.running(home) is None
        error = unrecorded(home)
        assert error is not None
        assert f"(pid {os.getpid()})" in error.message
    assert unrecorded(home) is None
