from __future__ import annotations

import pytest

from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.sandbox import policy
from gpufn_platform.sandbox.policy import Isolation
from gpufn_platform.sandbox.support import Support

COMPLETE, PART = Support(), Support(namespaces="refused", network="refused")


def test_strict_refuses_a_machine_without_all_parts() -> None:
    policy.check(Isolation.STRICT, COMPLETE)
    policy.check(Isolation.AUTO, PART)
    with pytest.raises(InvalidSetting, match="refused"):
        policy.check(Isolation.STRICT, PART)


@pytest.mark.parametrize("text", ["on", "AUTO"])
def test_other_values_are_refused(text: str) -> None:
    with pytest.raises(InvalidSetting):
        policy.isolation(text)
