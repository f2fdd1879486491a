"""`gpufn simulate`: the table, the JSON, and invalid options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpufn.cli import app

_QUICK = ("--seconds", "60", "--functions", "6")


def _gpufn(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_the_table_has_a_row_for_each_order_and_is_the_same_again() -> None:
    result = _gpufn("simulate", *_QUICK, "--bursty")
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["ORDER", "fcfs", "sjf", "mqfq"]
    assert result.stdout == _gpufn("simulate", *_QUICK, "--bursty").stdout
    assert result.stdout != _gpufn("simulate", *_QUICK, "--bursty", "--seed", "2").stdout


def test_the_options_are_simulated() -> None:
    found = json.loads(_gpufn("simulate", *_QUICK, "--turns", "2", "--overrun", "3", "--memory", "40", "--json").stdout)
    assert (found["load"]["functions"], found["load"]["seconds"], found["load"]["bursty"]) == (6, 60.0, False)
    assert (found["gpu"]["turns"], found["gpu"]["overrun_s"], found["gpu"]["memory_gib"]) == (2, 3.0, 40.0)
    assert {figures["calls"] for figures in found["orders"].values()} == {found["orders"]["fcfs"]["calls"]}
    assert 0 < found["orders"]["mqfq"]["busy"] <= 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--memory", "2"), 2, "--memory: a function uses"),
        (("--functions", "1", "--seconds", "1", "--busy", "0.01"), 2, "--seconds: no call arrives in this time"),
        (("--functions", "0"), 2, "--functions"),
    ],
)
def test_impossible_simulations_are_refused(arguments: tuple[str, ...], code: int, message: str) -> None:
    result = _gpufn("simulate", *arguments)
    assert result.exit_code == code
    assert message in result.output


def test_a_plot_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    result = _gpufn("simulate", *_QUICK, "--plot", str(tmp_path / "no" / "plot.html"))
    assert result.exit_code == 2
    assert all(fact in result.output for fact in ("--plot", str(tmp_path / "no")))
    assert "Traceback" not in result.output
