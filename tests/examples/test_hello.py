from __future__ import annotations

import pytest

from tests.conftest import Platform
from tests.examples.conftest import deploy

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True, scope="module")
def deployed(platform: Platform) -> None:
    deploy(platform, "hello")


def test_greets_by_name_and_by_default(platform: Platform) -> None:
    assert platform.invoke("hello", {"name": "you"}) == "Hello, you!"
    assert platform.invoke("hello") == "Hello, world!"


def test_the_async_function_waits_and_greets(platform: Platform) -> None:
    answer = platform.invoke("hello-later", {"name": "you", "seconds": 0.05})
    assert answer == {"greeting": "Hello, you!", "waited_s": 0.05}


def test_a_name_that_is_no_text_is_refused_by_field(platform: Platform) -> None:
    answer = platform.post("hello", {"name": 3})
    assert (answer.status_code, answer.json()["field"]) == (422, "name")
