"""A synthetic voice that says vowels: python speech.py "aei oua" speech.wav

No recording of anybody: pulses of a voice, through resonances at the formants of each vowel.
"""

from __future__ import annotations

import sys
import wave

import numpy as np
from numpy.typing import NDArray

RATE = 16_000  # samples per second
# Peterson and Barney (1952): mean formants of male speakers, in Hz.
VOWELS = {
    "a": (730, 1090, 2440),
    "e": (530, 1840, 2480),
    "i": (270, 2290, 3010),
    "o": (570, 840, 2410),
    "u": (300, 870, 2240),
}
_BANDWIDTHS = (80, 100, 150)  # Hz
_VOWEL = round(0.16 * RATE)  # samples
_PAUSE = round(0.8 * RATE)

Samples = NDArray[np.float32]


def say(vowels: str, pitch: float = 120.0) -> Samples:
    """Return the sound of `vowels`, from -1 to 1. A space is a pause."""
    rng = np.random.default_rng(7)
    falling = np.linspace(pitch, 0.75 * pitch, max(len(vowels), 1))  # the melody of a statement
    sounds = [
        np.zeros(_PAUSE) if vowel == " " else _vowel(VOWELS[vowel], hz, rng)
        for vowel, hz in zip(vowels, falling.tolist(), strict=True)
    ]
    return np.concatenate(sounds).astype(np.float32)


def pcm(samples: Samples) -> bytes:
    """Return 16-bit samples, little-endian."""
    return (samples * 32767).astype("<i2").tobytes()


def _vowel(formants: tuple[int, int, int], pitch: float, rng: np.random.Generator) -> NDArray[np.float64]:
    time = np.arange(_VOWEL) / RATE
    periods = np.cumsum(pitch * (1 + 0.03 * np.sin(2 * np.pi * 5 * time)) / RATE)  # with a vibrato of 5 Hz
    pulses = np.diff(np.floor(periods), prepend=0.0)
    sound = np.convolve(pulses, np.hanning(40), "same") + 0.01 * rng.standard_normal(_VOWEL)
    for hz, bandwidth in zip(formants, _BANDWIDTHS, strict=True):
        ringing = time[: RATE // 20]
        response = np.exp(-np.pi * bandwidth * ringing) * np.sin(2 * np.pi * hz * (ringing + 1 / RATE))
        sound = np.convolve(sound, response)[:_VOWEL]
    loudness = 0.4 * np.sin(np.pi * np.linspace(0, 1, _VOWEL)) ** 0.5
    scaled: NDArray[np.float64] = loudness * sound / np.abs(sound).max()
    return scaled


if __name__ == "__main__":
    with wave.open(sys.argv[2], "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(pcm(say(f" {sys.argv[1]} ")))
    print("wrote", sys.argv[2])
