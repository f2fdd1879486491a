"""A gang takes several nodes at the same time, all or none."""

from __future__ import annotations

import msgspec
import pytest

from gpufn_core.domain.devices.device import DeviceShare, Share
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.placement.node_choice import NoRoom, Placement
from gpufn_gateway.controller.state.leases import Lease, LeaseBook
from tests.gateway.controller.known_worlds import place, why_no_room
from tests.gateway.controller.simulation import cpu, gpu, node

PAIR = Resources(gpu=("any",), nodes=2)


def joinable(name: str, *kinds: str) -> NodeReport:
    devices = (gpu(f"{name}{number}", kind) for number, kind in enumerate(kinds))
    return msgspec.structs.replace(node(name, cpu(), *devices), address=f"10.0.0.{ord(name)}")


def taken(node_: str, uuid: str) -> Lease:
    return Lease(f"w-{uuid}", node_, DeviceShare("cpu", 0.1, 128 << 20, (uuid,), Share.EXCLUSIVE))


@pytest.mark.parametrize(
    ("resources", "nodes", "leases", "chosen"),
    [
        (Resources(nodes=2), [joinable("a"), joinable("b"), joinable("c")], [], {"a", "b"}),
        (PAIR, [joinable("a", "L4"), joinable("b"), joinable("c", "L4")], [], {"a", "c"}),
        (PAIR, [joinable("a", "L4"), joinable("b", "A100"), joinable("c", "A100")], [], {"b", "c"}),
        (PAIR, [joinable("a", "L4", "L4"), joinable("b", "L4")], [taken("a", "a0")], {"a", "b"}),
        (Resources(gpu=("H100", "L4"), nodes=2), [joinable("a", "L4", "H100"), joinable("b", "L4")], [], {"a", "b"}),
        (PAIR, [joinable("a", "L4", "L4")], [], None),  # two GPUs, but on one node
        (PAIR, [joinable("a", "L4"), joinable("b", "A100")], [], None),  # of two models
        (PAIR, [joinable("a", "L4"), joinable("b", "L4")], [taken("b", "b0")], None),
        (Resources(nodes=3), [joinable("a"), joinable("b")], [], None),
        (Resources(nodes=2), [joinable("a"), node("b")], [], None),  # b reports no address
        (Resources(nodes=2), [joinable("a"), msgspec.structs.replace(joinable("b"), contains_all=True)], [], None),
    ],
)
def test_a_gang_is_placed_on_different_nodes_with_gpus_of_one_model_or_not_at_all(
    resources: Resources, nodes: list[NodeReport], leases: list[Lease], chosen: set[str] | None
) -> None:
    result = place(resources, nodes, LeaseBook(leases))
    if chosen is None:
        assert isinstance(result, NoRoom)
        return
    assert isinstance(result, Placement)
    assert {each.node for each in result.by_rank} == chosen
    assert len(result.by_rank) == resources.nodes
    kinds = {gpu.uuid: gpu.kind for report in nodes for gpu in report.devices}
    assert len({kinds[uuid] for each in result.by_rank for uuid in each.share.gpus}) <= 1
    assert not {uuid for each in result.by_rank for uuid in each.share.gpus} & {lease.share.gpus[0] for lease in leases}


@pytest.mark.parametrize(
    ("nodes", "facts"),
    [
        ([joinable("a", "L4")], ["2 nodes", "1 is up"]),
        ([joinable("a", "L4"), joinable("b")], ["2 nodes", "1 has room (a)", "b: it has no GPU"]),
        ([joinable("a", "L4"), joinable("b", "A100")], ["one model", "a, b"]),
        ([joinable("a", "L4"), node("b", cpu(), gpu("g"))], ["1 has room (a)", "b: ", "GPUFN_NODE_ADDRESS"]),
    ],
)
def test_the_reason_names_how_many_nodes_have_room_and_how_many_are_needed(
    nodes: list[NodeReport], facts: list[str]
) -> None:
    reason = why_no_room(PAIR, nodes, LeaseBook())
    assert [fact for fact in facts if fact not in reason] == []
