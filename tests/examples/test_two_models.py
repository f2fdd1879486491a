from __future__ import annotations

import pytest

from tests.conftest import Platform
from tests.examples.conftest import deploy, made

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True, scope="module")
def deployed(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = made(tmp_path_factory.mktemp("two"), "two_models", "make_models.py", "onnx", "onnxruntime")
    deploy(platform, folder)


def test_a_name_is_found_in_spite_of_typing_errors(platform: Platform) -> None:
    names = ["Amsterdm", "Kopenhagen", "san fransisco", "Bukarest"]
    found = platform.invoke("find", {"names": names})
    assert [row[0]["city"] for row in found] == ["Amsterdam", "Copenhagen", "San-Francisco", "Bucharest"]
    assert [len(row) for row in found] == [3] * 4
    assert all(row[0]["score"] >= row[1]["score"] >= row[2]["score"] for row in found)


def test_callers_do_not_pass_the_models(platform: Platform) -> None:
    answer = platform.post("find", {"names": ["Rome"], "encoder": 1})
    assert (answer.status_code, answer.json()["field"]) == (422, "encoder")
