from __future__ import annotations

import json

import pytest

from tests.conftest import ROOT, Platform
from tests.examples.conftest import deploy

pytest.importorskip("gradio", reason="Gradio is too large for CI")
pytestmark = pytest.mark.e2e

EXPLORER = "/web/default/default/explorer"


@pytest.fixture(autouse=True, scope="module")
def deployed(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The example with the packages of these tests instead of environments of its own, which would be downloaded."""
    source = (ROOT / "examples" / "gradio_demo" / "app.py").read_text()
    for image in ("image=NUMPY, ", "image=GRADIO, "):
        assert image in source
        source = source.replace(image, "")
    folder = tmp_path_factory.mktemp("gradio")
    (folder / "app.py").write_text(source)
    deploy(platform, folder, "numpy")


def test_the_page_has_links_to_its_own_address(platform: Platform) -> None:
    config = platform.client.get(f"{EXPLORER}/config").json()
    assert config["root"].endswith(EXPLORER)
    assert platform.client.get(f"{EXPLORER}/").status_code == 200


def test_the_other_function_draws_the_picture(platform: Platform) -> None:
    api = f"{EXPLORER}/gradio_api/call/draw"
    event = platform.client.post(api, json={"data": [-0.8, 0.156]}).json()["event_id"]
    kind, data = platform.client.get(f"{api}/{event}").text.strip().splitlines()[-2:]
    assert kind == "event: complete"
    (picture,) = json.loads(data.removeprefix("data: "))
    assert platform.client.get(picture["url"]).content.startswith(b"\x89PNG")
