from __future__ import annotations

import ast
import re
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


def test_each_readme_first_names_its_packages_and_says_that_no_gpu_and_no_model_hub_are_needed() -> None:
    lacking = []
    for folder in sorted(path.parent for path in (ROOT / "examples").glob("*/app.py")):
        _, needs, *_ = (folder / "README.md").read_text().split("\n\n")
        requirements = folder / "requirements.txt"
        lines = requirements.read_text().splitlines() if requirements.exists() else []
        packages = [re.split(r"[\[=<>]", line)[0] for line in lines if not line.startswith("#")]
        lacking += [
            (folder.name, word)
            for word in ("**needs** ", *packages, "no gpu, no model hub.")
            if word not in needs.lower().replace("\n", " ")
        ]
    assert lacking == []


def _declared(app: Path) -> list[str]:
    return [
        node.name.lower().replace("_", "-")
        for node in ast.parse(app.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.decorator_list
        if ast.unparse(node.decorator_list[0]).split("(")[0] in {"gpu_function", "asgi_app", "wsgi_app", "web_endpoint"}
    ]
