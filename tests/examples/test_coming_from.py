"""The program for gpufn on each page of docs/coming-from works as written."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufn import Client, Function
from gpufn.call import transport
from gpufn.declare.function import FunctionClass
from tests.conftest import ROOT, Platform
from tests.examples.conftest import imported

pytestmark = pytest.mark.e2e

_PAGES = sorted(path for path in (ROOT / "docs" / "coming-from").glob("*.md") if path.stem != "index")
_BLOCK = re.compile(r'^```\w+ title="(?P<title>[^"]+)"\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _at_the_platform(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GPUFN_URL", platform.url)
    transport.install(None)
    yield
    transport.install(None)


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.stem)
def test_the_program_of_a_page_prints_the_output_on_the_page(page: Path, tmp_path: Path, platform: Platform) -> None:
    blocks = {match["title"]: match["text"] for match in _BLOCK.finditer(page.read_text())}
    (tmp_path / "app.py").write_text(blocks["app.py"])
    printed = io.StringIO()
    with imported(tmp_path, "app") as app, Client() as client:
        declared = [each for each in vars(app).values() if isinstance(each, (Function, FunctionClass))]
        client.deploy(*declared, replace=True)
        call = blocks["call.py"].replace("127.0.0.1:8090", platform.url.removeprefix("http://"))
        with contextlib.redirect_stdout(printed):
            exec(compile(call, f"{page.name}: call.py", "exec"), {})
    assert printed.getvalue() == blocks["output"]


def test_each_page_has_the_other_platforms_program_too() -> None:
    assert len(_PAGES) == 7
    for page in _PAGES:
        others = {match["title"] for match in _BLOCK.finditer(page.read_text())} - {"app.py", "call.py", "output"}
        assert others, page
