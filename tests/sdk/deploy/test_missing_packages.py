"""Deploy of a file whose imported packages are not installed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufn.deploy import bundle
from gpufn.deploy.deployables import Deployable, deployables
from gpufn_core.errors import InvalidBundle
from tests.sdk.cli.commands import command
from tests.sdk.conftest import Project, StubGateway

_APP = """
from __future__ import annotations
import abc
import notorch
import notorch.nn.functional as F
from notorch import nn, Tensor
from notorch.errors import OutOfMemoryError
from nopandas import DataFrame
from gpufn import Image, Retry, enter, gpu_function, method

notorch.backends.cudnn.benchmark = True
SCALE = notorch.pi * 2 / 3
DEVICE = "cuda" if notorch.cuda.is_available() and notorch.__version__ > "1" else "cpu"
Rows = list[Tensor] | DataFrame | None

class Net(nn.Module, abc.ABC):
    def __init__(self) -> None:
        super().__init__()

@notorch.jit.script
def helper(x):
    return F.relu(x)

with notorch.no_grad():
    warm = Net()

@gpu_function(gpu="any", image=Image.python("3.12").pip_install("notorch"), retries=Retry(2, on=[OutOfMemoryError]))
@notorch.inference_mode()
def embed(
    texts: list[str], rows: Rows, weights: Tensor, kind: notorch.dtype = notorch.float16, top: int = 5
) -> list[float]:
    return helper(texts)

@gpu_function
class Model(nn.Module):
    @enter
    def load(self) -> None:
        self.net = Net()

    @method
    @notorch.compile(mode="fast")
    def run(self, text: str) -> Tensor: ...
"""


def _read(root: Path) -> tuple[bundle.Project, dict[str, Deployable]]:
    project = bundle.load(root / "app.py", to_run=False)
    return project, {each.spec.name: each for each in deployables(project.functions)}


def test_names_options_and_signatures_are_read_without_the_packages(project: Project) -> None:
    read, found = _read(project({"app.py": _APP}))
    assert read.missing == ("notorch", "nopandas")
    embed = found["embed"].spec
    assert embed.resources.gpu == ("any",)
    assert embed.retries is not None
    assert embed.retries.on == ("OutOfMemoryError",)
    parameters = embed.methods[0].parameters
    assert list(parameters["properties"]) == ["texts", "rows", "weights", "kind", "top"]
    assert (parameters["properties"]["top"], parameters["required"]) == (
        {"type": "integer", "default": 5},
        ["texts", "rows", "weights"],
    )
    assert parameters["properties"]["texts"] == {"type": "array", "items": {"type": "string"}}
    assert {"notorch", "nopandas"} <= set(embed.modules)
    (run,) = found["model"].spec.methods
    assert (run.name, run.parameters["required"]) == ("run", ["text"])


def test_a_file_that_does_without_a_package_gets_no_stand_in(project: Project) -> None:
    app = "try:\n    import notorch\nexcept ImportError:\n    notorch = None\n"
    app += "from gpufn import gpu_function\n@gpu_function\ndef f(has: bool = notorch is not None) -> None: ...\n"
    read, found = _read(project({"app.py": app}))
    assert read.missing == ()
    assert found["f"].spec.methods[0].parameters["properties"]["has"]["default"] is False


def test_a_module_of_the_project_may_import_missing_packages(project: Project) -> None:
    app = "import helpers\nfrom gpufn import gpu_function\n@gpu_function\ndef f(x: helpers.Kind) -> None: ...\n"
    read, found = _read(project({"app.py": app, "helpers.py": "from nopandas import Kind\n"}))
    assert read.missing == ("nopandas",)
    assert "helpers.py" in found["f"].data.decode("latin1")


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"app.py": "import pkg.gone\n", "pkg/__init__.py": ""}, "No module named 'pkg.gone'"),
        ({"app.py": "import json.gone\n"}, "No module named 'json.gone'"),
        ({"app.py": "import notorch\nraise ValueError(1)\n"}, "ValueError: 1 (imported without notorch: not installed"),
    ],
)
def test_another_import_error_fails(project: Project, files: dict[str, str], why: str) -> None:
    with pytest.raises(InvalidBundle) as caught:
        bundle.load(project(files) / "app.py", to_run=False)
    assert why in caught.value.message


def test_code_that_runs_here_gets_no_stand_in(project: Project) -> None:
    with pytest.raises(InvalidBundle, match="'notorch'"):
        bundle.load(project({"app.py": "import notorch\n"}) / "app.py")


def test_deploy_reports_which_packages_were_missing(gateway: StubGateway, project: Project) -> None:
    project({"app.py": "import notorch\nfrom gpufn import gpu_function\n@gpu_function\ndef f(x: int) -> int: ...\n"})
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("POST /v1/functions", {"name": "f", "active": 1, "serving": 1, "latest": 1}, status=201)
    gateway.any_bundle = True
    result = command("deploy", "app.py")
    assert (result.exit_code, result.stderr.count("\n")) == (0, 1)
    assert result.stderr.startswith("gpufn: warning: ")
    assert "app.py without notorch" in result.stderr
