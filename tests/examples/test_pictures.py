from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tests.conftest import Platform
from tests.examples.conftest import deploy

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True, scope="module")
def deployed(platform: Platform) -> None:
    deploy(platform, "pictures", "PIL", "numpy")


@pytest.fixture(scope="module")
def landscape(platform: Platform) -> bytes:
    answer = platform.post("landscape", {"width": 240, "height": 160})
    assert answer.status_code == 200, answer.text
    return answer.content


def test_a_thumbnail_keeps_the_proportions(platform: Platform, landscape: bytes) -> None:
    assert _size(landscape) == ("PNG", 240, 160)
    assert _size(_from_picture(platform, "thumbnail", landscape)) == ("PNG", 128, 85)


def test_edges_find_the_sun_and_the_hills(platform: Platform, landscape: bytes) -> None:
    from PIL import Image

    gray = Image.open(io.BytesIO(_from_picture(platform, "edges", landscape)))
    assert (gray.mode, gray.size) == ("L", (240, 160))
    sky, hills = gray.crop((0, 0, 100, 40)), gray.crop((0, 75, 240, 125))
    assert _brightest(sky) < 20
    assert _brightest(hills) > 60


def test_the_palette_covers_the_picture(platform: Platform, landscape: bytes) -> None:
    colors = json.loads(_from_picture(platform, "palette", landscape))
    assert len(colors) == 5
    assert sum(color["share"] for color in colors) == pytest.approx(1, abs=0.001)


def test_a_body_that_is_no_picture_is_the_callers_error(platform: Platform) -> None:
    answer = platform.post("thumbnail", b"not a picture", headers={"Content-Type": "image/png"})
    assert (answer.json()["code"], answer.json()["error_type"]) == ("function_raised", "UnidentifiedImageError")


def _from_picture(platform: Platform, function: str, picture: bytes) -> bytes:
    answer = platform.post(function, picture, headers={"Content-Type": "image/png"})
    assert answer.status_code == 200, answer.text
    return answer.content


def _size(picture: bytes) -> tuple[str | None, int, int]:
    from PIL import Image

    image = Image.open(io.BytesIO(picture))
    return image.format, image.width, image.height


def _brightest(gray: Any) -> int:
    _, highest = gray.getextrema()
    return int(highest)
