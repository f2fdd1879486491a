from __future__ import annotations

import array
import json

import pytest
from websockets.sync.client import connect

from tests.conftest import Platform
from tests.examples.conftest import deploy

pytestmark = pytest.mark.e2e

METER = "/web/default/default/meter"
LOUD = array.array("h", [16384, -16384] * 100).tobytes()


@pytest.fixture(autouse=True, scope="module")
def deployed(platform: Platform) -> None:
    deploy(platform, "web")


def test_a_page_and_its_websocket(platform: Platform) -> None:
    page = platform.client.get(f"{METER}/")
    assert page.headers["content-type"].startswith("text/html")
    assert "levels" in page.text
    with connect(f"ws{platform.url.removeprefix('http')}{METER}/levels", proxy=None) as socket:
        for samples, level in ((LOUD, -6.0), (bytes(400), -90.0)):
            socket.send(samples)
            assert json.loads(socket.recv(timeout=20)) == {"db": level}


def test_a_body_is_answered_in_parts(platform: Platform) -> None:
    levels = platform.client.post(f"{METER}/levels", content=iter([LOUD]))
    assert levels.text == "-6.0\n"


def test_an_endpoint(platform: Platform) -> None:
    path = "/web/default/default/decibels/"
    assert platform.client.get(path, params={"ratio": 10}).json() == {"db": 20.0}
    assert platform.client.post(path, json={"ratio": 10, "power": True}).json() == {"db": 10.0}
    assert platform.client.get(path, params={"ratio": "loud"}).status_code == 422
