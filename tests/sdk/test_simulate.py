"""`gpufn simulate`: the table, the JSON, the page."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gpufn.cli import app
from gpufn.simulation.gpu import Gpu
from gpufn.simulation.page import render
from gpufn.simulation.run import compare
from gpufn.simulation.traces import Load

_QUICK = ("--seconds", "60", "--functions", "6")


def _gpufn(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_the_table_has_a_row_for_each_order_and_is_the_same_again() -> None:
    result = _gpufn("simulate", *_QUICK, "--bursty")
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["ORDER", "fcfs", "sjf", "mqfq"]
    assert result.stdout == _gpufn("simulate", *_QUICK, "--bursty").stdout
    assert result.stdout != _gpufn("simulate", *_QUICK, "--bursty", "--seed", "2").stdout


def test_the_options_are_what_is_simulated() -> None:
    found = json.loads(_gpufn("simulate", *_QUICK, "--turns", "2", "--overrun", "3", "--memory", "40", "--json").stdout)
    assert (found["load"]["functions"], found["load"]["seconds"], found["load"]["bursty"]) == (6, 60.0, False)
    assert (found["gpu"]["turns"], found["gpu"]["overrun_s"], found["gpu"]["memory_gib"]) == (2, 3.0, 40.0)
    assert {figures["calls"] for figures in found["orders"].values()} == {found["orders"]["fcfs"]["calls"]}
    assert 0 < found["orders"]["mqfq"]["busy"] <= 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--memory", "2"), 1, "--memory: a function takes"),
        (("--functions", "1", "--seconds", "1", "--busy", "0.01"), 1, "--seconds: no call comes in so short a time"),
        (("--functions", "0"), 2, "--functions"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments: tuple[str, ...], code: int, said: str) -> None:
    result = _gpufn("simulate", *arguments)
    assert result.exit_code == code
    assert said in result.output


class _Parser(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)


def test_the_page_draws_every_order_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    file = tmp_path / "plot.html"
    assert _gpufn("simulate", *_QUICK, "--plot", str(file)).exit_code == 0
    page = file.read_text()
    parser = _Parser()
    parser.feed(page)
    assert (parser.tags.count("svg"), parser.tags.count("polyline")) == (2, 3)
    assert "script" not in parser.tags
    assert re.findall(r"(?:href|src|url)\s*[=(]", page) == []


def test_no_mark_of_the_page_lies_outside_its_plot() -> None:
    page = render(compare(Load(functions=40, seconds=100, busy=0.9), Gpu()))
    heights = [float(found) for found in re.findall(r"(?:cy|y1)=([\d.-]+)", page)]
    assert 0 <= min(heights) <= max(heights) <= 280
    assert len(re.findall(r">f\d+</text>", page)) == 20  # not all forty have room
