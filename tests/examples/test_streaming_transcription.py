from __future__ import annotations

import json
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.sync.client import connect

from tests.conftest import ROOT, Platform
from tests.examples.conftest import deploy, imported

pytestmark = pytest.mark.e2e

_FOLDER = ROOT / "examples" / "streaming_transcription"
_PIECE_BYTES = 3000  # not a multiple of the model's window


@pytest.fixture(autouse=True, scope="module")
def deployed(platform: Platform) -> None:
    deploy(platform, "streaming_transcription", "silero_vad", "onnxruntime", "numpy", "fastapi")


def test_each_segment_of_speech_is_returned_as_text(platform: Platform) -> None:
    with imported(_FOLDER, "speech") as speech:
        sound = speech.pcm(speech.say(" aeiou aoa iueo"))
    events: list[dict[str, Any]] = []
    with connect(f"ws{platform.url.removeprefix('http')}/web/default/default/live/listen", proxy=None) as socket:
        for start in range(0, len(sound), _PIECE_BYTES):
            socket.send(sound[start : start + _PIECE_BYTES])
        socket.send(b"")
        events += [json.loads(message) for message in socket]
    assert [event["type"] for event in events] == ["speech", "text"] * 3
    segments = events[1::2]
    assert [segment["text"] for segment in segments] == ["aeiou", "aoa", "iueo"]
    assert [segment["start"] for segment in segments] == [pytest.approx(start, abs=0.2) for start in (0.8, 2.4, 3.68)]
    assert [segment["end"] for segment in segments] == [pytest.approx(end, abs=0.2) for end in (1.6, 2.88, 4.32)]


def test_the_client_prints_the_text_of_a_file(
    platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with imported(_FOLDER, "speech") as speech:
        _write(tmp_path / "speech.wav", speech.pcm(speech.say(" aoa ")))
    monkeypatch.setenv("GPUFN_URL", platform.url)
    with imported(_FOLDER, "client") as client:
        monkeypatch.setattr(client, "time", SimpleNamespace(sleep=lambda seconds: None))
        client.main(str(tmp_path / "speech.wav"))
    assert capsys.readouterr().out.split()[-1] == "aoa"


def test_the_client_refuses_a_file_of_another_format(
    platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: its error ended only the thread that sends, without a message, and the program waited forever."""
    _write(tmp_path / "stereo.wav", b"\0" * 400, channels=2)
    monkeypatch.setenv("GPUFN_URL", platform.url)
    with imported(_FOLDER, "client") as client, pytest.raises(SystemExit, match="is not 16-bit mono"):
        client.main(str(tmp_path / "stereo.wav"))


def test_silence_and_noise_are_no_speech() -> None:
    import numpy as np

    noise = np.random.default_rng(7).normal(0, 0.1, 32_000).astype(np.float32)
    with imported(_FOLDER, "vad") as vad:
        for sound in (np.zeros(32_000, np.float32), noise):
            segmenter = vad.Segmenter()
            assert (segmenter.feed(sound), segmenter.finish()) == ([], None)


def test_long_speech_is_cut() -> None:
    with imported(_FOLDER, "speech") as speech, imported(_FOLDER, "vad") as vad:
        segments = vad.Segmenter(longest_s=1.0).feed(speech.say("aeiou" * 4 + " "))
    assert len(segments) >= 3
    assert all(segment.end - segment.start <= 1.1 for segment in segments)


def _write(path: Path, pcm: bytes, channels: int = 1) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, 2, 16_000, 0, "NONE", ""))
        file.writeframes(pcm)
