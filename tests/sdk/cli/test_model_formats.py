"""Models of torch, scikit-learn and MLflow. Stand-ins replace packages that are too large for CI; with the real ones
installed, the tests at the end run too."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpufn.cli import app
from gpufn.deploy.convert.options import ConvertOptions
from gpufn.testing import run_locally
from tests.examples.conftest import imported
from tests.sdk.conftest import Project, StubGateway

_FOREST = """
def load(path):
    return Forest()

class Forest:
    n_features_in_ = 4
    classes_ = [0, 1]

    def predict(self, rows): ...
    def predict_proba(self, rows): ...
"""
_SKL2ONNX = """
class FloatTensorType:
    def __init__(self, shape):
        self.shape = shape

common = type("common", (), {"data_types": type("data_types", (), {"FloatTensorType": FloatTensorType})})

class _Output:
    name = "probabilities"

    def __init__(self, kind):
        self.type = type("type", (), {"WhichOneof": staticmethod(lambda name: kind)})

def get_latest_tested_opset_version():
    return 22

class to_onnx:
    def __init__(self, model, initial_types, target_opset, options=None):
        (name, kind), = initial_types
        if getattr(model, "flatten_transform", False):
            raise NotImplementedError("flatten_transform==True is not implemented yet")
        kinds = getattr(model, "output_kinds", ["tensor_type"])
        self.graph = type("graph", (), {"output": [_Output(kind) for kind in kinds]})
        if options and not hasattr(model, "predict_proba"):
            raise NameError("Option 'zipmap' not in ['raw_scores']")
        self.text = f"{type(model).__name__} {name} {kind.shape} {options and options[id(model)]} {target_opset}"

    def SerializeToString(self):
        return self.text.encode()
"""
_SKOPS_IO = """
def get_untrusted_types(file):
    return ["trees.Tree"]

def load(file, trusted):
    import joblib
    return joblib.load(file)
