"""The page of a Comparison: complete and self-contained."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path

import msgspec

from gpufn_local.simulation.__main__ import Question, main
from gpufn_local.simulation.gpu import Gpu
from gpufn_local.simulation.page import render
from gpufn_local.simulation.run import compare
from gpufn_local.simulation.traces import Load


class _Parser(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)


def test_the_page_draws_every_order_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    file = tmp_path / "plot.html"
    question = Question(Load(functions=6, seconds=60), Gpu(), str(file))
    assert main(msgspec.json.encode(question).decode()) == 0
    page = file.read_text()
    parser = _Parser()
    parser.feed(page)
    assert (parser.tags.count("svg"), parser.tags.count("polyline")) == (2, 3)
    assert "script" not in parser.tags
    assert re.findall(r"(?:href|src|url)\s*[=(]", page) == []


def test_no_mark_of_the_page_lies_outside_its_plot() -> None:
    page = render(compare(Load(functions=40, seconds=100, busy=0.9), Gpu()))
    heights = [float(found) for found in re.findall(r'(?:cy|y1)="([\d.-]+)', page)]
    assert 0 <= min(heights) <= max(heights) <= 280
    assert len(re.findall(r">f\d+</text>", page)) == 20  # there is no space for all forty
