from __future__ import annotations

import pytest

from tests.conftest import Platform
from tests.examples.conftest import deploy

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True, scope="module")
def deployed(platform: Platform) -> None:
    deploy(platform, "counter")


def test_counts_from_call_to_call(platform: Platform) -> None:
    counts = [platform.invoke("counter.add", {"name": "apples", "by": by}) for by in (1, 4, 2)]
    assert counts == [1, 5, 7]
    assert platform.invoke("counter.all") == {"apples": 7}
