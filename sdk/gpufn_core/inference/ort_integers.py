"""Settings of ONNX Runtime that make products of integers of 8 bits or fewer exact on every processor.

On x86 without VNNI its kernels add pairs of uint8 * int8 products in 16 bits, which hold at most 32767. The sum
255 * 127 + 255 * 127 loses half, which makes an int8 model useless. With the first setting the optimizer converts such
weights to uint8, for which the kernels are exact; on other processors it changes nothing. This applies from the level
"extended" on, and to constant weights.

From the same level on the optimizer fuses integer weights, their scales and the product with floats into one operator.
That operator also rounds the floats to 8 bits, unless the second setting makes it compute in float32.
"""

from __future__ import annotations

from typing import Final

EXACT: Final = {  # session config entries
    "session.x64quantprecision": "1",
    "session.qdq_matmulnbits_accuracy_level": "1",
}
