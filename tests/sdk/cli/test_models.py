"""`gpufn deploy MODEL`, `build`, `builds`, `engines`, `models`: requests, output and exit codes."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpufn.cli import app
from gpufn.cli.models.build_progress import build_progress, describe_progress
from gpufn.client.views.models import BuildAhead, BuildView
from gpufn.deploy.convert.torch_factory import check_tensors, module_and_inputs
from gpufn_core.domain.devices.engine import BuildStage, BuildState
from gpufn_core.errors import InvalidSpec
from tests.sdk.conftest import Project, StubGateway

_ONNX = "any bytes"  # only the gateway and the builder parse it, not the CLI
_DIGEST = hashlib.sha256(_ONNX.encode()).hexdigest()
_ARTIFACT = f"/v1/artifacts/{_DIGEST}"
_VIEW: dict[str, Any] = {"name": "net", "active": 1, "serving": 1, "latest": 1, "spec": {}}
_BUILD: dict[str, Any] = {
    "id": "b1",
    "device": "cpu",
    "state": "building",
    "stage": "compile",
    "progress": 0.5,
    "detail": "onnxruntime-cpu",
    "model": {"parameter": "model", "files": [{"name": "net.onnx"}]},
}
_BUILT = _BUILD | {"state": "succeeded", "stage": "publish", "engines": ["e" * 64], "started_at": 1.0, "ended_at": 3.0}
_CRASH = {
    "code": "build_failed",
    "message": "it crashed",
    "stage": "compile",
    "node": "Conv_3",
    "traceback": "line 1\nline 2",
}
_REPORT: dict[str, list[dict[str, Any]]] = {
    "candidates": [
        {
            "backend": "onnxruntime-cpu",
            "key": "e" * 64,
            "size": 2048,
            "accuracy": {"max_abs": 1e-6, "rel_l2": 2e-7, "cosine": 1.0},
            "latency": {"p50_s": 0.002, "p90_s": 1.0, "p99_s": 1.0, "per_s": 1.0, "settled": True},
        },
        {"backend": "tensorrt", "reason": "compile: no GPU"},
    ]
}


def _gpufn(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, arguments, **options)


@pytest.fixture
def platform(gateway: StubGateway, project: Project) -> StubGateway:
    """It lacks the model, and has no function yet."""
    project({"net.onnx": _ONNX})
    gateway.any_bundle = True
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on(f"HEAD {_ARTIFACT}", status=404)
    gateway.on(f"PUT {_ARTIFACT}", status=201)
    gateway.on("POST /v1/functions", {"function": "net", "revision": 1, "state": "building", "builds": ["b1"]}, 202)
    gateway.on("POST /v1/builds", _BUILD, status=202)
    return gateway


def _sent(gateway: StubGateway, what: str) -> Any:
    return next(request for request in gateway.requests if f"{request.method} {request.path}" == what)


def test_a_model_is_uploaded_deployed_and_awaited(platform: StubGateway) -> None:
    revision = {"number": 1, "state": "building", "builds": [_BUILD]}
    begun = _BUILD | {"stage": None}
    queued = _BUILD | {"state": "pending", "stage": None, "detail": ""}
    for build in (
        queued,
        queued | {"ahead": {"id": "b0", "model": "slow.onnx", "function": "slow", "building_s": 30.0}},
        queued | {"ahead": {"id": "b0", "model": "slow.onnx", "function": "slow", "building_s": 31.0}},
        queued | {"detail": "no builder runs for cpu"},
        begun,
        _BUILD,
        _BUILD | {"detail": "chooses threads"},
    ):
        platform.on("GET /v1/functions/net/revisions/1", revision | {"builds": [build]})
    platform.on("GET /v1/functions/net/revisions/1", revision | {"state": "ready", "builds": [_BUILT]})
    platform.on("GET /v1/functions/net", {"code": "function_not_found"}, status=404)
    platform.on("GET /v1/functions/net", _VIEW)
    result = _gpufn("deploy", "net.onnx")
    assert (result.exit_code, result.stdout) == (0, f"net@1  {platform.url}/v2/models/net/infer\n")
    assert result.stderr.splitlines() == [
        "net.onnx on cpu: waiting for a builder",
        "net.onnx on cpu: waiting for a builder, which has been building slow.onnx of slow for 30 s",
        "net.onnx on cpu: waiting: no builder runs for cpu",
        "net.onnx on cpu: compile: onnxruntime-cpu",
        "net.onnx on cpu: built",
    ]
    uploaded = _sent(platform, f"PUT {_ARTIFACT}")
    assert (uploaded.body, uploaded.headers["content-length"]) == (_ONNX.encode(), str(len(_ONNX)))
    spec = _sent(platform, "POST /v1/functions").json["spec"]
    assert spec["entry"] == {"module": "", "qualname": "", "packaging": "model"}
    assert spec["methods"] == [{"parameters": {"type": "object"}}]
    assert spec["models"][0]["parameter"] == "model"
    assert spec["models"][0]["files"] == [{"name": "net.onnx", "digest": _DIGEST, "size": len(_ONNX)}]
    assert (spec["batch"], spec["concurrency"]) == (None, 2)


def test_a_models_options_become_the_spec(platform: StubGateway) -> None:
    arguments = (
        "deploy net.onnx --no-wait --name resnet --max-batch 32 --precision fp16 --gpu L4 --gpu any --allow-cpu "
        "--no-verify --shape x=1x3:8x3:32x3 --shape y=4 --tolerance rel_l2=0.01 --min 1 --max 2 "
        "--memory 2Gi --idle-timeout 5 --build-timeout 1200"
    )
    result = _gpufn(*arguments.split())
    assert (result.exit_code, result.stdout.startswith("resnet@1  building: `gpufn builds`")) == (0, True)
    spec = _sent(platform, "POST /v1/functions").json["spec"]
    model = spec["models"][0]
    assert (spec["name"], spec["batch"], spec["resources"]["gpu"]) == (
        "resnet",
        {"max_size": 32, "max_wait_ms": 0.0},
        ["L4", "any"],
    )
    assert (spec["scaling"]["min_workers"], spec["scaling"]["max_workers"], spec["scaling"]["idle_timeout_s"]) == (
        1,
        2,
        5,
    )
    assert spec["resources"]["memory_bytes"] == 2 << 30
    assert (model["precision"], model["max_batch"], model["allow_cpu"]) == ("fp16", 32, True)
    assert model["profiles"][0]["inputs"]["x"] == {"min": [1, 3], "opt": [8, 3], "max": [32, 3]}
    assert model["profiles"][0]["inputs"]["y"]["opt"] == [4]
    assert model["tolerance"]["rel_l2"] == 0.01
    assert model["verify"] is False
    assert model["build_timeout_s"] == 1200


def test_a_function_with_a_model_sends_the_file_beside_it(platform: StubGateway, project: Project) -> None:
    project(
        {
            "deep/net.onnx": _ONNX,
            "deep/app.py": "from gpufn import Model, gpu_function\n"
            "@gpu_function(models={'net': Model('net.onnx')})\ndef f(x: int, net) -> int: return x\n",
        }
    )
    result = _gpufn("deploy", "deep/app.py", "--no-wait", "--json")
    assert (result.exit_code, json.loads(result.stdout)[0]["builds"]) == (0, ["b1"])
    spec = _sent(platform, "POST /v1/functions").json["spec"]
    assert (spec["models"][0]["parameter"], list(spec["methods"][0]["parameters"]["properties"])) == ("net", ["x"])
    assert _sent(platform, f"PUT {_ARTIFACT}").body == _ONNX.encode()


def test_a_file_that_is_there_is_not_sent_again(platform: StubGateway) -> None:
    platform.answers.pop(f"HEAD {_ARTIFACT}")
    platform.on(f"HEAD {_ARTIFACT}")
    assert _gpufn("deploy", "net.onnx", "--no-wait").exit_code == 0
    assert [request.method for request in platform.requests if request.path == _ARTIFACT] == ["HEAD"]


def test_a_build_that_fails_is_one_line_and_an_exit_code(platform: StubGateway) -> None:
    failed = {"number": 1, "state": "failed", "builds": [_BUILD | {"state": "failed"}], "error": _CRASH}
    platform.on("GET /v1/functions/net/revisions/1", failed)
    result = _gpufn("deploy", "net.onnx")
    assert (result.exit_code, result.stdout) == (8, "")
    assert result.stderr.splitlines()[1:] == ["gpufn: compile, node Conv_3: it crashed"]


def test_debug_shows_the_compilers_log(platform: StubGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFN_DEBUG", "1")
    platform.on("GET /v1/functions/net/revisions/1", {"number": 1, "state": "failed", "error": _CRASH})
    error = _gpufn("deploy", "net.onnx").exception
    assert getattr(error, "__notes__", []) == ["\nThe compiler's log:\nline 1\nline 2"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["deploy", "app.py", "--precision", "fp16"],
            2,
            "--precision is only for a model; set the options of a function",
        ),
        (["deploy", "app.py", "--min", "1"], 2, "--min is only for a model"),
        (
            ["deploy", "模型.onnx"],
            2,
            "cannot derive a name from 模型.onnx, which has no letter a-z or digit: pass --name",
        ),
        (["deploy", "net.onnx", "--name", "a", "--name", "b"], 2, "a model has only one --name"),
        (
            ["deploy", "net.onnx", "--include", "x*"],
            2,
            "--include is only for a file with functions; a model's weights",
        ),
        (["deploy", "no.onnx"], 2, "gpufn: model: there is no file "),
        (["deploy", "net.onnx", "--precision", "fp8"], 2, "gpufn: precision is fp32, tf32, fp16, bf16 or int8"),
        (["deploy", "net.onnx", "--shape", "x"], 2, "gpufn: --shape must be x=1x3x224x224, or"),
        (["deploy", "net.onnx", "--shape", "x=1:2"], 2, "gpufn: --shape must be x=1x3x224x224, or"),
        (["deploy", "net.onnx", "--tolerance", "l2"], 2, "gpufn: --tolerance must be a limit such as atol="),
        (["deploy", "net.onnx", "--tolerance", "rel_l2=nan"], 2, "gpufn: tolerance is a dict of atol, rtol, "),
        (["deploy", "net.onnx", "--tolerance", "max_abs=inf"], 2, "gpufn: tolerance is a dict of atol, rtol, "),
        (["build", "net.pb"], 2, "gpufn: net.pb is no model: pass MODEL.onnx, .pt, .pt2, .skops"),
        (["build", "net.pt"], 2, "gpufn: there is no file net.pt"),
        (["build", "no.py:make"], 2, "gpufn: there is no file no.py"),
        (["build", "app.py:make"], 1, "gpufn: cannot export app.py:make: app.py has no function make"),
        (
            ["deploy", "f.py:add_up"],
            1,
            "add_up is a @gpu_function, not a model factory: deploy it with `gpufn deploy f.py --name",
        ),
    ],
)
def test_wrong_options_are_reported_before_a_request(
    platform: StubGateway, project: Project, arguments: list[str], code: int, message: str
) -> None:
    project({"app.py": "x = 1", "f.py": "from gpufn import gpu_function\n@gpu_function\ndef add_up(): ..."})
    result = _gpufn(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr.replace("│ ", "").replace("\n", " ")
    assert [request for request in platform.requests if request.method != "HEAD"] == []


def test_a_build_shows_its_candidates_and_writes_its_report(platform: StubGateway) -> None:
    platform.on("GET /v1/builds/b1", _BUILT)
    platform.on("GET /v1/builds/b1/report", _REPORT)
    platform.on("GET /v1/builds/b1/report.html", b"<html>")
    result = _gpufn("build", "net.onnx", "--device", "NVIDIA L4", "--report", "report.html")
    assert result.exit_code == 0
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["ENGINE", "BACKEND", "SIZE", "P50", "REL.", "L2", "NOTE"],
        ["eeeeeeeeeeee", "onnxruntime-cpu", "2", "KiB", "2", "ms", "2.0e-07"],
        ["-", "tensorrt", "-", "-", "-", "no", "engine:", "compile:", "no", "GPU"],
    ]
    assert result.stderr.splitlines() == [
        "net.onnx on cpu: compile: onnxruntime-cpu",
        "net.onnx on cpu: built",
        "wrote the report to report.html",
        "net.onnx on cpu: built in 2 s  (build b1)",
    ]
    assert Path("report.html").read_bytes() == b"<html>"
    assert _sent(platform, "POST /v1/builds").json["device"] == "NVIDIA L4"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--report", "nowhere/report.html"), "nowhere/report.html: No such file or directory"),
        (("--report", "."), ".: Is a directory"),
        (("--report", "report.html", "--no-wait"), "--report needs the end of the build: omit --no-wait"),
    ],
)
def test_a_report_file_that_cannot_be_written_fails_before_the_build(
    platform: StubGateway, arguments: tuple[str, ...], message: str
) -> None:
    result = _gpufn("build", "net.onnx", *arguments)
    assert result.exit_code != 0
    assert message in result.stderr
    assert not [request for request in platform.requests if request.method == "POST"]


def test_a_build_as_json_is_its_view(platform: StubGateway) -> None:
    platform.on("GET /v1/builds/b1", _BUILT)
    view = json.loads(_gpufn("build", "net.onnx", "--json").stdout)
    assert (view["state"], view["engines"]) == ("succeeded", ["e" * 64])
    assert "device" not in _sent(platform, "POST /v1/builds").json
    assert _gpufn("build", "net.onnx", "--no-wait").stdout == "b1\n"


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ({"state": "failed", "error": _CRASH}, "compile, node Conv_3: it crashed"),
        ({"state": "cancelled"}, "the build b1 was cancelled"),
    ],
)
def test_a_failed_build_leaves_its_report_too(platform: StubGateway, end: dict[str, Any], message: str) -> None:
    platform.on("GET /v1/builds/b1", _BUILD | end)
    platform.on("GET /v1/builds/b1/report", b"{}")
    result = _gpufn("build", "net.onnx", "--report", "report.json")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (8, f"gpufn: {message}")
    assert Path("report.json").read_bytes() == b"{}"


def test_builds_are_listed_and_cancelled(gateway: StubGateway) -> None:
    gateway.on("GET /v1/builds", {"builds": [_BUILT, _BUILD | {"id": "b2", "state": "failed", "error": _CRASH}]})
    gateway.on("GET /v1/builds/b1", _BUILD)
    gateway.on("GET /v1/builds/b2", _BUILT)
    gateway.on("DELETE /v1/builds/b1", _BUILD)
    gateway.on("DELETE /v1/builds/b2", _BUILT)
    gateway.on("GET /v1/builds/none", {"code": "build_not_found", "detail": "There is no build with this id."}, 404)
    for arguments in (["builds"], ["builds", "ls"]):
        _, built, failed = _gpufn(*arguments).stdout.splitlines()
        assert (built.split()[:3], built.split()[-3:]) == (["b1", "net.onnx", "on"], ["2", "s", "built"])
        assert failed.endswith("failed: compile, node Conv_3: it crashed")
    assert _gpufn("builds", "cancel", "b1").stdout == "b1 is being cancelled\n"
    assert _gpufn("builds", "cancel", "b2").stdout == "b2 had already ended\n"
    missing = _gpufn("builds", "cancel", "none")
    assert (missing.exit_code, missing.stderr.count("\n")) == (4, 1)


_ENGINE: dict[str, Any] = {
    "key": "e" * 64,
    "model": "net.onnx",
    "backend": "onnxruntime-cpu",
    "device": "cpu",
    "precision": "fp32",
    "size": 2048,
    "accuracy": {"max_abs": 1e-6, "rel_l2": 2e-7, "cosine": 1.0},
    "latency": {"p50_s": 0.002, "p90_s": 1.0, "p99_s": 1.0, "per_s": 1.0, "settled": True},
    "built_at": 1.0,
}
_MODEL: dict[str, Any] = {
    "name": "net",
    "function": "net",
    "revision": 3,
    "parameter": "model",
    "file": "net.onnx",
    "precision": "fp32",
    "max_batch": 8,
    "batched": True,
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
    "outputs": [{"name": "y", "datatype": "INT64", "shape": [-1]}],
    "profiles": [{"inputs": {"x": {"min": [1, 3], "opt": [8, 3], "max": [8, 3]}}}],
    "engines": {"cpu": [_ENGINE]},
}


def test_remarks_on_an_engine_are_shown_wherever_it_is(platform: StubGateway) -> None:
    remark = "kept in fp32: large_node"
    built = _BUILD | {"state": "succeeded", "remarks": [remark]}
    revision = {"number": 1, "state": "ready", "is_active": True, "builds": [built]}
    platform.on("GET /v1/functions/net/revisions/1", revision)
    assert f"built; {remark}" in _gpufn("deploy", "net.onnx").stderr
    platform.on("GET /v1/builds/b1", built)
    platform.on("GET /v1/builds", {"builds": [built]})
    assert f"built; {remark}" in _gpufn("builds").stdout
    report = {"candidates": [{**_REPORT["candidates"][0], "remarks": [remark]}]}
    platform.on("GET /v1/builds/b1/report", report)
    assert _gpufn("build", "net.onnx").stdout.splitlines()[-1].endswith(remark)
    engines = {"cpu": [_ENGINE | {"remarks": [remark]}]}
    platform.on("GET /v1/models/net", _MODEL | {"engines": engines})
    assert remark in _gpufn("models", "describe", "net").stdout


def test_engines_are_listed_with_their_users(gateway: StubGateway) -> None:
    gateway.on("GET /v1/engines", {"engines": [_ENGINE | {"used_by": ["net@1", "net@2"]}]})
    for arguments in (["engines"], ["engines", "ls"]):
        header, row = _gpufn(*arguments).stdout.splitlines()
        assert header.split() == ["ENGINE", "MODEL", "BACKEND", "DEVICE", "PRECISION", "SIZE", "P50", "USED", "BY"]
        assert row.split() == (
            ["eeeeeeeeeeee", "net.onnx", "onnxruntime-cpu", "cpu", "fp32", "2", "KiB", "2", "ms", "net@1,", "net@2"]
        )
    assert json.loads(_gpufn("engines", "--json").stdout)[0]["key"] == "e" * 64


@pytest.mark.parametrize(
    ("options", "dry_run", "text"), [(["--dry-run"], True, "would be removed"), ([], False, "were removed")]
)
def test_unused_engines_are_removed(gateway: StubGateway, options: list[str], dry_run: bool, text: str) -> None:
    gateway.on("POST /v1/engines/gc", {"engines": [_ENGINE, _ENGINE], "files": 3, "bytes": 4096, "dry_run": dry_run})
    result = _gpufn("engines", "gc", *options)
    assert (result.exit_code, result.stderr) == (0, f"2 engines {text}, 4 KiB\n")
    assert gateway.requests[-1].json == {"dry_run": dry_run}


def test_engines_in_use_are_left(gateway: StubGateway) -> None:
    gateway.on("POST /v1/engines/gc", {"engines": [], "files": 0, "bytes": 0, "dry_run": False})
    assert "in use" in _gpufn("engines", "gc").stderr


def test_models_are_listed_and_described(gateway: StubGateway) -> None:
    inside = _MODEL | {"name": "f.net", "function": "f", "parameter": "net", "batched": False, "why_alone": "no rows"}
    gateway.on("GET /v1/models", {"models": [_MODEL, inside]})
    gateway.on("GET /v1/models/net", _MODEL)
    gateway.on("GET /v1/models/f.net", inside)
    listed = [line.split() for line in _gpufn("models").stdout.splitlines()[1:]]
    assert listed == [["net", "3", "net.onnx", "fp32", "8", "cpu"], ["f.net", "3", "net.onnx", "fp32", "8", "cpu"]]
    described = dict(line.split(maxsplit=1) for line in _gpufn("models", "describe", "net").stdout.splitlines())
    assert described == {
        "name": "net",
        "address": f"{gateway.url}/v2/models/net/infer",
        "revision": "3",
        "file": "net.onnx",
        "inputs": "x FP32 [?, 3]",
        "outputs": "y INT64 [?]",
        "shapes": "x [1, 3] to [8, 3], tuned for [8, 3]",
        "precision": "fp32",
        "batching": "up to 8 rows of several calls",
        "cpu": "onnxruntime-cpu eeeeeeeeeeee, 2 ms per run, relative L2 error 2.0e-07",
    }
    inside_function = _gpufn("models", "describe", "f.net").stdout
    assert "function   f, as net" in inside_function
    assert "batching   none: no rows" in inside_function


def test_a_model_that_is_not_there_is_exit_code_4(gateway: StubGateway) -> None:
    gateway.on("GET /v1/models/no", {"code": "function_not_found", "detail": "No model 'no'."}, status=404)
    result = _gpufn("models", "describe", "no")
    assert (result.exit_code, result.stderr) == (4, "gpufn: no model 'no'\n")


def test_an_interrupt_reports_that_the_build_continues(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), build_progress(["b1", "b2"]):
        raise KeyboardInterrupt
    assert re.findall(r"`(.+?)`", capsys.readouterr().err) == ["gpufn builds cancel b1", "gpufn builds cancel b2"]


def test_at_a_terminal_builds_have_bars(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with build_progress(["b1"]) as show:
        show([BuildView(id="b1", device="cpu", state=BuildState.BUILDING, stage=BuildStage.VERIFY, progress=0.5)])
    drawn = capsys.readouterr().err
    assert "model on cpu" in drawn
    assert "verify" in drawn


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"state": BuildState.PENDING}, "waiting for a builder"),
        ({"state": BuildState.PENDING, "detail": "no builder runs for cpu"}, "waiting: no builder runs for cpu"),
        (
            {"state": BuildState.PENDING, "ahead": BuildAhead(id="a", model="m.onnx", building_s=720.0)},
            "waiting for a builder, which has been building m.onnx for 12 min",
        ),
        (
            {"state": BuildState.PENDING, "ahead": BuildAhead(id="a", model="m.onnx", function="f", building_s=3.0)},
            "waiting for a builder, which has been building m.onnx of f for 3 s",
        ),
        ({"state": BuildState.BUILDING}, "starting"),
        ({"state": BuildState.BUILDING, "stage": BuildStage.VERIFY}, "verify"),
        ({"state": BuildState.BUILDING, "stage": BuildStage.VERIFY, "detail": "2 of 3"}, "verify: 2 of 3"),
        ({"state": BuildState.SUCCEEDED}, "built"),
        ({"state": BuildState.SUCCEEDED, "cached": True}, "reused"),
        ({"state": BuildState.CANCELLED}, "cancelled"),
    ],
)
def test_the_progress_of_a_build_is_described_in_words(fields: dict[str, Any], text: str) -> None:
    assert describe_progress(BuildView(id="b", device="cpu", **fields)) == text


class _Module:
    example_inputs: Any = None


def _with_inputs(inputs: Any) -> _Module:
    module = _Module()
    module.example_inputs = inputs
    return module


@pytest.mark.parametrize(
    ("made", "inputs"),
    [
        ((_Module(), (1, 2)), (1, 2)),
        ((_Module(), [1, 2]), (1, 2)),
        ((_Module(), 1), (1,)),
        ((_Module(), {"x": 1}), {"x": 1}),
        (_with_inputs(1), (1,)),
    ],
)
def test_a_factory_returns_a_module_and_its_inputs(made: Any, inputs: Any) -> None:
    assert module_and_inputs(made, _Module)[1] == inputs


@pytest.mark.parametrize(("made", "message"), [(3, "not int"), (_Module(), "no example inputs")])
def test_a_wrong_return_value_of_a_factory_is_reported(made: Any, message: str) -> None:
    with pytest.raises(InvalidSpec, match=message):
        module_and_inputs(made, _Module)


def test_an_example_input_that_is_no_tensor_is_named() -> None:
    with pytest.raises(InvalidSpec, match=r"input k .* int"):
        check_tensors({"x": "", "k": 3}, str)


_TORCH = """
class Module:
    def eval(self): ...

