from __future__ import annotations

from pathlib import Path

from tests.conftest import ROOT


def test_every_example_has_an_app_and_a_readme_and_is_in_the_index() -> None:
    folders = sorted(path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name[0] not in "._")
    index = (ROOT / "examples" / "README.md").read_text()
    lacking = [
        name
        for name in folders
        for file in ("app.py", "README.md")
        if not Path(ROOT / "examples" / name / file).is_file() or f"]({name})" not in index
    ]
    assert lacking == []
