from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from gpufn import Client
from tests.conftest import ROOT, Platform
from tests.examples.conftest import deploy, imported, run

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True, scope="module")
def deployed(platform: Platform) -> None:
    deploy(platform, "animation", "numpy", "PIL")


def _frames(film: bytes) -> list[Any]:
    import numpy as np
    from PIL import Image, ImageSequence

    return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(Image.open(io.BytesIO(film)))]


def test_the_film_has_all_its_frames_and_the_call_reports_its_progress(platform: Platform) -> None:
    with Client(platform.url) as client:
        call = client.submit("animate", b'{"count": 60, "size": 64}', accept="application/json")
        said = set()
        with platform.client.stream("GET", f"/v1/invocations/{call.id}/events", timeout=60) as events:
            for line in events.iter_lines():
                if line.startswith("data:") and "message" in line:
                    said.add(line)
        film = client.result_raw(call.id, timeout_s=60).body
    frames = _frames(film)
    assert [frame.shape for frame in frames] == [(64, 64, 3)] * 60
    assert len({frame.tobytes() for frame in frames}) == 60
    assert any("frames" in line for line in said)


def test_the_program_shows_the_progress_and_writes_the_film(platform: Platform, tmp_path: Path) -> None:
    shown = run(platform, "animation/watch.py", tmp_path / "film.gif", "3")
    assert "100%" in shown
    assert len(_frames((tmp_path / "film.gif").read_bytes())) == 3


def test_a_film_of_too_many_frames_is_refused(platform: Platform) -> None:
    answer = platform.post("animate", {"count": 501})
    assert (answer.json()["code"], answer.json()["error_type"]) == ("function_raised", "ValueError")


def test_a_gif_holds_the_original_pixels() -> None:
    import numpy as np

    random = np.random.default_rng(7)
    frames = [random.integers(0, 256, (31, 47), np.uint8) for _ in range(3)]
    palette = random.integers(0, 256, (256, 3), np.uint8)
    with imported(ROOT / "examples" / "animation", "gif") as module:
        shown = _frames(module.gif(frames, palette))
    assert [np.array_equal(one, palette[frame]) for one, frame in zip(shown, frames, strict=True)] == [True] * 3
