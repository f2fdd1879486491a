from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.conftest import ROOT

_TEMPLATES = ROOT / "sdk" / "gpufn" / "cli" / "develop" / "templates"


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


def test_no_two_examples_or_new_projects_declare_a_function_of_one_name() -> None:
    """Otherwise a user who has deployed one of them could not deploy the other.

    Bug: the project of `gpufn init model` and the image classifier both had a function `classify`.
    """
    apps = [*(ROOT / "examples").glob("*/app.py"), *_TEMPLATES.glob("*/app.py.txt")]
    names = Counter(name for app in apps for name in _declared(app))
    assert len(names) > 40
    assert [name for name, count in names.items() if count > 1] == []


def _declared(app: Path) -> list[str]:
    return [
        node.name.lower().replace("_", "-")
        for node in ast.parse(app.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.decorator_list
        if ast.unparse(node.decorator_list[0]).split("(")[0] in {"gpu_function", "asgi_app", "wsgi_app", "web_endpoint"}
    ]