nn = type("nn", (), {"Module": Module})
"""


@pytest.mark.parametrize(
    ("raises", "message"),
    [
        ("raise ValueError('no\\nmore')", "line 4, `raise ValueError('no\\nmore')`: ValueError: no"),
        ("raise RuntimeError('see above') from KeyError('linear')", "KeyError: 'linear'"),
    ],
)
def test_a_failed_export_is_one_line_with_its_first_cause(project: Project, raises: str, message: str) -> None:
    project({"torch.py": _TORCH, "app.py": f"import torch\n\ndef make_model():\n    {raises}\n"})
    result = _gpufn("build", "app.py:make_model")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"gpufn: cannot export app.py:make_model: {message}"), result.stderr


def test_a_torch_module_is_exported_with_dynamic_rows(platform: StubGateway, project: Project) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    project(
        {
            "app.py": "import torch\ndef make_model():\n    return torch.nn.Linear(4, 2), torch.ones(1, 4)\n",
        }
    )
    answer = platform.answer_to
    uploads: dict[str, bytes] = {}

    def take(request: Any) -> Any:
        if "/artifacts/" in request.path:
            uploads[request.path] = request.body
            return (404 if request.method == "HEAD" else 201), {}, b""
        return answer(request)

    platform.answer_to = take  # type: ignore[method-assign]
    assert _gpufn("build", "app.py:make_model", "--no-wait").stdout == "b1\n"
    (model,) = uploads.values()
    assert b"rows" in model
    assert _sent(platform, "POST /v1/builds").json["model"]["files"][0]["name"] == "make_model.onnx"
