"""Products with integers of 8 and fewer bits in ONNX Runtime: as exact as they are written, on every processor.

On x86 without VNNI its kernels add pairs of products of uint8 and int8 in 16 bits, which hold no more than 32767: of
255 · 127 + 255 · 127 half is lost, and of an int8 model all sense. Told so, its optimiser makes uint8 of such weights,
for which the kernels are exact; elsewhere it changes nothing. It does so from the level "extended" on, and to weights
that are constants.

From the same level on it makes one operator of weights that are integers, their scales, and the product with floats;
and that one rounds the floats to 8 bits as well, unless it is told to compute in float32.
"""

from __future__ import annotations

from typing import Final

EXACT: Final = {  # entries for a session's config
    "session.x64quantprecision": "1",
    "session.qdq_matmulnbits_accuracy_level": "1",
}
