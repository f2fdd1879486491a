"""Workers import gpufn at every cold start, and people wait for `gpufn --help`."""

from __future__ import annotations

import subprocess
import sys

import pytest

_HEAVY = ("httpx", "click", "rich", "cloudpickle", "asyncio", "numpy", "pydantic", "concurrent.futures", "nats")


def _loaded_by(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(ended.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import gpufn",
        "from gpufn import gpu_function, Batch, Retry, enter, method, exit",
        "from gpufn import gpu_function\n@gpu_function(timeout=3)\ndef f(x: int) -> int: return x\nf(1)",
    ],
)
def test_declarations_and_local_calls_load_no_heavy_package(code: str) -> None:
    assert sorted(_loaded_by(code) & set(_HEAVY)) == []


def test_importing_gpufn_alone_does_not_load_msgspec() -> None:
    assert "msgspec" not in _loaded_by("import gpufn")


def test_help_loads_neither_rich_nor_httpx_nor_a_command() -> None:
    loaded = _loaded_by(
        "import contextlib, sys\nsys.argv = ['gpufn', '--help']\nimport io\nfrom gpufn.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): main()"
    )
    commands = {name for name in loaded if name.startswith("gpufn.cli.")}
    assert (sorted(loaded & {"rich", "httpx", "msgspec"}), commands) == ([], set())
