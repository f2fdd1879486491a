"""Functions of a notebook's cells, in a real Jupyter kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Platform

pytestmark = pytest.mark.e2e

_DEFINE = """
import threading
from gpufn import Client, gpu_function

client, factor = Client(), 3

def scaled(x):
    return factor * x

@gpu_function(name="cell", max_workers=1)
def f(x: int) -> int:
    return scaled(10 // x)

deployed = client.deploy(f)
deployed
"""
_REDEFINE = """
import warnings
warnings.simplefilter("error")

@gpu_function(name="cell", max_workers=1)
def f(x: int) -> int:
    return scaled(10 // x) + 1

try:
    f.remote(2)
except Warning as warning:
    print(type(warning).__name__)
client.deploy(f)[0].active, client.deploy(f)[0].active, f.remote(2)
"""
_LOCK = """
lock = threading.Lock()

@gpu_function(name="cell")
def locked() -> bool:
    return lock.locked()

client.deploy(locked)
"""
_CELLS = (
    _DEFINE,
    "f.remote(2)",
    _REDEFINE,
    "total = sum(f.map([1, 2] * 10))",
    "print(total, await f.aio.remote(5))",
    "f.spawn(1)",
    "f.remote(0)",
    _LOCK,
)


def test_functions_of_cells_are_deployed_called_and_redefined(
    platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbformat  # its import would take a second in each process of a run
    from nbclient import NotebookClient

    monkeypatch.setenv("GPUFN_URL", platform.url)
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    make: Any = nbformat.v4  # untyped
    notebook = make.new_notebook(cells=[make.new_code_cell(cell) for cell in _CELLS])
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=60, kernel_name="python3", allow_errors=True, resources=resources).execute()

    def outputs(number: int) -> Any:
        return notebook.cells[number].outputs

    def result(number: int, kind: str = "text/plain") -> str:
        (output,) = outputs(number)
        assert output.output_type in ("execute_result", "display_data"), output
        text: str = output.data[kind]
        return text

    assert "cell@1" in result(0, "text/html")
    assert result(1) == "15"
    warned, deployed = outputs(2)
    assert warned.text == "DeployedCodeDiffers\n"
    assert deployed.data["text/plain"] == "(2, 2, 16)"  # deployed again without a change, it keeps its revision
    assert result(3) == "cell 20/20"
    assert "<progress" in result(3, "text/html")
    (printed,) = outputs(4)
    assert printed.text == "470 7\n"
    assert "cell@2" in result(5, "text/html")
    (raised,) = outputs(6)
    assert raised.ename == "FunctionRaised"
    assert "    return scaled(10 // x) + 1" in raised.evalue + "".join(raised.traceback)  # the line of the cell
    assert not any("invoke_raw" in frame for frame in raised.traceback)  # inside the client
    (refused,) = outputs(7)
    assert refused.ename == "InvalidBundle"
    assert "variable lock" in refused.evalue
