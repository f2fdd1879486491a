from __future__ import annotations

import asyncio
import json
import sys
from unittest.mock import MagicMock

import pytest

from gpufn.testing import run_locally
from tests.conftest import ROOT, Platform
from tests.examples.conftest import deploy, imported

FOLDER = ROOT / "examples" / "gradio_demo"
EXPLORER = "/web/default/default/explorer"


def test_the_application_draws_what_the_other_function_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    gradio = MagicMock()  # a stand-in
    monkeypatch.setitem(sys.modules, "gradio", gradio)
    with imported(FOLDER, "app") as app, run_locally():
        app.explorer()
        page = gradio.Blocks.return_value.__enter__.return_value
        draw, *_ = page.load.call_args.args
        picture = asyncio.run(draw(-0.8, 0.156))
        inside, outside = (app.julia(real, 0.0, 9)[4, 4] for real in (0.0, 5.0))
    assert (picture.dtype, picture.shape) == ("uint8", (400, 400))
    assert (inside, outside) == (255, 32)  # of sixty steps, the point 0 leaves after one


@pytest.fixture(scope="module")
def deployed(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The example with the packages of these tests instead of environments of its own, which would be downloaded."""
    pytest.importorskip("gradio", reason="Gradio is too large for CI")
    source = (FOLDER / "app.py").read_text()
    for image in ("image=NUMPY, ", "image=GRADIO, "):
        assert image in source
        source = source.replace(image, "")
    folder = tmp_path_factory.mktemp("gradio")
    (folder / "app.py").write_text(source)
    deploy(platform, folder, "numpy")


@pytest.mark.e2e
@pytest.mark.usefixtures("deployed")
def test_the_page_has_links_to_its_own_address(platform: Platform) -> None:
    config = platform.client.get(f"{EXPLORER}/config").json()
    assert config["root"].endswith(EXPLORER)
    assert platform.client.get(f"{EXPLORER}/").status_code == 200


@pytest.mark.e2e
@pytest.mark.usefixtures("deployed")
def test_the_other_function_draws_the_picture(platform: Platform) -> None:
    api = f"{EXPLORER}/gradio_api/call/draw"
    event = platform.client.post(api, json={"data": [-0.8, 0.156]}).json()["event_id"]
    kind, data = platform.client.get(f"{api}/{event}").text.strip().splitlines()[-2:]
    assert kind == "event: complete"
    (picture,) = json.loads(data.removeprefix("data: "))
    assert platform.client.get(picture["url"]).content.startswith(b"\x89PNG")
