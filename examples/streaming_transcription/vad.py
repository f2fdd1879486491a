"""Voice activity: which parts of a stream of sound are speech. The probabilities come from silero-vad's ONNX model.

The package silero_vad itself needs torch, so only its model file is used, without an import of the package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

RATE = 16_000  # samples per second
WINDOW = 512  # samples, as the model was trained
_CONTEXT = 64  # samples of the window before, which the model sees again

Samples = NDArray[np.float32]


@dataclass
class Segment:
    """Speech between two silences. `start` is in seconds since the stream began."""

    start: float
    samples: Samples

    @property
    def end(self) -> float:
        return self.start + len(self.samples) / RATE


@dataclass
class Segmenter:
    """Cut a stream into segments. One object per stream: it holds the state of the model and the sound of a segment."""

    threshold: float = 0.5
    silence_s: float = 0.4  # a shorter pause does not end a segment
    lead_s: float = 0.15  # sound before the first window of speech, where the model was not sure yet
    longest_s: float = 15.0
    _state: Samples = field(default_factory=lambda: np.zeros((2, 1, 128), np.float32))
    _context: Samples = field(default_factory=lambda: np.zeros(_CONTEXT, np.float32))
    _rest: Samples = field(default_factory=lambda: np.zeros(0, np.float32))  # less than a window
    _kept: list[Samples] = field(default_factory=list)  # windows of the segment, or of the lead
    _windows: int = 0
    _silent: int = 0  # windows since the last speech
    speaking: bool = False

    def feed(self, samples: Samples) -> list[Segment]:
        """Add sound, in pieces of any length. Returns the segments that it completes."""
        sound = np.concatenate([self._rest, samples])
        whole = len(sound) // WINDOW * WINDOW
        self._rest = sound[whole:]
        ended = [self._add(window, self._probability(window)) for window in sound[:whole].reshape(-1, WINDOW)]
        return [segment for segment in ended if segment]

    def finish(self) -> Segment | None:
        """Return the segment that the end of the stream cuts off."""
        return self._segment() if self.speaking else None

    def _add(self, window: Samples, probability: float) -> Segment | None:
        self._windows += 1
        self._kept.append(window)
        if probability >= self.threshold:
            self.speaking, self._silent = True, 0
            return self._segment() if len(self._kept) >= _windows(self.longest_s) else None
        self._silent += 1
        if self.speaking:
            return self._segment() if self._silent >= _windows(self.silence_s) else None
        self._kept = self._kept[-_windows(self.lead_s) :]
        return None

    def _segment(self) -> Segment:
        start = (self._windows - len(self._kept)) * WINDOW / RATE
        tail = max(0, self._silent - _windows(self.lead_s))  # the rest of the pause is no part of the segment
        segment = Segment(start, np.concatenate(self._kept[: len(self._kept) - tail]))
        self._kept, self.speaking, self._silent = [], False, 0
        return segment

    def _probability(self, window: Samples) -> float:
        inputs = np.concatenate([self._context, window])[None]
        output, self._state = _model().run(None, {"input": inputs, "state": self._state, "sr": np.array(RATE)})
        self._context = window[-_CONTEXT:]
        return float(output[0, 0])


def _windows(seconds: float) -> int:
    return max(1, round(seconds * RATE / WINDOW))


@cache
def _model() -> Any:
    """Return the model of this process. Its sessions are stateless, so all streams share it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # a window takes less than a millisecond: more threads only wait for each other
    return onnxruntime.InferenceSession(_MODEL_FILE, options, providers=["CPUExecutionProvider"])


def _model_file() -> Path:
    package = find_spec("silero_vad")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("silero-vad is not installed: pip install --no-deps -r requirements.txt")
    return Path(package.origin).parent / "data" / "silero_vad.onnx"


_MODEL_FILE = _model_file()  # when imported, so that a deploy fails without the package
