from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.conftest import ROOT, Platform
from tests.examples.conftest import deploy, imported, run

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.e2e

FOLDER = ROOT / "examples" / "chat"
TEXT = ROOT / "docs" / "concepts.md"


@pytest.fixture(scope="module")
def client(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """OpenAI's client, of the example with a trained model."""
    import openai

    folder = tmp_path_factory.mktemp("chat")
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("model.json"))
    with imported(folder, "train") as train:
        train.main(str(TEXT))
    deploy(platform, folder)
    with openai.OpenAI(base_url=f"{platform.url}/openai/v1", api_key="any") as client:
        yield client


def test_openais_client_streams_the_words_of_an_answer(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model="parrot.chat",
        messages=[{"role": "user", "content": "What is a worker?"}],
        max_tokens=12,
        seed=7,
        stream=True,
    )
    words = [content for chunk in chunks if chunk.choices and (content := chunk.choices[0].delta.content)]
    assert words[0] == "Worker"
    assert 6 <= len(words) <= 12
    whole = client.chat.completions.create(
        model="parrot.chat", messages=[{"role": "user", "content": "What is a worker?"}], max_tokens=12, seed=7
    )
    assert whole.choices[0].message.content == "".join(words)


@pytest.mark.usefixtures("client")
def test_the_program_prints_an_answer(platform: Platform) -> None:
    assert run(platform, "chat/ask.py", "What is a worker?").startswith("Worker")


def test_an_option_that_the_model_does_not_accept_is_named(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="parrot.chat", messages=[{"role": "user", "content": "x"}], top_p=0.5)
    assert refused.value.param == "top_p"


def test_the_most_frequent_word_follows_at_temperature_0() -> None:
    with imported(FOLDER, "language") as language:
        model = language.trained("The cat sleeps. The cat eats. The cat eats fish! A dog barks.")
    assert list(model.write("cat", 3, temperature=0, seed=None)) == ["Cat", " eats", "."]
    assert model.topic("Does the cat eat? It sleeps") == "sleeps"
    assert model.topic("unknown words") == "."
    assert "".join(model.write(".", 8, temperature=0, seed=None)).startswith("The cat eats")
