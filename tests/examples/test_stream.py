from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.conftest import Platform
from tests.examples.conftest import deploy

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True, scope="module")
def deployed(platform: Platform) -> None:
    deploy(platform, "stream")


def test_rows_of_the_mandelbrot_set_are_symmetric(platform: Platform) -> None:
    rows = platform.invoke("mandelbrot", {"width": 40, "height": 10})
    assert [len(row) for row in rows] == [40] * 10
    assert rows == rows[::-1]
    assert "@" in rows[5]


def test_words_arrive_while_the_story_is_generated(platform: Platform) -> None:
    platform.invoke("story", {"words": 1})  # wait for a worker
    events = list(_events(platform, "story", {"words": 10, "pause_s": 0.05}))
    words = [json.loads(data) for _, event, data in events if event == "item"]
    assert (len(words), words[0]) == (10, "Alice")
    assert (events[-1][1], json.loads(events[-1][2])) == ("end", {"items": 10})
    assert events[9][0] - events[0][0] > 0.3, "all words came at once"


def test_the_same_seed_makes_the_same_story(platform: Platform) -> None:
    tell = {"words": 20, "seed": 7, "pause_s": 0.0}
    assert platform.invoke("story", tell) == platform.invoke("story", tell)


def _events(platform: Platform, function: str, body: object) -> Iterator[tuple[float, str, str]]:
    """Yield (seconds since the request, event, data) of a stream of server-sent events."""
    start = time.monotonic()
    with platform.client.stream(
        "POST", f"/v1/functions/{function}/invoke", json=body, headers={"Accept": "text/event-stream"}
    ) as answer:
        assert answer.status_code == 200, answer.read()
        event = "message"
        for line in answer.iter_lines():
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: "):
                yield time.monotonic() - start, event, line.removeprefix("data: ")
