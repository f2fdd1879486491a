from __future__ import annotations

import pytest

from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.units import parse_bytes


@pytest.mark.parametrize("size", ["1e9", "٣Gi", "-1", ""])
def test_an_invalid_memory_size_is_refused(size: str) -> None:
    with pytest.raises(InvalidSpec, match="memory size") as caught:
        parse_bytes(size)
    assert caught.value.message.startswith(repr(size))
