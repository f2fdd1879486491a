"""The tiers that this node offers."""

from __future__ import annotations

from gpufn_core.spec.isolation import Isolation as Tier
from gpufn_core.spec.isolation import Network
from gpufn_platform.sandbox.policy import Isolation, listed
from gpufn_platform.sandbox.support import Support


def trouble(setting: Isolation, support: Support, egress: str = "") -> dict[str, str]:
    """Return why the node does not offer a tier, or a network (`NodeReport.isolation_trouble`). `egress` is why it
    cannot forward packets of workers."""
    if setting is Isolation.OFF:
        return dict.fromkeys((Tier.SANDBOX, Network.NONE, Network.EGRESS), "GPUFN_ISOLATION=off")
    found: dict[str, str] = {}
    if setting is Isolation.STRICT:
        found[Tier.PROCESS] = "GPUFN_ISOLATION=strict"
    if missing := support.missing():
        found[Tier.SANDBOX] = listed(missing)
    if support.network:
        found[Network.NONE] = support.network
    if support.namespaces or egress:
        found[Network.EGRESS] = support.namespaces or egress
    return found
