"""The GPUs that a worker gets, as tables: full GPUs, link distances, and the reason when there is no GPU."""

from __future__ import annotations

import msgspec
import pytest

from gpufn_core.domain.devices.device import (
    Device,
    DeviceLink,
    DeviceShare,
    DeviceType,
    Health,
    LinkKind,
    MpsLevel,
    NodeFacts,
    Share,
    has_kind,
)
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.node_choice import NoRoom, Placement
from gpufn_gateway.controller.state.leases import Lease, LeaseBook
from tests.gateway.controller.known_worlds import place, why_no_room
from tests.gateway.controller.simulation import GIB, cpu, gpu

MPS = NodeFacts(mps=MpsLevel.V2)
NVLINK, SWITCH, HOST = LinkKind.NVLINK, LinkKind.SWITCH, LinkKind.HOST


def mps_node(*gpus: Device, facts: NodeFacts = MPS, links: tuple[DeviceLink, ...] = ()) -> NodeReport:
    return NodeReport("a", 0.0, (cpu(64, 512 * GIB), *gpus), links=links, facts=facts)


_LIMITS = Limits()


def part(vram: float, sm: int | None = None, domain: str = "") -> Resources:
    return Resources(gpu=("any",), share=Share.MPS, vram_bytes=int(vram * GIB), sm_percent=sm, trust_domain=domain)


def held(
    worker: str, uuid: str, mode: Share = Share.MPS, *, vram: float = 0.0, sm: int = 100, domain: str = ""
) -> Lease:
    return Lease(worker, "a", DeviceShare("cpu", 0.1, 1, (uuid,), mode, int(vram * GIB), sm, domain))


def placed(resources: Resources, node: NodeReport, *leases: Lease, limits: Limits = _LIMITS) -> object:
    found = place(resources, [node], LeaseBook(leases), limits)
    return (
        found.share.gpus if isinstance(found, Placement) else why_no_room(resources, [node], LeaseBook(leases), limits)
    )


def test_a_part_of_a_gpu_is_granted_with_its_limits() -> None:
    found = place(part(6, 25, "team-a"), [mps_node(gpu("g"))], LeaseBook())
    assert isinstance(found, Placement)
    share = found.share
    assert (share.gpus, share.mode, share.vram_bytes, share.sm_percent, share.trust_domain) == (
        ("g",), Share.MPS, 6 * GIB, 25, "team-a",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wants", "leases", "outcome"),
    [
        (part(6), [held("w", "g1", vram=18)], ("g1",)),
        (part(6), [held("w", "g1", vram=19)], ("g2",)),
        (part(6), [held("w", "g1", vram=4), held("v", "g2", vram=10)], ("g2",)),
        (part(2, 50), [held("w", "g1", vram=4, sm=60)], ("g2",)),
        (part(2, 50), [held("w", "g1", vram=4, sm=60), held("v", "g2", Share.EXCLUSIVE)], ("g1",)),
        (part(2), [held("w", "g1", vram=4, sm=60)], ("g1",)),
        (part(2, 100), [held("w", "g1", Share.TIME), held("v", "g2", Share.TIME)], "are shared by time"),
        (part(2), [held("w", "g1", vram=1, domain="x"), held("v", "g2", vram=1)], ("g2",)),
        (part(30), [], "have too little memory: 30 GiB are needed, 24 GiB are free"),
    ],
)
def test_the_fullest_gpu_that_has_room_is_shared(wants: Resources, leases: list[Lease], outcome: object) -> None:
    found = placed(wants, mps_node(gpu("g1"), gpu("g2")), *leases)
    assert found == outcome if isinstance(outcome, tuple) else str(outcome) in str(found)


@pytest.mark.parametrize(
    ("workers", "goes_to"),
    [
        ((0, 0, 0), "g1"),
        ((0, 1, 0), "g2"),  # shared already, with a free turn
        ((2, 0, 0), "g2"),  # on the shared one it would wait for a turn
        ((2, 1, 0), "g2"),
        ((3, 2, 4), "g2"),  # no GPU has a free turn
    ],
)
def test_a_worker_that_shares_by_time_gets_a_free_turn_or_the_shortest_wait(
    workers: tuple[int, ...], goes_to: str
) -> None:
    node = mps_node(*(gpu(f"g{n}") for n in (1, 2, 3)))
    leases = [held(f"w{n}-{m}", f"g{n}", Share.TIME) for n, count in enumerate(workers, 1) for m in range(count)]
    assert placed(Resources(gpu=("any",), share=Share.TIME), node, *leases) == (goes_to,)


