"""Products of 8-bit integers in ONNX Runtime, exact on every processor.

On x86 without VNNI its kernels add pairs of products of uint8 and int8 in 16 bits, which hold no more than 32767: of
255 · 127 + 255 · 127 half is lost, and of an int8 model all sense. Told so, its optimiser makes uint8 of such weights,
for which the kernels are exact; elsewhere it changes nothing. It does so from the level "extended" on, and to weights
that are constants.
"""

from __future__ import annotations

from typing import Final

EXACT: Final = {"session.x64quantprecision": "1"}  # entries for a session's config
