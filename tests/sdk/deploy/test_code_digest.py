"""Which changes of a file change the digest of one of its functions."""

from __future__ import annotations

import pytest

from gpufn.deploy.code_digest import code_digest

_APP = """
import json
from gpufn import Image, gpu_function, enter, method
from helpers import clean

LIMIT = 3

def helper(text):
    return clean(text)[:LIMIT]

@gpu_function(max_workers=2)
def first(text: str) -> str:
    return helper(text)

@gpu_function(image=Image.python("3.12").pip_install("torch"))
def second(number: int = 1) -> int:
    return number + 1

@gpu_function
class Counter:
    step: int = 1

    @enter
    def load(self) -> None:
        self.count = 0

    @method
    def add(self) -> int:
        self.count += self.step
        return self.count

if __name__ == "__main__":
    print(first("a"), second(1))
"""
_HELPERS = "def clean(text):\n    return text.strip()\n"


def _digests(app: str, helpers: str = _HELPERS, words: bytes = b"") -> dict[str, str]:
    files = {"app.py": app.encode(), "helpers.py": helpers.encode(), "data/words.txt": words}
    return {name: code_digest(files, "app", name) for name in ("first", "second", "Counter")}


_ALL = {"first", "second", "Counter"}


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("return number + 1", "return number + 2", {"second"}),
        ("self.count += self.step", "self.count += 2", {"Counter"}),
        ("step: int = 1", "step: int = 2", {"Counter"}),
        ("return helper(text)", "return helper(text)  # as it is", set()),
        ("\n\nLIMIT = 3", "\n\n\n# a comment\nLIMIT = 3", set()),
        ("max_workers=2", "max_workers=3", {"first"}),
        ('pip_install("torch")', 'pip_install("numpy")', {"second"}),
        ("number: int = 1", "number: int = 2", {"second"}),
        ("LIMIT = 3", "LIMIT = 4", _ALL),
        ("clean(text)[:LIMIT]", "clean(text)", _ALL),
        ("import json", "import json, os", _ALL),
        ('print(first("a"), second(1))', 'print(first("b"))', set()),
        # a mentioned statement is not omitted
        ("return helper(text)", "return helper(str(second(len(text))))", {"first"}),
        # an added function, and a removed one
        ("@gpu_function\nclass", "@gpu_function\ndef third() -> None: ...\n\n@gpu_function\nclass", set()),
        ("@gpu_function\nclass", "@asgi_app(public=True)\ndef site(): return second\n\n@gpu_function\nclass", set()),
        ("    @method", "    @method(batch=None)", {"Counter"}),
        # a function with side effects at import
        ("    @method", "    @method(batch=read())", _ALL),
        ("max_workers=2)", "max_workers=read())", _ALL),
        ("@gpu_function(max_workers=2)", "@gpu_function(max_workers=2)\n@register", _ALL),
        ("number: int = 1", "number: int = read()", _ALL),
        ("step: int = 1", "step: int = read()", _ALL),
        ("step: int = 1", "step: int = 1\n    print(step)", _ALL),
        ("class Counter:", "class Counter(Base):", _ALL),
        ("    @method", "    @method\n    @cached", _ALL),
    ],
)
def test_a_change_counts_for_the_functions_that_it_may_reach(old: str, new: str, changed: set[str]) -> None:
    assert _APP.count(old) == 1
    before, after = _digests(_APP), _digests(_APP.replace(old, new))
    assert {name for name in before if before[name] != after[name]} == changed


@pytest.mark.parametrize(
    "reaches",
    [
        "second(2)",
        "second.remote(2)",
        "globals()",
        'getattr(text, "x")',
        'load("app.second")',
        'load("second")',
        "sys.modules",
        "eval(text)",
        "vars()",
    ],
)
def test_a_function_that_may_reach_another_one_changes_with_it(reaches: str) -> None:
    app = _APP.replace("return helper(text)", f"return helper({reaches})")
    before, after = _digests(app), _digests(app.replace("return number + 1", "return number + 2"))
    assert {name for name in before if before[name] != after[name]} >= {"first", "second"}


def test_mentions_are_followed() -> None:
    app = _APP.replace("clean(text)[:LIMIT]", "clean(text)[: second(1)]")
    app = app.replace("return number + 1", "return number + Counter.step")
    before, after = _digests(app), _digests(app.replace("self.count = 0", "self.count = 1"))
    assert {name for name in before if before[name] != after[name]} == _ALL


@pytest.mark.parametrize(
    ("helpers", "changed"),
    [
        (_HELPERS, {"second"}),
        (_HELPERS + "from app import second\n", _ALL),
        (_HELPERS + "import app\ndef f(name): return getattr(app, name)\n", _ALL),
        (_HELPERS + "from app import *\n", _ALL),
        (_HELPERS + "def f(name): return getattr(f, name)\n", {"second"}),
    ],
)
def test_another_module_may_reach_a_function_too(helpers: str, changed: set[str]) -> None:
    before = _digests(_APP, helpers)
    after = _digests(_APP.replace("return number + 1", "return number + 2"), helpers)
    assert {name for name in before if before[name] != after[name]} == changed


def test_another_file_of_the_bundle_counts_for_all() -> None:
    before = _digests(_APP)
    assert all(before[name] != digest for name, digest in _digests(_APP, _HELPERS + "\n").items())
    assert all(before[name] != digest for name, digest in _digests(_APP, words=b"x").items())


def test_where_it_cannot_be_known_there_is_no_digest() -> None:
    assert code_digest({"function.pkl": b""}, "app", "f") == ""
    assert code_digest({"app.py": b"def f(:"}, "app", "f") == ""
    assert code_digest({"app.py": b"", "bad.py": b"def f(:"}, "app", "f") == ""
    assert code_digest({"pkg/__init__.py": b"", "pkg/app.py": b""}, "pkg.app", "f") != ""
