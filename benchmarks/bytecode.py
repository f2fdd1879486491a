"""Byte code of bundles: cold starts from a standby of functions with modules of their own, in this version and another.

    python benchmarks/bytecode.py --other PYTHON [--starts 25]

`--other` is the interpreter of another checkout's environment. Both platforms run at the same time, and each round
exchanges their order. Also: what a compilation costs, and what an import of the same modules takes without byte code.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx

import measure
from coldstart import call_from_zero_s
from gpufn_core.home import Home
from gpufn_platform.sandbox.host_paths import own_python_folders
from gpufn_platform.sandbox.support import probe
from gpufn_runtime.agent.bytecode.background import OWN_VERSION
from gpufn_runtime.agent.bytecode.compiler import Compiler
from gpufn_runtime.agent.isolation.sandboxes import Sandboxes
from gpufn_runtime.agent.workers.cgroups import MemoryGroups
from gpufn_runtime.agent.workers.environment import worker_packages

_LINES = (0, 100, 300, 5000)
_LINES_OF_MODULE = 250
_REPEATS = 9
_SETTLED_S = 5.0  # after a deploy: the byte code is there
_HEAD = "from __future__ import annotations\n"
_CLASS = '''

class Handler{number}:
    """Handles requests of kind {number}."""

    limit = {number}

    def __init__(self, name: str, *, retries: int = 3, tags: list[str] | None = None) -> None:
        self.name = name
        self.retries = retries
        self.tags = list(tags or ())
        self._seen: dict[str, int] = {{}}

    def accept(self, request: dict[str, object]) -> bool:
        key = str(request.get("key", ""))
        if not key or key in self._seen:
            return False
        self._seen[key] = len(self._seen) + self.limit
        return all(tag in key for tag in self.tags)

    def describe(self, width: int = 80) -> str:
        parts = [f"{{key}}={{count}}" for key, count in sorted(self._seen.items()) if count > 1]
        text = f"{{self.name}}: " + ", ".join(parts)
        return text[:width] if len(text) > width else text
'''
_FUNCTION = """\
from gpufn import gpu_function
{imports}

@gpu_function(idle_timeout=0.5, scaledown_window=0.5)
def lines_{lines}() -> int:
    return 1
"""


def main() -> None:
    options = measure.arguments("Byte code of bundles.", other="", starts=25)
    if not options.other:
        raise SystemExit("--other is missing: the Python of an environment with the other version")
    about = measure.machine()
    starts: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    pythons = {"other": options.other, "this": sys.executable}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = {lines: _write(folder, lines) for lines in _LINES}
        costs = {lines: _costs(file) for lines, file in files.items() if lines}
        clients = {}
        for name, python in pythons.items():
            platform = stack.enter_context(measure.gpufn_up(python))
            clients[name] = stack.enter_context(httpx.Client(base_url=platform.url, timeout=120))
            for lines, file in files.items():
                measure.deploy_file(platform, file, "--no-check")
                call_from_zero_s(clients[name], f"lines-{lines}")  # fills caches
        time.sleep(_SETTLED_S)
        for number in range(options.starts):
            for lines in _LINES:
                for name in ("other", "this") if number % 2 else ("this", "other"):
                    starts[lines][name].append(round(call_from_zero_s(clients[name], f"lines-{lines}") * 1e3, 3))
    measure.write("bytecode", {"starts_ms": starts, "costs": costs}, _tables(starts, costs), about)


def _write(folder: Path, lines: int) -> Path:
    """Write a function that imports modules with about this many lines."""
    project = folder / f"lines{lines}"
    project.mkdir()
    modules: list[str] = []
    number = 0
    while number * _CLASS.count("\n") < lines:
        text = _HEAD
        while text.count("\n") < min(lines, _LINES_OF_MODULE) and number * _CLASS.count("\n") < lines:
            text += _CLASS.format(number=number)
            number += 1
        modules.append(f"part_{len(modules)}")
        (project / f"{modules[-1]}.py").write_text(text)
    file = project / f"lines_{lines}.py"
    file.write_text(_FUNCTION.format(lines=lines, imports="".join(f"import {name}\n" for name in modules)))
    return file


def _costs(file: Path) -> dict[str, float]:
    """Return the shortest times: of a compilation by the agent, and of imports with and without byte code."""
    sources = sorted(path.name for path in file.parent.glob("*.py"))
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        asyncio.run(_compile(file.parent, sources))
        seconds.append(time.perf_counter() - started)
    modules = [name.removesuffix(".py") for name in sources if name.startswith("part")]
    without = [_import_ms(file.parent, modules) for _ in range(_REPEATS)]
    subprocess.run([sys.executable, "-m", "compileall", "-q", file.parent], check=True)
    with_bytecode = [_import_ms(file.parent, modules) for _ in range(_REPEATS)]
    for path in file.parent.glob("__pycache__/*"):
        path.unlink()
    return {
        "source_bytes": sum((file.parent / name).stat().st_size for name in sources),
        "compilation_ms": round(min(seconds) * 1e3, 1),
        "import_ms": round(min(without), 2),
        "import_of_bytecode_ms": round(min(with_bytecode), 2),
    }


async def _compile(folder: Path, sources: list[str]) -> None:
    python = own_python_folders(map(os.path.dirname, worker_packages()), os.environ)
    sandboxes = Sandboxes(Home(folder.parent), python, namespaces=not probe().namespaces)
    files = Compiler(sandboxes, MemoryGroups.find(), os.environ).compile(folder, sources, OWN_VERSION)
    if len([name async for name, _ in files]) != len(sources):
        raise RuntimeError("the compiler left out files")


def _import_ms(folder: Path, modules: list[str]) -> float:
    script = f"import time; s = time.perf_counter(); import {', '.join(modules)}; print(time.perf_counter() - s)"
    command = [sys.executable, "-B", "-c", script]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder)
    return float(done.stdout) * 1e3


def _tables(starts: dict[int, dict[str, list[float]]], costs: dict[int, dict[str, float]]) -> str:
    rows: list[list[Any]] = []
    for lines, by_version in starts.items():
        other, this = by_version["other"], by_version["this"]
        lower, middle, upper = statistics.quantiles(
            (now / before for now, before in zip(this, other, strict=True)), n=4
        )
        rows.append([f"{lines:,}", _spread(other), _spread(this), f"{middle:.2f} ({lower:.2f} to {upper:.2f})"])
    headers = ["lines", "other, ms", "this, ms", "ratio of the pairs"]
    cost_rows = [[f"{lines:,}", *(f"{value:,}" for value in each.values())] for lines, each in costs.items()]
    names = [name.replace("_", " ") for name in next(iter(costs.values()))]
    return (
        "Cold starts from a standby, in turns: median (quartiles).\n\n"
        + measure.table(headers, rows)
        + f"\nCosts, the shortest of {_REPEATS}:\n\n"
        + measure.table(["lines", *names], cost_rows)
    )


def _spread(values: list[float]) -> str:
    lower, middle, upper = statistics.quantiles(values, n=4)
    return f"{middle:.1f} ({lower:.1f} to {upper:.1f})"


if __name__ == "__main__":
    main()
