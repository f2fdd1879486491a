from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Platform
from tests.examples.conftest import deploy, imported, made

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True, scope="module")
def folder(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its model written and both ways of serving it deployed."""
    needs = ("onnx", "onnxruntime", "PIL", "numpy", "tritonclient")
    folder = made(tmp_path_factory.mktemp("classifier"), "image_classifier", "make_model.py", *needs)
    deploy(platform, folder)
    platform.gpufn("deploy", folder / "classifier.onnx", "--max-batch", "32")
    return folder


@pytest.fixture(scope="module")
def pictures(folder: Path) -> Iterator[Any]:
    with imported(folder, "pictures") as module:
        yield module


def test_a_picture_is_classified_by_its_shape(platform: Platform, pictures: Any) -> None:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(7)

    def likeliest(kind: str) -> str:
        with io.BytesIO() as file:
            Image.fromarray(pictures.picture(kind, rng)).save(file, "PNG")
            png = file.getvalue()
        answer = platform.post("classify", png, headers={"Content-Type": "image/png"})
        assert answer.status_code == 200, answer.text
        return str(answer.json()[0]["shape"])

    wanted = list(pictures.SHAPES) * 2
    with ThreadPoolExecutor(1) as pool:  # one worker: the random generator is shared
        found = list(pool.map(likeliest, wanted))
    assert sum(one == other for one, other in zip(found, wanted, strict=True)) >= len(wanted) - 1


def test_the_bare_model_answers_a_client_of_another_project(platform: Platform, folder: Path, pictures: Any) -> None:
    import numpy as np

    images, labels = pictures.labelled(40, np.random.default_rng(3))  # more than a run takes
    with imported(folder, "client") as client:
        probabilities = client.probabilities_of(platform.url.removeprefix("http://"), images)
    assert probabilities.shape == (40, 8)
    assert np.abs(probabilities.sum(1) - 1).max() < 1e-4
    assert (probabilities.argmax(1) == labels).mean() >= 0.95
    assert "pictures" not in sys.modules or sys.modules["pictures"] is pictures
