"""A toy in the place of a speech recogniser: it knows the five vowels of the voice in speech.py, and nothing else.

It learns their spectra from that voice in a few milliseconds. Put a real model here.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from speech import RATE, VOWELS, Samples, say

_FRAME, _STEP = 512, 160  # samples: 32 ms, every 10 ms
_BANDS = 24
_QUIET = 0.15  # of the loudest frame
_SHORTEST = 5  # frames; a shorter one is the passage from one vowel to the next
_PITCHES = (90.0, 105.0, 120.0, 140.0)  # Hz, to learn from


class Recogniser:
    def __init__(self) -> None:
        self._names = list(VOWELS)
        self._means = np.stack(
            [np.concatenate([_spectra(say(name, hz))[0] for hz in _PITCHES]).mean(0) for name in self._names]
        )

    def text(self, samples: Samples) -> str:
        """Return the vowels of a segment, such as "aei"."""
        spectra, loudness = _spectra(samples)
        distances = ((spectra[:, None] - self._means) ** 2).sum(-1)
        loud = loudness > _QUIET * loudness.max(initial=0.0)
        frames = [int(nearest) if is_loud else -1 for nearest, is_loud in zip(distances.argmin(1), loud, strict=True)]
        runs = [(vowel, len(list(run))) for vowel, run in groupby(frames)]
        return "".join(self._names[vowel] for vowel, length in runs if vowel >= 0 and length >= _SHORTEST)


def _spectra(samples: Samples) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the shape of each frame's spectrum, smoothed to bands of equal width in mel, and its loudness."""
    padded = np.pad(samples, (0, max(0, _FRAME - len(samples))))
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FRAME)[::_STEP]
    power = np.abs(np.fft.rfft(frames * np.hanning(_FRAME))) ** 2
    hz = np.fft.rfftfreq(_FRAME, 1 / RATE)
    mel = np.log1p(hz / 700)
    centers = np.linspace(mel[3], np.log1p(4000 / 700), _BANDS)
    bands = np.maximum(0, 1 - np.abs(mel[:, None] - centers) / (centers[1] - centers[0]) / 1.5)
    energy = np.log(power @ bands + 1e-6)
    return energy - energy.mean(1, keepdims=True), np.sqrt(power.sum(1))
