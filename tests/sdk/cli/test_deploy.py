"""`gpufn deploy` of a file of functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.cli.commands import APP, VIEW, command
from tests.sdk.conftest import Project, StubGateway


def test_a_deploy_with_a_key_that_may_not_is_exit_code_5(gateway: StubGateway, project: Project) -> None:
    project(APP)
    gateway.on("GET /v1/nodes", {"nodes": []})
    original = gateway.answer_to
    gateway.answer_to = lambda request: (  # type: ignore[method-assign]
        (403, {}, b"") if request.method == "HEAD" else original(request)
    )
    result = command("deploy", "app.py")
    message = "gpufn: this needs a key with the scope 'deploy'"
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (5, message)


def test_deploy_sends_each_function_of_the_file(gateway: StubGateway, project: Project) -> None:
    project(APP)
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("POST /v1/functions", VIEW, status=201)
    gateway.on("GET /v1/functions/f", {"code": "function_not_found"}, status=404)
    gateway.on("GET /v1/functions/f", VIEW)
    gateway.on("GET /v1/functions/f", VIEW | {"serving": 3})
    digest_paths: list[str] = []
    original = gateway.answer_to

    def answer(request: Any) -> Any:
        if "/bundles/" in request.path:
            digest_paths.append(f"{request.method} {request.path}")
            return (404 if request.method == "HEAD" else 201), {}, b""
        return original(request)

    gateway.answer_to = answer  # type: ignore[method-assign]
    result = command("deploy", "app.py")
    assert (result.exit_code, result.stdout) == (0, f"f@3  {gateway.url}/v1/functions/f/invoke\n")
    sent = next(request for request in gateway.requests if request.method == "POST").json
    assert sent["spec"]["entry"] == {"module": "app", "qualname": "f", "packaging": "source"}
    assert [path.partition(" ")[0] for path in digest_paths] == ["HEAD", "PUT"]
    assert digest_paths[0].endswith(sent["bundle"])


@pytest.mark.parametrize(
    ("options", "code", "stdout", "stderr"),
    [
        (["--no-wait"], 0, "f@3  URL/v1/functions/f/invoke  f@2 serves until it is ready\n", ""),
        ([], 1, "", "gpufn: f@3 does not start, f@2 still serves: no such file\n"),
    ],
)
def test_deploy_names_the_serving_revision(  # noqa: PLR0917
    gateway: StubGateway, project: Project, options: list[str], code: int, stdout: str, stderr: str
) -> None:
    project(APP)
    failing = VIEW | {"next": {"revision": 3, "start_error": {"code": "worker_lost", "message": "no such file"}}}
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("GET /v1/functions/f", failing)
    gateway.on("POST /v1/functions", failing, status=201)
    gateway.any_bundle = True
    result = command("deploy", "app.py", *options)
    assert (result.exit_code, result.stdout.replace(gateway.url, "URL"), result.stderr) == (code, stdout, stderr)


def test_an_interrupted_deploy_names_what_goes_on(
    gateway: StubGateway, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(APP)
    gateway.any_bundle = True
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("POST /v1/functions", VIEW, status=201)
    monkeypatch.setattr("gpufn.cli.functions.deploy.wait_until_served", _interrupted)
    result = command("deploy", "app.py")
    assert (result.exit_code, "f@3" in result.stderr) == (130, True)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_deploy_names_the_arguments_that_changed(gateway: StubGateway, project: Project) -> None:
    project({"app.py": APP["app.py"].replace("x: int", "x: int, mark: str = '!'")})
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("GET /v1/functions/f", VIEW)
    gateway.on("POST /v1/functions", VIEW | {"serving": 3}, status=201)
    gateway.any_bundle = True
    result = command("deploy", "app.py")
    assert result.stderr.startswith("gpufn: warning: ")
    assert result.stderr.endswith(' changed: mark is added, default "!"\n')


def test_deploy_sends_the_source_of_the_function(gateway: StubGateway, project: Project) -> None:
    project({**APP, "pyproject.toml": ""})
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("POST /v1/functions", VIEW | {"serving": 3}, status=201)
    gateway.any_bundle = True
    assert command("deploy", "app.py", "--replace", "--no-check").exit_code == 0
    sent = next(request for request in gateway.requests if request.method == "POST").json
    assert (sent["source"]["file"], sent["replace"], sent["check"]) == ("app.py", True, False)


def test_a_deploy_stops_at_a_function_of_another_file(gateway: StubGateway, project: Project) -> None:
    """Bug: the functions behind it were deployed, although the file was probably the wrong one."""
    one = APP["app.py"].partition("\n")[2]
    project({"app.py": APP["app.py"] + "".join(one.replace("def f", f"def {name}") for name in "ghi")})
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("POST /v1/functions", VIEW | {"serving": 3}, status=201)
    refusal = {"code": "conflict", "detail": 'g@3 is from b.py: set "replace": true', "field": "replace"}
    gateway.on("POST /v1/functions", refusal, status=409)
    gateway.any_bundle = True
    result = command("deploy", "app.py", "--prune")
    assert (result.exit_code, result.stderr) == (
        1,
        "gpufn: not deployed: h, i\ngpufn: g@3 is from b.py: set --replace\n",
    )
    assert result.stdout.startswith("f@3  ")
    sent = [request.json["spec"]["name"] for request in gateway.requests if request.method == "POST"]
    assert sent == ["f", "g"]


def test_a_function_above_the_limit_of_its_team_does_not_stop_the_others(
    gateway: StubGateway, project: Project
) -> None:
    """Bug: each 409 counted as a function of another source."""
    one = APP["app.py"].partition("\n")[2]
    project({"app.py": APP["app.py"] + "".join(one.replace("def f", f"def {name}") for name in "gh")})
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("POST /v1/functions", {"code": "conflict", "detail": "the team has 1,000 functions"}, status=409)
    gateway.any_bundle = True
    assert command("deploy", "app.py", "--no-check").exit_code == 1
    sent = [request.json["spec"]["name"] for request in gateway.requests if request.method == "POST"]
    assert sent == ["f", "g", "h"]
    assert not any(request.method == "DELETE" for request in gateway.requests)


def test_a_function_without_its_secret_does_not_stop_the_others(gateway: StubGateway, project: Project) -> None:
    """Bug: the functions before it were deployed, and the command did not name them."""
    one = APP["app.py"].partition("\n")[2]
    project({"app.py": APP["app.py"] + "".join(one.replace("def f", f"def {name}") for name in "gh")})
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("POST /v1/functions", VIEW | {"serving": 3}, status=201)
    gateway.on("POST /v1/functions", {"code": "invalid_spec", "detail": "g needs a secret"}, status=422)
    gateway.on("POST /v1/functions", VIEW | {"serving": 3}, status=201)
    gateway.any_bundle = True
    result = command("deploy", "app.py", "--no-check")
    assert result.exit_code != 0
    assert [line.partition("@")[0] for line in result.stdout.splitlines()] == ["f", "h"]


def test_a_function_that_is_not_trusted_does_not_stop_the_others(gateway: StubGateway, project: Project) -> None:
    project({"app.py": APP["app.py"] + APP["app.py"].partition("\n")[2].replace("def f", "def g")})
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("POST /v1/functions", {"code": "untrusted_deploy", "detail": "f needs a signature"}, status=403)
    gateway.on("POST /v1/functions", VIEW | {"name": "g", "serving": 3}, status=201)
    gateway.any_bundle = True
    result = command("deploy", "app.py")
    assert (result.exit_code, result.stderr) == (5, "gpufn: f needs a signature\n")
    assert result.stdout.startswith("g@3  ")


def test_output_of_the_import_of_a_file_is_no_part_of_the_json(gateway: StubGateway, project: Project) -> None:
    project({"app.py": "print('imported')\n" + APP["app.py"]})
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("POST /v1/functions", VIEW | {"serving": 3}, status=201)
    gateway.any_bundle = True
    result = command("deploy", "app.py", "--json")
    assert ([view["name"] for view in json.loads(result.stdout)], result.stderr) == (["f"], "imported\n")


def test_deploy_warns_of_resources_that_no_node_has(gateway: StubGateway, project: Project) -> None:
    project({"app.py": APP["app.py"].replace("@gpu_function", "@gpu_function(gpu='H100')")})
    device = {"type": "cpu", "kind": "EPYC", "memory_bytes": 1 << 30, "cores": 2.0}
    gateway.on("GET /v1/nodes", {"nodes": [{"node": "n1", "devices": [device]}]})
    gateway.on("POST /v1/functions", VIEW | {"serving": 3}, status=201)
    gateway.any_bundle = True
    result = command("deploy", "app.py")
    assert result.stderr.startswith("gpufn: warning: ")
    assert result.stderr.endswith("the GPU 'H100'\n")
    assert result.exit_code == 0


@pytest.mark.parametrize(("concurrency", "warns"), [(128, False), (129, True)])
def test_deploy_warns_of_a_worker_that_runs_very_many_calls(
    gateway: StubGateway, project: Project, concurrency: int, warns: bool
) -> None:
    options = f"@gpu_function(concurrency={concurrency}, batch=Batch(32))"
    text = "from gpufn import Batch, gpu_function\n{}\ndef f(x: list[int]) -> list[int]: return x\n"
    project({"app.py": text.format(options)})
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("POST /v1/functions", VIEW | {"serving": 3}, status=201)
    gateway.any_bundle = True
    result = command("deploy", "app.py")
    warning = (
        "gpufn: warning: each worker of f runs up to 4,128 calls at the same time (concurrency=129 x max_size=32): "
    )
    assert (result.exit_code, result.stderr.startswith(warning)) == (0, warns)
    assert ("lower it" in result.stderr) is warns


def test_an_included_glob_is_relative_to_the_folder_that_holds_the_package(
    gateway: StubGateway, project: Project
) -> None:
    project({"pack/__init__.py": "", "pack/app.py": APP["app.py"], "data/words.txt": "w", "pack/data/other.txt": "o"})
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("POST /v1/functions", VIEW | {"serving": 3}, status=201)
    gateway.any_bundle = True
    assert command("deploy", "pack/app.py", "--include", "data/*").exit_code == 0
    refused = command("deploy", "pack/app.py", "--include", "other/*")
    assert refused.stderr.strip().endswith(str(Path.cwd()))


@pytest.mark.parametrize(
    ("files", "arguments", "code", "message"),
    [
        ({"app.py": "x = 1"}, [], 1, "app.py declares no @gpu_function"),
        (APP, ["--name", "g"], 4, "app.py does not declare g; it declares f"),
        (
            {"app.py": "import json.nothing"},
            [],
            1,
            "cannot import app.py: line 1, `import json.nothing`: ModuleNotFound",
        ),
        ({}, [], 2, "there is no file app.py"),
        (APP, ["--include", "../x"], 2, "include='../x' is not a glob below "),
        (APP, ["--include", "/etc/passwd"], 2, "include='/etc/passwd' is not a glob below "),
    ],
)
def test_deploy_names_the_fault_of_the_file(
    project: Project, files: dict[str, str], arguments: list[str], code: int, message: str
) -> None:
    project(files)
    result = command("deploy", "app.py", *arguments)
    assert result.exit_code == code
    assert result.stderr.startswith(f"gpufn: {message}")
