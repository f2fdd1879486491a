"""What bare ONNX Runtime passes and we refuse, by the reason. The list is exact: one that passes fails the test."""

from __future__ import annotations

import itertools

_FLOAT8 = ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ")
_FLOATS = ("FLOAT", "FLOAT16")
_EACH = ("", "_expanded")

# The Open Inference Protocol has no name for floats of eight bits.
FLOATS_OF_EIGHT_BITS = frozenset(
    f"test_castlike_{way}{more}"
    for small, usual, more in itertools.product(_FLOAT8, _FLOATS, _EACH)
    for way in (f"{small}_to_{usual}", f"{usual}_to_{small}", f"no_saturate_{usual}_to_{small}")
)

# It knows tensors only: no sequences of them, and none that may be absent.
NO_TENSORS = frozenset(
    {
        "test_identity_opt",
        "test_identity_sequence",
        "test_if_opt",
        "test_if_seq",
        "test_loop13_seq",
        "test_sequence_insert_at_back",
        "test_sequence_insert_at_front",
        "test_sequence_map_add_1_sequence_1_tensor",
        "test_sequence_map_add_1_sequence_1_tensor_expanded",
        "test_sequence_map_add_2_sequences",
        "test_sequence_map_add_2_sequences_expanded",
        "test_sequence_map_extract_shapes",
        "test_sequence_map_extract_shapes_expanded",
        "test_sequence_map_identity_1_sequence",
        "test_sequence_map_identity_1_sequence_1_tensor",
        "test_sequence_map_identity_1_sequence_1_tensor_expanded",
        "test_sequence_map_identity_1_sequence_expanded",
        "test_sequence_map_identity_2_sequences",
        "test_sequence_map_identity_2_sequences_expanded",
        "test_split_to_sequence_1",
        "test_split_to_sequence_2",
        "test_split_to_sequence_nokeepdims",
    }
)
