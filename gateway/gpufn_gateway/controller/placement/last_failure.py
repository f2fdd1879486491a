"""The last failure to place a worker of a revision, for `gpufn why` after the calls have expired. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpufn_core.protocol.reports import NodeReport
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.node_choice import NoRoom, place
from gpufn_gateway.controller.placement.request import Requirements
from gpufn_gateway.controller.state.leases import LeaseBook


class PlacementFailure(msgspec.Struct, frozen=True):
    """The last step in which a revision had calls and no worker, and no node had room for one. `why` is the reason in
    that step, `offers` are the node reports of that time."""

    at: float
    requirements: Requirements
    why: str
    offers: Sequence[NodeReport]

    def after(self, offers: Sequence[NodeReport], limits: Limits) -> PlacementFailure | None:
        """Return the failure with the present reports; None if a node that appeared or changed since then could run the
        worker when empty. Nodes that were there already do not count: they were full, or cannot run it."""
        if offers == self.offers:  # almost always the same objects, which compare in a few microseconds
            return self
        known = {id(offer) for offer in self.offers}
        new = [offer for offer in offers if id(offer) not in known]
        if new and self.requirements.resources.nodes > 1:
            new = list(offers)  # a gang needs the others, too
        result = place(self.requirements, new, LeaseBook(), limits, best=False)
        return msgspec.structs.replace(self, offers=offers) if isinstance(result, NoRoom) else None

    def describe(self, now: float) -> str:
        minutes = int((now - self.at) // 60)
        ago = f"{minutes} min ago" if minutes else "less than a minute ago"
        return f"no worker could be placed for its last call {ago}: {self.why}"