"""
_STAND_INS = {
    "sklearn.py": "",
    "skl2onnx.py": _SKL2ONNX,
    "joblib.py": _FOREST,
    "skops/__init__.py": "",
    "skops/io.py": _SKOPS_IO,
}
_MODEL = {"forest.joblib": "a pickle", "forest.skops": "types", "net.pt2": "a program", "flow/MLmodel": "flavors:\n"}


def _gpufn(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def _uploads(gateway: StubGateway) -> list[bytes]:
    return [request.body for request in gateway.requests if request.method == "PUT" and "/artifacts/" in request.path]


@pytest.fixture
def platform(gateway: StubGateway, monkeypatch: pytest.MonkeyPatch) -> StubGateway:
    """It has no file and no function, and accepts all."""
    gateway.any_bundle = True
    answer = gateway.answer_to
    answers = {"HEAD": 404, "PUT": 201}

    def accept(request: Any) -> Any:
        return (answers[request.method], {}, b"") if "/artifacts/" in request.path else answer(request)

    monkeypatch.setattr(gateway, "answer_to", accept)
    gateway.on("GET /v1/nodes", {"nodes": []})
    gateway.on("POST /v1/functions", {"function": "flow", "revision": 1, "state": "building", "builds": []}, 202)
    gateway.on("POST /v1/builds", {"id": "b1", "device": "cpu", "state": "pending"}, status=202)
    return gateway


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["build", "forest.joblib"], 2, "runs on this machine"),
        (["deploy", "net.pt2"], 2, "runs on this machine"),
        (["deploy", "flow"], 2, "runs in the workers"),
        (["deploy", "flow", "--trust-model", "--precision", "fp16"], 2, "--precision is for models that become ONNX"),
        (["build", "flow", "--trust-model"], 2, "flow does not become an ONNX model"),
        (["build", "forest.skops"], 1, "types that skops does not trust: trees.Tree"),
    ],
)
def test_a_file_that_can_run_code_needs_trust(
    platform: StubGateway, project: Project, arguments: list[str], code: int, message: str
) -> None:
    project(_STAND_INS | _MODEL | {"joblib.py": "raise AssertionError('it was read')"})
    result = _gpufn(*arguments)
    assert result.exit_code == code
    assert message in result.stderr.replace("\n", " ")
    assert platform.requests == []


@pytest.mark.parametrize(
    ("file", "has_probabilities"), [("forest.joblib", True), ("forest.skops", True), ("forest.joblib", False)]
)
def test_a_model_of_scikit_learn_is_sent_as_onnx_with_a_matrix_as_its_input(
    platform: StubGateway, project: Project, file: str, has_probabilities: bool
) -> None:
    """Bug: skl2onnx has no option `zipmap` for LinearSVC, which has no probabilities, and the command failed."""
    project(_STAND_INS | _MODEL | ({} if has_probabilities else {"joblib.py": _FOREST.replace("_proba", "_scores")}))
    result = _gpufn("build", file, "--trust-model", "--no-wait")
    assert (result.exit_code, result.stdout) == (0, "b1\n"), result.stderr
    options = {"zipmap": False} if has_probabilities else None
    opsets = {"": 22, "ai.onnx.ml": 3}
    assert _uploads(platform) == [f"Forest x [None, 4] {options} {opsets}".encode()]
    (request,) = [request for request in platform.requests if request.path == "/v1/builds"]
    assert request.json["model"]["files"][0]["name"] == "forest.onnx"


def test_a_vote_is_converted_without_the_option_that_skl2onnx_refuses(platform: StubGateway, project: Project) -> None:
    vote = _FOREST.replace("n_features_in_ = 4", "n_features_in_ = 4\n    flatten_transform = True")
    project(_STAND_INS | _MODEL | {"joblib.py": vote})
    result = _gpufn("build", "forest.joblib", "--trust-model", "--no-wait")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"skl2onnx.py": "raise ImportError"}, "skl2onnx is not installed here: pip install scikit-learn skl2onnx"),
        ({"joblib.py": "load = lambda path: 3"}, "has a int, which is no model of scikit-learn"),
        (
            {"joblib.py": _FOREST.replace("n_features_in_ = 4", "")},
            "has a Forest that is not fitted, or takes no matrix",
        ),
        ({"joblib.py": "def load(path): raise EOFError('it is\\ncut')"}, "EOFError: it is"),
        (
            {
                "joblib.py": _FOREST.replace(
                    "n_features_in_ =", "output_kinds = ['sequence_type']\n    n_features_in_ ="
                )
            },
            "has a Forest, whose output probabilities is a sequence",
        ),
        (
            {"skl2onnx.py": _SKL2ONNX + "    __init__ = lambda *_, **__: 1 / 0\n"},
            "load such a model in a class with @enter (ZeroDivisionError: division by zero)",
        ),
    ],
)
def test_a_file_that_cannot_be_converted_is_one_line(
    platform: StubGateway, project: Project, replaced: dict[str, str], message: str
) -> None:
    project(_STAND_INS | _MODEL | replaced)
    result = _gpufn("build", "forest.joblib", "--trust-model")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert message in result.stderr
    assert platform.requests == []


def test_a_folder_of_mlflow_is_sent_as_weights_of_a_class(platform: StubGateway, project: Project) -> None:
    project(_MODEL | {"flow/model.pkl": "a pickle"})
    result = _gpufn("deploy", "flow", "--trust-model", "--max", "2", "--memory", "1Gi", "--no-wait")
    assert result.exit_code == 0, result.stderr
    (request,) = [request for request in platform.requests if request.path == "/v1/functions"]
    spec, source = request.json["spec"], request.json["source"]
    assert (spec["name"], spec["methods"][0]["name"], spec["scaling"]["max_workers"]) == ("flow", "predict", 2)
    assert list(spec["methods"][0]["parameters"]["properties"]) == [
        "dataframe_split", "dataframe_records", "instances", "inputs", "params",
    ]  # fmt: skip
    assert [file["path"] for file in spec["weights"][0]["files"]] == ["MLmodel", "model.pkl"]
    assert (source["project"], source["file"]) == ("flow", "MLmodel")
    assert sorted(_uploads(platform)) == [b"a pickle", b"flavors:\n"]


# With the packages themselves


def _outputs(onnx: Path, rows: Any) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(onnx.read_bytes()).run(None, {"x": rows})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["script", "exported_program"])
def test_a_file_of_torch_computes_the_same_as_onnx(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("onnxscript")
    torch = pytest.importorskip("torch")
    from gpufn.deploy.convert import torch_files

    base: Any = torch.nn.Module

    class Net(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, x):  # type: ignore[no-untyped-def]
            return torch.softmax(self.layer(x), -1)

    net, example = Net().eval(), torch.ones(2, 4)
    file, onnx = tmp_path / "net.pt2", tmp_path / "net.onnx"
    if kind == "script":
        torch.jit.trace(net, example).save(file)
    else:
        rows = torch.export.Dim("rows", min=1, max=64)
        torch.export.save(torch.export.export(net, (example,), dynamic_shapes=({0: rows},)), file)
    getattr(torch_files, kind)(str(file), onnx, ConvertOptions({"x": (1, 4)}))
    for count in (1, 5):
        x = torch.arange(count * 4.0).reshape(count, 4)
        assert _outputs(onnx, x.numpy())[0] == pytest.approx(net(x).detach().numpy(), abs=1e-6)


@pytest.mark.skipif(importlib.util.find_spec("skl2onnx") is None, reason="skl2onnx is not installed")
@pytest.mark.parametrize("suffix", ["skops", "joblib"])
def test_a_model_of_scikit_learn_computes_the_same_as_onnx(tmp_path: Path, suffix: str) -> None:
    import joblib
    import numpy as np
    import skops.io
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from gpufn.deploy.convert.sklearn_files import convert

    rows = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(rows, rows[:, 0] > 0)
    file, onnx = tmp_path / f"model.{suffix}", tmp_path / "model.onnx"
    (skops.io.dump if suffix == "skops" else joblib.dump)(model, file)
    convert(str(file), onnx, ConvertOptions())
    labels, probabilities = _outputs(onnx, rows)
    assert labels.tolist() == model.predict(rows).tolist()
    assert probabilities == pytest.approx(model.predict_proba(rows), abs=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("skl2onnx") is None, reason="skl2onnx is not installed")
@pytest.mark.parametrize("kind", ["svm.LinearSVC", "ensemble.IsolationForest"])
def test_a_model_that_skl2onnx_refuses_with_its_default_options(tmp_path: Path, kind: str) -> None:
    """Bug: the command failed with a NameError of `zipmap`, or a RuntimeError of `ai.onnx.ml`."""
    import joblib
    import numpy as np

    from gpufn.deploy.convert.sklearn_files import convert

    module, _, name = kind.partition(".")
    rows = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    model = getattr(importlib.import_module(f"sklearn.{module}"), name)(random_state=0).fit(rows, rows[:, 0] > 0)
    file, onnx = tmp_path / "model.joblib", tmp_path / "model.onnx"
    joblib.dump(model, file)
    convert(str(file), onnx, ConvertOptions())
    assert _outputs(onnx, rows)[0].ravel().tolist() == model.predict(rows).tolist()


@pytest.mark.skipif(importlib.util.find_spec("skl2onnx") is None, reason="skl2onnx is not installed")
def test_a_vote_in_a_pipeline_computes_the_same_as_onnx(tmp_path: Path) -> None:
    import joblib
    import numpy as np
    from sklearn.ensemble import VotingClassifier
    from sklearn.linear_model import LogisticRegression, RidgeClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from gpufn.deploy.convert.sklearn_files import convert

    rows = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    vote = VotingClassifier([("a", LogisticRegression()), ("b", LogisticRegression(C=0.1)), ("c", RidgeClassifier())])
    model = make_pipeline(StandardScaler(), vote).fit(rows, rows[:, 0] > 0)
    joblib.dump(model, tmp_path / "model.joblib")
    convert(str(tmp_path / "model.joblib"), tmp_path / "model.onnx", ConvertOptions())
    assert _outputs(tmp_path / "model.onnx", rows)[0].tolist() == model.predict(rows).tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flavor", ["sklearn", "onnx"])
def test_a_folder_of_mlflow_predicts_as_its_model_does(
    tmp_path: Path, flavor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("skl2onnx") is None:
        pytest.skip("skl2onnx is not installed")
    mlflow = pytest.importorskip("mlflow")
    import numpy as np
    import skl2onnx
    from sklearn.linear_model import LogisticRegression

    from gpufn.deploy.convert.mlflow_folder import app_of

    rows = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    model = LogisticRegression().fit(rows, (rows[:, 0] > 0).astype(np.int64))
    folder, signature = tmp_path / "flow", mlflow.models.infer_signature(rows, model.predict(rows))
    if flavor == "sklearn":
        mlflow.sklearn.save_model(model, folder, signature=signature)
    else:
        onnx = skl2onnx.to_onnx(model, rows[:1], options={"zipmap": False})
        mlflow.onnx.save_model(onnx, folder, signature=signature)
    monkeypatch.delitem(sys.modules, "mlflow_app", raising=False)  # of an earlier deploy in this process
    with app_of(folder, {"name": "flow"}) as app:
        shutil.copytree(app.parent, tmp_path / "node")  # MLflow follows no symbolic link, and a node has none
    with imported(tmp_path / "node", app.stem) as module, run_locally():
        predictions = module.Model.predict.remote(inputs=rows.tolist())["predictions"]
    labels = predictions if flavor == "sklearn" else predictions["label"]
    assert labels == model.predict(rows).tolist()
