"""Size limit of the MPS logs."""

from __future__ import annotations

import os
from pathlib import Path

from gpufn_runtime.agent.mps import logs

_TOO_LARGE = os.urandom(logs.MAX_BYTES + (1 << 20))


def test_a_log_above_the_limit_is_emptied_and_its_writer_continues(tmp_path: Path) -> None:
    for name, mode in (("control.log", "ab"), ("server.log", "wb")):
        path = tmp_path / name
        with open(path, mode, buffering=0) as writer:
            writer.write(_TOO_LARGE)
            logs.keep_small(tmp_path)
            writer.write(b"no driver\n")
        assert path.stat().st_blocks * 512 < 1 << 20
    logs.keep_small(tmp_path)
    assert logs.log_tail(tmp_path) == ": control.log: no driver; server.log: no driver"


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    folder, other = tmp_path / "log", tmp_path / "other"
    folder.mkdir()
    other.write_bytes(_TOO_LARGE)
    (folder / "control.log").symlink_to(other)
    (folder / "server.log").mkdir()
    logs.keep_small(folder)
    assert other.stat().st_size == len(_TOO_LARGE)


def test_a_link_or_a_fifo_instead_of_a_log_is_not_read(tmp_path: Path) -> None:
    """Regression: a worker that uses MPS could show the agent's files in an error, or stop the agent by a FIFO."""
    (tmp_path / "secret").write_text("credentials\n")
    (tmp_path / "control.log").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "server.log")
    assert logs.log_tail(tmp_path) == ""


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "control.log", "wb") as file:
        file.truncate(1 << 33)
        file.seek(1 << 33)
        file.write(b"one\ntwo\nCmd:get_server_list\nthree\nfour\n")
    assert logs.log_tail(tmp_path) == ": control.log: two | three | four"
