from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Platform
from tests.examples.conftest import deploy, run

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True, scope="module")
def deployed(platform: Platform) -> None:
    deploy(platform, "image_generation", "numpy", "PIL", "fastapi")


def test_previews_become_the_picture_of_the_prompt(platform: Platform) -> None:
    with platform.client.stream(
        "GET", "/web/default/default/studio/paint", params={"prompt": "a blue circle", "seed": 3}
    ) as events:
        previews = [json.loads(line.removeprefix("data: ")) for line in events.iter_lines() if line]
    assert [preview["step"] for preview in previews] == list(range(2, 41, 2))
    first, *_, last = (_pixels(base64.b64decode(preview["png"])) for preview in previews)
    assert _sharpest_edge(last) > 2 * _sharpest_edge(first)
    red, _, blue = (last[..., channel].astype(int) for channel in range(3))
    assert 0.03 < ((blue - red) > 100).mean() < 0.5


def test_openais_client_gets_the_same_picture(platform: Platform) -> None:
    import openai

    with openai.OpenAI(base_url=f"{platform.url}/openai/v1", api_key="any") as client:
        (image,) = client.images.generate(model="toy-painter", prompt="a red ring").data or []
    (preview,) = platform.invoke("painter.paint", {"prompt": "a red ring", "previews": 1})
    assert image.b64_json == preview["png"]


def test_the_program_saves_the_previews(platform: Platform, tmp_path: Path) -> None:
    run(platform, "image_generation/save.py", "a blue ring", tmp_path)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"{step:03}.png" for step in range(5, 41, 5)]
    assert _pixels(files[-1].read_bytes()).shape == (384, 384, 3)


def _pixels(png: bytes) -> Any:
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)))


def _sharpest_edge(pixels: Any) -> int:
    return int(abs(pixels[:, 1:].astype(int) - pixels[:, :-1]).max())
