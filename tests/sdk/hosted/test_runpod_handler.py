"""Handlers of RunPod as functions. Each file is written as for RunPod and run up to `start`."""

from __future__ import annotations

import asyncio
import io
import runpy
import zipfile
from pathlib import Path
from typing import Any

import pytest

from gpufn.hosted import deploying, runpod_handler
from gpufn_core.errors import InvalidBundle, InvalidSpec
from gpufn_core.spec.function_spec import CallKind
from gpufn_core.spec.naming.names import HOME

PLAIN = "def handler(job):\n    return {'got': job['input'], 'refresh_worker': True}\n"
ASYNC = "async def handler(job):\n    return job['input']['n']\n"
ITEMS = "def handler(job):\n    yield from range(job['input']['n'])\n"
ASYNC_ITEMS = "async def handler(job):\n    yield job['input']['n']\n"
FAILING = "def handler(job):\n    return {'error': 'no'}\n"
START = (
    "import runpod\nrunpod.serverless.start({'handler': handler, 'concurrency_modifier': lambda n: 2})\nraise OSError\n"
)
GUARDED = f"if __name__ == '__main__':\n    {START.replace(chr(10), chr(10) + '    ', 1)}"


def written(folder: Path, text: str) -> Path:
    file = folder / "my_handler.py"
    file.write_text(text)
    return file


def served(folder: Path, handler: str) -> Any:
    return runpod_handler.serve(written(folder, handler + START), "m")


def test_handlers_of_every_kind_are_called_with_the_input(tmp_path: Path) -> None:
    assert served(tmp_path, PLAIN)(a=1) == {"got": {"a": 1}}
    assert asyncio.run(served(tmp_path, ASYNC)(n=2)) == 2
    assert list(served(tmp_path, ITEMS)(n=2)) == [0, 1]

    async def read() -> list[int]:
        return [each async for each in served(tmp_path, ASYNC_ITEMS)(n=2)]

    assert asyncio.run(read()) == [2]


def test_an_error_of_the_handler_fails_the_job(tmp_path: Path) -> None:
    with pytest.raises(runpod_handler.JobFailed, match="no"):
        served(tmp_path, FAILING)()


def test_a_deploy_reads_a_guarded_start_and_missing_packages(tmp_path: Path) -> None:
    file = written(tmp_path, f"import a_package_that_is_missing\n{ITEMS}{GUARDED}")
    hosted = deploying.runpod(file, "", {"memory": "1Gi"}, (), HOME)
    spec = hosted.deployable.spec
    assert (spec.name, spec.methods[0].kind, spec.entry.module) == ("my-handler", CallKind.GENERATOR, "gpufn_entry")
    assert "runpod" not in spec.modules
    assert len(hosted.notes) == 2


def test_the_entry_of_a_handler_in_a_package_runs_it(tmp_path: Path) -> None:
    package = tmp_path / "bots"
    package.mkdir()
    (package / "__init__.py").touch()
    hosted = deploying.runpod(written(package, PLAIN + START), "", {}, (), HOME)
    with zipfile.ZipFile(io.BytesIO(hosted.deployable.data)) as archive:
        archive.extractall(tmp_path / "bundle")
    entry = runpy.run_path(str(tmp_path / "bundle" / "gpufn_entry.py"))
    assert entry["function"](a=1) == {"got": {"a": 1}}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x = 1\n", InvalidSpec),
        ("import runpod\nrunpod.serverless.start({})\n", InvalidSpec),
        ("raise ValueError\n", InvalidBundle),
        ("import runpod\nrunpod.create_pod()\n", InvalidBundle),
    ],
)
def test_a_file_without_a_handler_is_refused(tmp_path: Path, text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        deploying.runpod(written(tmp_path, text), "", {}, (), HOME)


@pytest.mark.parametrize("text", [None, "[", "- a", "predict: 1", 'predict: "predict.py:Predictor"\nbuild: 3'])
def test_a_cog_yaml_without_a_predictor_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "cog.yaml").write_text(text)
    with pytest.raises(InvalidSpec):
        deploying.cog(tmp_path, "", {}, (), HOME)