def test_nodes_are_compared_by_the_turns_that_are_free() -> None:
    crowded = [Lease(f"w{n}", "a", DeviceShare("cpu", 0.1, 1, ("g1",), Share.TIME)) for n in range(2)]
    other = NodeReport("b", 0.0, (cpu(), gpu("h1")))
    found = place(Resources(gpu=("any",), share=Share.TIME), [mps_node(gpu("g1")), other], LeaseBook(crowded))
    assert isinstance(found, Placement)
    assert found.node == "b"


def test_a_function_of_another_trust_domain_shares_nothing_unless_the_operator_allows_it() -> None:
    node, tenant = mps_node(gpu("g")), held("w", "g", vram=1, domain="team-a")
    assert "another trust domain" in str(placed(part(2, domain="team-b"), node, tenant))
    assert placed(part(2, domain="team-b"), node, tenant, limits=Limits(share_across_domains=True)) == ("g",)
    timed = Resources(gpu=("any",), share=Share.TIME)
    assert "another trust domain" in str(placed(timed, node, held("w", "g", Share.TIME, domain="team-a")))


SICK = Device("g3", DeviceType.GPU, "NVIDIA L4", 24 * GIB, health=Health.DEGRADED, health_reason="rows to remap")
FULL = [held("u", "g1", Share.EXCLUSIVE), held("v", "g2", Share.EXCLUSIVE), held("w", "g4", vram=20)]  # with SICK


@pytest.mark.parametrize(
    ("wants", "leases", "text"),
    [
        (part(2), [held("w", "g", Share.EXCLUSIVE)], "a: its GPU is in use"),
        (Resources(gpu=("L4",)), [held("w", "g", vram=1)], "a: its L4 GPU is in use"),
        (
            part(20),
            [held("w", "g", vram=8)],
            "a: its GPU has too little memory: 20 GiB are needed, 16 GiB are free",
        ),
        (part(25), [], "a: its GPU has too little memory: 25 GiB are needed, 24 GiB are free"),
        (part(1), [held(f"w{n}", "g", vram=0.1) for n in range(48)], "a: its GPU has the maximum number of workers"),
        (Resources(gpu=("H100",), gpu_count=2), [], "a: it has no H100 GPU"),
        (Resources(gpu=("L4",), gpu_count=2), [], "a: needs 2 L4 GPUs, it has 1"),
        (
            part(6),
            FULL,
            "a: of its 4 GPUs 1 is degraded (rows to remap), 2 are in use, "
            "1 has too little memory: 6 GiB are needed, 4 GiB are free",
        ),
        (
            Resources(gpu=("L4",), gpu_count=2),
            FULL,
            "a: needs 2 L4 GPUs of one model, 0 of its 4 are available: 1 is degraded (rows to remap), 3 are in use",
        ),
    ],
)
def test_no_capacity_names_the_shortage_of_each_device(wants: Resources, leases: list[Lease], text: str) -> None:
    node = mps_node(gpu("g1"), gpu("g2"), SICK, gpu("g4")) if leases is FULL else mps_node(gpu("g"))
    assert placed(wants, node, *leases) == text


def test_memory_that_processes_of_others_hold_is_not_placed() -> None:
    used = msgspec.structs.replace(gpu("g"), foreign_bytes=10 * GIB)
    a_little = msgspec.structs.replace(gpu("g"), foreign_bytes=GIB)
    whole_gpu = Resources(gpu=("L4",))
    assert placed(part(14), mps_node(used)) == ("g",)
    assert "processes of others hold 10 GiB" in str(placed(part(15), mps_node(used)))
    assert "processes of others" in str(placed(whole_gpu, mps_node(used)))
    assert placed(whole_gpu, mps_node(a_little)) == ("g",)


def test_a_share_by_mps_is_placed_on_a_gpu_with_mps() -> None:
    assert "nvidia-cuda-mps-control" in str(placed(part(2), mps_node(gpu("g"), facts=NodeFacts())))


@pytest.mark.parametrize(
    ("wants", "charged"),
    [
        (part(6, 25), 0.25),
        (part(6), 0.25),
        (part(6, 100), 1.0),
        (Resources(gpu=("any",), gpu_count=2), 1.0),
        (Resources(gpu=("any",), share=Share.TIME), 1.0),
        (Resources(), 1.0),
    ],
)
def test_a_part_is_charged_by_its_ceiling_or_else_by_its_memory(wants: Resources, charged: float) -> None:
    found = place(wants, [mps_node(gpu("g1"), gpu("g2"))], LeaseBook())
    assert isinstance(found, Placement)
    assert found.share.gpu_part == charged


