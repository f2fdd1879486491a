from __future__ import annotations

import io

import pytest

from gpufn import Client
from tests.conftest import Platform
from tests.examples.conftest import deploy
from tests.waiting import until

pytestmark = pytest.mark.e2e

SMALL = {"width": 96, "height": 54}


@pytest.fixture(autouse=True, scope="module")
def deployed(platform: Platform) -> None:
    deploy(platform, "render_farm", "numpy", "PIL")


def test_a_picture_survives_the_death_of_a_worker(platform: Platform) -> None:
    from PIL import Image

    pictures = [platform.post("still", {**SMALL, "crash": crash}) for crash in (False, True)]
    assert [picture.status_code for picture in pictures] == [200, 200], pictures[1].text
    assert pictures[0].content == pictures[1].content
    picture = Image.open(io.BytesIO(pictures[0].content))
    assert (picture.format, picture.size) == ("PNG", (96, 54))
    red, _, blue = picture.convert("RGB").resize((1, 1), box=(0, 0, 96, 10)).tobytes()
    assert blue > red  # the sky
    assert "worker_lost" in platform.gpufn("logs", "tile")


def test_a_film_turns_and_reports_its_progress(platform: Platform) -> None:
    from PIL import Image, ImageSequence

    with Client(platform.url) as client:
        client.scale("gif", None, 0)  # so the film waits for its last step
        until(lambda: platform.ready_workers("gif") == 0)
        call = client.submit("film", b'{"frames": 3, "width": 96, "height": 54}', accept="application/json")
        until(lambda: (progress := client.invocation(call.id).progress) and progress.message == "21 of 22 steps")
        client.scale("gif", None, None)
        film = client.result_raw(call.id, timeout_s=60).body
    frames = [frame.convert("RGB").tobytes() for frame in ImageSequence.Iterator(Image.open(io.BytesIO(film)))]
    assert len(set(frames)) == 3
