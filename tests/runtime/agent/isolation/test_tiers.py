from __future__ import annotations

import pytest

from gpufn_platform.sandbox.policy import Isolation
from gpufn_platform.sandbox.support import Support
from gpufn_runtime.agent.isolation.tiers import trouble

COMPLETE, PART = Support(), Support(namespaces="refused", network="refused")


@pytest.mark.parametrize(
    ("setting", "support", "refused"),
    [
        (Isolation.AUTO, COMPLETE, set()),
        (Isolation.AUTO, PART, {"sandbox", "none", "egress"}),
        (Isolation.AUTO, Support(signals="too old"), {"sandbox"}),
        (Isolation.STRICT, COMPLETE, {"process"}),
        (Isolation.OFF, COMPLETE, {"sandbox", "none", "egress"}),
    ],
)
def test_a_node_reports_missing_tiers(setting: Isolation, support: Support, refused: set[str]) -> None:
    assert trouble(setting, support).keys() == refused
