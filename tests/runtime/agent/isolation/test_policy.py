from __future__ import annotations

import pytest

from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.sandbox.support import Support
from gpufn_runtime.agent.isolation import policy
from gpufn_runtime.agent.isolation.policy import Isolation

COMPLETE, PART = Support(), Support(namespaces="refused", network="refused")


def test_strict_refuses_a_machine_without_all_parts() -> None:
    policy.check(Isolation.STRICT, COMPLETE)
    policy.check(Isolation.AUTO, PART)
    with pytest.raises(InvalidSetting, match="refused"):
        policy.check(Isolation.STRICT, PART)


@pytest.mark.parametrize(
    ("setting", "support", "refused"),
    [
        (Isolation.AUTO, COMPLETE, set()),
        (Isolation.AUTO, PART, {"sandbox", "none"}),
        (Isolation.AUTO, Support(signals="too old"), {"sandbox"}),
        (Isolation.STRICT, COMPLETE, {"process"}),
        (Isolation.OFF, COMPLETE, {"sandbox", "none"}),
    ],
)
def test_a_node_reports_what_it_does_not_offer(setting: Isolation, support: Support, refused: set[str]) -> None:
    assert policy.trouble(setting, support).keys() == refused


@pytest.mark.parametrize("text", ["on", "AUTO"])
def test_other_values_are_refused(text: str) -> None:
    with pytest.raises(InvalidSetting):
        policy.isolation(text)


@pytest.mark.parametrize("text", ["data", "/data,scratch:rw"])
def test_folders_are_absolute(text: str) -> None:
    with pytest.raises(InvalidSetting):
        policy.folders(text)
