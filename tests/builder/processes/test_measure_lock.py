"""Measurements on one device exclude each other."""

from __future__ import annotations

import contextlib
from pathlib import Path

from gpufn_builder.processes.measure_lock import alone_on


def test_a_measurement_waits_for_that_of_another_build_on_the_device(tmp_path: Path) -> None:
    folder = tmp_path / "caches"
    waited: list[str] = []
    first = contextlib.ExitStack()
    first.enter_context(alone_on("NVIDIA L4", folder, waited.clear))

    def end_first(seconds: float) -> None:
        first.close()

    with alone_on("cpu", folder, lambda: waited.append("cpu")):
        assert waited == []
    with alone_on("NVIDIA L4", folder, lambda: waited.append("L4"), end_first):
        assert waited == ["L4"]


def test_a_measurement_runs_without_the_lock_if_there_can_be_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    measured = []
    with alone_on("cpu", tmp_path / "file", lambda: None):
        measured.append(True)
    assert measured
