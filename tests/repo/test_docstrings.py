from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_RUN = """
import doctest, importlib, sys
for name in sys.argv[1:]:
    doctest.testmod(importlib.import_module(name))
"""


def _with_examples() -> list[str]:
    return [
        ".".join(path.relative_to(_ROOT / folder).with_suffix("").parts).removesuffix(".__init__")
        for folder in ("sdk", "gateway", "runtime", "builder")
        for path in sorted((_ROOT / folder).rglob("*.py"))
        if ">>> " in path.read_text()
    ]


def test_every_example_in_a_docstring_runs() -> None:
    """In a process of their own: other tests declare functions of the same names."""
    modules = _with_examples()
    assert "gpufn" in modules
    ran = subprocess.run([sys.executable, "-c", _RUN, *modules], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
