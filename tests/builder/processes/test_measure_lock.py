"""Measurements on one node exclude each other."""

from __future__ import annotations

import contextlib
from pathlib import Path

from gpufn_builder.processes.measure_lock import measuring_alone


def test_a_measurement_waits_for_that_of_another_build(tmp_path: Path) -> None:
    folder = tmp_path / "caches"
    waited: list[str] = []
    first = contextlib.ExitStack()
    first.enter_context(measuring_alone(folder, waited.clear))

    def end_first(seconds: float) -> None:
        first.close()

    with measuring_alone(folder, lambda: waited.append("second"), end_first):
        assert waited == ["second"]


def test_a_measurement_runs_without_the_lock_if_there_can_be_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    measured = []
    with measuring_alone(tmp_path / "file", lambda: None):
        measured.append(True)
    assert measured