def test_workers_in_containers_and_others_share_no_gpu_by_mps() -> None:
    node = mps_node(gpu("g1"), gpu("g2"))
    first = place(part(2), [node], LeaseBook([held("w", "g1", vram=1)]), in_container=True)
    assert isinstance(first, Placement)
    assert (first.share.gpus, first.share.contained) == (("g2",), True)
    contained = Lease("v", "a", first.share)
    third = why_no_room(part(2), [node], LeaseBook([contained, held("w", "g1", Share.EXCLUSIVE)]))
    assert all(fact in third for fact in ("1 is in use", "workers in containers"))
    all_contained = NodeReport("a", 0.0, node.devices, facts=MPS, contains_all=True)
    assert placed(part(2), all_contained, contained) == ("g2",)
    timed = Resources(gpu=("any",), share=Share.TIME)
    assert placed(timed, all_contained, held("w", "g1", Share.TIME)) == ("g1",)


INSTANCE = Device("MIG-1", DeviceType.GPU, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5 * GIB, parent="GPU-0")


@pytest.mark.parametrize(
    ("wanted", "fits"), [("any", True), ("MIG", True), ("1g.5gb", True), ("A100-SXM4-40GB MIG", True), ("A100", False)]
)
def test_an_instance_is_not_taken_for_the_gpu_that_it_is_a_part_of(wanted: str, fits: bool) -> None:
    assert has_kind(INSTANCE, wanted) is fits


def test_an_instance_is_leased_whole_and_exclusively() -> None:
    node = mps_node(INSTANCE, gpu("g"))
    assert placed(Resources(gpu=("any",)), node) == ("MIG-1",)
    assert placed(part(2), node) == ("g",)
    assert all(fact in str(placed(part(2), mps_node(INSTANCE))) for fact in ("MIG instance", "no MPS shares"))
    assert placed(Resources(gpu=("any",), gpu_count=2), node) == "a: needs 2 GPUs, it has 1"


def _linked(*pairs: tuple[str, str, LinkKind]) -> tuple[DeviceLink, ...]:
    return tuple(DeviceLink(*pair) for pair in pairs)


FOUR = tuple(gpu(name, "NVIDIA H100") for name in ("g0", "g1", "g2", "g3"))
# 0 and 2, 1 and 3 are joined by NVLink; all others communicate through the host.
CROSSED = _linked(
    ("g0", "g2", NVLINK), ("g1", "g3", NVLINK), ("g0", "g1", HOST), ("g2", "g3", HOST), ("g0", "g3", HOST),
    ("g1", "g2", HOST),
)  # fmt: skip


@pytest.mark.parametrize(
    ("count", "in_use", "chosen"),
    [
        (2, [], ("g0", "g2")),
        (2, ["g0"], ("g1", "g3")),
        (2, ["g0", "g3"], ("g1", "g2")),
        (4, [], ("g0", "g1", "g2", "g3")),
        (1, ["g0"], ("g2",)),  # its partner is in use, so the other pair stays whole
        (1, ["g1"], ("g3",)),
    ],
)
def test_several_gpus_are_close_to_each_other_and_pairs_stay_whole(
    count: int, in_use: list[str], chosen: tuple[str, ...]
) -> None:
    leases = [held(f"w{uuid}", uuid, Share.EXCLUSIVE) for uuid in in_use]
    assert placed(Resources(gpu=("H100",), gpu_count=count), mps_node(*FOUR, links=CROSSED), *leases) == chosen


def test_several_gpus_are_of_one_model() -> None:
    node = mps_node(gpu("g0", "NVIDIA L4"), gpu("g1", "NVIDIA A10"), gpu("g2", "NVIDIA A10"))
    assert placed(Resources(gpu=("any",), gpu_count=2), node) == ("g1", "g2")
    refusal = str(placed(Resources(gpu=("any",), gpu_count=3), node))
    assert all(fact in refusal for fact in ("one model", "3 of its 3"))


def test_nodes_are_compared_by_how_close_their_gpus_are() -> None:
    near = mps_node(*FOUR[:2], links=_linked(("g0", "g1", SWITCH)))
    far = NodeReport("b", 0.0, (cpu(), gpu("h0", "NVIDIA H100"), gpu("h1", "NVIDIA H100")))
    found = place(Resources(gpu=("H100",), gpu_count=2), [far, near], LeaseBook())
    assert isinstance(found, Placement)
    assert found.node == "a"
    assert all(fact in found.why for fact in ("2 x NVIDIA", "H100", "511.9 GiB"))


def test_a_gpu_changes_its_mode_when_it_is_empty() -> None:
    book = LeaseBook([held("w", "g", Share.EXCLUSIVE)])
    node = [mps_node(gpu("g"))]
    assert isinstance(place(part(2), node, book), NoRoom)
    book.release("w")
    assert isinstance(place(part(2), node, book), Placement)
