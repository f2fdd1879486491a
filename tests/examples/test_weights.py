from __future__ import annotations

import pytest

from tests.conftest import Platform
from tests.examples.conftest import deploy, made

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True, scope="module")
def deployed(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> None:
    deploy(platform, made(tmp_path_factory.mktemp("weights"), "weights", "make_weights.py"))


def test_babbles_words_of_the_text(platform: Platform) -> None:
    text = platform.invoke("babbler.babble", {"words": 8, "seed": 1})
    assert len(text.split()) == 8
    assert platform.invoke("babbler.babble", {"words": 8, "seed": 1}) == text
