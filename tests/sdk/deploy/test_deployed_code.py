"""The warning about deployed code that differs from the file."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn.call import transport as _transport
from gpufn.client.http_transport import HttpTransport
from gpufn.deploy.deployables import Deployable, deployables
from gpufn_core.encoding import values
from gpufn_core.encoding.media import NATIVE
from gpufn_core.errors import DeployedCodeDiffers
from tests.sdk.conftest import Project, StubGateway

_APP = """
from gpufn import gpu_function
import helpers

@gpu_function
def stale(n: int) -> int:
    return helpers.twice(n)

@gpu_function
def other() -> int:
    return 1

if __name__ == "__main__":
    print(stale.remote(2))
"""
_FILES = {"app.py": _APP, "helpers.py": "def twice(n):\n    return 2 * n\n", "data/words.txt": "one"}


@dataclasses.dataclass
class Deployed:
    """The project, its function `stale`, and a gateway where `stale` was deployed."""

    root: Path
    stale: Any
    gateway: StubGateway
    wanted: Deployable

    def shown(self, **fields: Any) -> dict[str, Any]:
        view = {"name": "stale", "active": 3, "serving": 3, "latest": 3, "spec": {"python": self.wanted.spec.python}}
        return {**view, "source": msgspec.to_builtins(self.wanted.source), **fields}

    def show(self, **fields: Any) -> None:
        self.gateway.answers["GET /v1/functions/stale"] = []
        self.gateway.on("GET /v1/functions/stale", self.shown(**fields))

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.root / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def warned(self) -> list[warnings.WarningMessage]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert self.stale.remote(2) == 4
        return caught


@pytest.fixture
def deployed(gateway: StubGateway, project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployed]:
    root = project({name: text for name, text in _FILES.items() if "/" not in name})
    (root / "data").mkdir()
    (root / "data/words.txt").write_text("one")
    monkeypatch.syspath_prepend(root)
    stale = importlib.import_module("app").stale
    (wanted,) = deployables([stale], ["data/*"])
    gateway.on("POST /v1/functions/stale/invoke", values.encode_result(4, NATIVE)[1], content_type=NATIVE)
    transport = HttpTransport()
    monkeypatch.setattr(_transport, "_installed", transport)
    deployed = Deployed(root, stale, gateway, wanted)
    deployed.show()
    yield deployed
    transport.close()


@pytest.mark.parametrize(
    ("file", "old", "new", "differs"),
    [
        ("app.py", "helpers.twice(n)", "helpers.twice(n) + 1", True),
        ("app.py", "@gpu_function\ndef stale", "@gpu_function(max_workers=2)\ndef stale", True),
        ("helpers.py", "2 * n", "3 * n", True),
        ("app.py", "return helpers", "# a comment\n    return helpers", False),
        ("app.py", "return 1", "return 2", False),  # another function
        ("app.py", "print(", "print('n', ", False),  # workers do not run it
        ("data/words.txt", "one", "two", False),  # the process does not know the files of `--include`
        ("app.py", "import helpers", "import helpers", False),
    ],
)
def test_a_first_call_warns_when_the_file_has_other_code(
    deployed: Deployed, file: str, old: str, new: str, differs: bool
) -> None:
    deployed.edit(file, old, new)
    caught = deployed.warned()
    assert [each.category for each in caught] == [DeployedCodeDiffers] * differs
    if caught:
        assert caught[0].filename == __file__, "the warning points at the call"
        assert "stale@3" in str(caught[0].message)
        assert str(deployed.root / "app.py") in str(caught[0].message)
    assert deployed.warned() == []
    assert [request.method for request in deployed.gateway.requests] == ["GET", "POST", "POST"]


def _hidden(deployed: Deployed) -> None:
    deployed.gateway.answers["GET /v1/functions/stale"] = []
    deployed.gateway.on("GET /v1/functions/stale", {"code": "forbidden", "detail": "This key may only call."}, 403)


@pytest.mark.parametrize(
    "shown",
    [
        _hidden,
        lambda deployed: deployed.show(source=None),
        lambda deployed: deployed.show(spec={"python": "3.99"}),  # another Python has other syntax trees
    ],
    ids=["not to be read", "no source", "another Python"],
)
def test_code_that_cannot_be_compared_is_no_warning(deployed: Deployed, shown: Any) -> None:
    deployed.edit("helpers.py", "2 * n", "3 * n")
    shown(deployed)
    assert deployed.warned() == []


@pytest.mark.parametrize("edited", [False, True])
def test_a_script_that_calls_its_own_function_is_compared_as_the_file_that_was_deployed(
    deployed: Deployed, edited: bool
) -> None:
    if edited:
        deployed.edit("app.py", "helpers.twice(n)", "helpers.twice(n) + 1")
    script = [sys.executable, str(deployed.root / "app.py")]
    ended = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "4\n"), ended.stderr
    assert ("DeployedCodeDiffers" in ended.stderr) is edited, ended.stderr
