from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_core.domain.devices.device import DeviceShare, Health, Share, has_kind
from gpufn_core.domain.package_needs import PackageNeeds
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.node_choice import NoRoom, Placement
from gpufn_gateway.controller.state.leases import GpuUse, Lease, LeaseBook, NodeUse
from tests.gateway.controller.known_worlds import place, why_no_room
from tests.gateway.controller.simulation import GIB, cpu, gpu, node


def lease(
    worker: str,
    on: str,
    memory_bytes: int = GIB,
    cores: float = 0.1,
    *,
    gpu: str | None = None,
    mode: Share = Share.TIME,
) -> Lease:
    return Lease(worker, on, DeviceShare("cpu", cores, memory_bytes, (gpu,) if gpu else (), mode))


@pytest.mark.parametrize(
    ("wanted", "kind", "fits"),
    [("L4", "NVIDIA L4", True), ("l4", "NVIDIA L4", True), ("any", "AMD X", True), ("A100", "NVIDIA L4", False),
     ("NVIDIA H200", "NVIDIA H200 NVL", True)],
)  # fmt: skip
def test_a_gpu_is_named_by_any_part_of_its_name(wanted: str, kind: str, fits: bool) -> None:
    assert has_kind(gpu("g", kind), wanted) is fits


def test_the_share_holds_the_requested_memory_or_128_mib() -> None:
    found = place(Resources(), [node()], LeaseBook())
    assert isinstance(found, Placement)
    assert found.share == DeviceShare("cpu", 0.1, 128 << 20)


def test_the_first_kind_that_has_room_is_taken() -> None:
    nodes = [node("a", cpu(), gpu("g1", "NVIDIA L4")), node("b", cpu(), gpu("g2", "NVIDIA A100"))]
    wants = Resources(gpu=("A100", "L4"))
    taken = [lease("w", "b", gpu="g2", mode=Share.EXCLUSIVE)]
    chosen = [place(wants, nodes, LeaseBook(leases)) for leases in ([], taken)]
    assert [found.share.gpus for found in chosen if isinstance(found, Placement)] == [("g2",), ("g1",)]


def test_an_exclusive_gpu_has_one_worker_and_a_time_shared_one_several() -> None:
    nodes = [node("a", cpu(), gpu("g"))]
    shared = LeaseBook([lease("w", "a", gpu="g")])
    alone = LeaseBook([lease("w", "a", gpu="g", mode=Share.EXCLUSIVE)])
    exclusive, timed = Resources(gpu=("L4",)), Resources(gpu=("L4",), share=Share.TIME)
    fits = [
        isinstance(place(wants, nodes, book), Placement) for wants in (exclusive, timed) for book in (shared, alone)
    ]
    assert fits == [False, False, True, False]


def test_time_shared_workers_go_together_while_a_turn_is_free() -> None:
    nodes = [node("a", cpu(), gpu("g1"), gpu("g2"))]
    found = place(Resources(gpu=("any",), share=Share.TIME), nodes, LeaseBook([lease("w", "a", gpu="g2")]))
    assert isinstance(found, Placement)
    assert found.share.gpus == ("g2",)


def test_the_tightest_fit_leaves_the_largest_hole() -> None:
    nodes = [node("big", cpu(8, 64 * GIB)), node("small", cpu(8, 8 * GIB))]
    found = place(Resources(memory_bytes=4 * GIB), nodes, LeaseBook())
    assert isinstance(found, Placement)
    assert found.node == "small"


def test_a_function_without_a_gpu_leaves_the_nodes_with_gpus_to_others() -> None:
    nodes = [node("a", cpu(2, 4 * GIB), gpu("g")), node("b", cpu(2, 64 * GIB))]
    found = place(Resources(), nodes, LeaseBook())
    assert isinstance(found, Placement)
    assert found.node == "b"


def test_cores_are_promised_eight_times_over_but_on_a_free_node_first() -> None:
    nodes = [node("a", cpu(1, 8 * GIB)), node("b", cpu(1, 64 * GIB))]
    book = LeaseBook()
    chosen = []
    for number in range(17):
        found = place(Resources(cpu=1.0), nodes, book)
        if isinstance(found, Placement):
            book.grant(f"w{number}", found.node, found.share)
            chosen.append(found.node)
    assert chosen == ["a", "b"] + ["a"] * 7 + ["b"] * 7


@pytest.mark.parametrize(
    ("resources", "text"),
    [
        (Resources(cpu=4.0), "a: needs 4 cores, it has 2"),
        (Resources(cpu=2.0), "a: needs 2 cores, 1.5 are free"),
        (Resources(memory_bytes=9 * GIB), "a: needs 9 GiB of memory, 7 GiB are free"),
        (Resources(gpu=("H200",)), "a: it has no H200 GPU"),
        (Resources(gpu=("L4",)), "a: its L4 GPU is in use"),
    ],
)
def test_no_room_names_the_shortage(resources: Resources, text: str) -> None:
    book = LeaseBook([lease("w", "a", GIB, 0.5, gpu="g", mode=Share.EXCLUSIVE)])
    found = why_no_room(resources, [node("a", cpu(), gpu("g"))], book, Limits(cpu_oversubscription=1.0))
    assert found == text


@pytest.mark.parametrize(
    ("wanted", "engine_kinds", "placed"),
    [
        (("any",), {"NVIDIA L4"}, ("g1",)),
        (("A100", "L4"), {"NVIDIA L4"}, ("g1",)),
        (("A100", "L4"), {"NVIDIA L4", "NVIDIA A100"}, ("g2",)),
        (
            ("any",),
            {"NVIDIA H200"},
            "a: there is no engine for NVIDIA A100 or NVIDIA L4: deploy again to have one built",
        ),
        (("L4",), set(), "a: there is no engine for NVIDIA L4: deploy again to have one built"),
        ((), {"cpu"}, ()),
        ((), {"NVIDIA L4"}, "a: there is no engine for the CPU"),
    ],
)
def test_a_worker_with_models_is_placed_where_they_have_engines(
    wanted: tuple[str, ...], engine_kinds: set[str], placed: str | tuple[str, ...]
) -> None:
    nodes = [node("a", cpu(), gpu("g1", "NVIDIA L4"), gpu("g2", "NVIDIA A100"))]
    wants, kinds = Resources(gpu=wanted), frozenset(engine_kinds)
    found = place(wants, nodes, LeaseBook(), engine_kinds=kinds)
    if isinstance(found, Placement):
        assert found.share.gpus == placed
    else:
        assert why_no_room(wants, nodes, LeaseBook(), engine_kinds=kinds) == placed


def test_a_worker_in_a_container_is_placed_where_containers_can_start() -> None:
    nodes = [
        NodeReport("a", 0.0, (cpu(),), container_trouble="Docker at unix:///x does not answer"),
        NodeReport("b", 0.0, (cpu(8, 64 * GIB),)),
    ]
    tight = place(Resources(), nodes, LeaseBook())
    told = why_no_room(Resources(), nodes[:1], LeaseBook(), in_container=True)
    found = place(Resources(), nodes, LeaseBook(), in_container=True)
    assert [each.node for each in (tight, found) if isinstance(each, Placement)] == ["a", "b"]
    assert all(fact in told for fact in ("a: ", "containers", "unix:///x"))


def test_a_gpu_worker_in_a_container_is_placed_where_containers_have_gpus() -> None:
    nodes = [
        NodeReport("a", 0.0, (cpu(), gpu("g1")), gpu_container_trouble="neither hook nor CDI"),
        NodeReport("b", 0.0, (cpu(8, 64 * GIB), gpu("g2"))),
    ]
    wants = Resources(gpu=("L4",))
    placed = [
        place(resources, nodes, LeaseBook(), in_container=in_container)
        for resources, in_container in ((wants, True), (wants, False), (Resources(), True))
    ]
    assert [each.share.gpus for each in placed if isinstance(each, Placement)] == [("g2",), ("g1",), ()]
    why = why_no_room(wants, nodes[:1], LeaseBook(), in_container=True)
    assert all(fact in why for fact in ("a: ", "containers", "neither hook nor CDI"))
    contains_all = msgspec.structs.replace(nodes[0], contains_all=True)
    assert place(wants, [contains_all], LeaseBook()) == NoRoom(at_any_size=True)


def test_a_worker_is_not_placed_on_a_node_that_starts_none() -> None:
    ill = msgspec.structs.replace(cpu(), health=Health.DEGRADED, health_reason="too many open files")
    nodes = [node("a", ill, gpu("g1")), node("b", cpu(8, 64 * GIB), gpu("g2"))]
    for wanted in (Resources(), Resources(gpu=("any",))):
        found, told = place(wanted, nodes, LeaseBook()), why_no_room(wanted, nodes[:1], LeaseBook())
        assert isinstance(found, Placement)
        assert found.node == "b"
        assert all(fact in told for fact in ("a: ", "open files"))


@pytest.mark.parametrize(
    ("wants", "at_any_size"),
    [
        (Resources(cpu=99.0), False),
        (Resources(gpu=("H200",)), True),
        (Resources(gpu=("L4",), memory_bytes=9 * GIB), False),
    ],
)
def test_no_room_reports_whether_a_smaller_request_would_fit(wants: Resources, at_any_size: bool) -> None:
    assert place(wants, [node("a", cpu(), gpu("g"))], LeaseBook()) == NoRoom(at_any_size)


def test_no_nodes_is_no_room() -> None:
    assert "no node" in why_no_room(Resources(), [], LeaseBook())


def test_a_lease_book_counts_grants_until_they_are_released() -> None:
    book = LeaseBook([lease("w1", "a", 10, 0.5, gpu="g", mode=Share.EXCLUSIVE), lease("w2", "a", 5, 0.25)])
    assert book.used("a") == NodeUse(0.75, 15, {"g": GpuUse(Share.EXCLUSIVE)})
    trial = book.copy()
    trial.release("w1")
    assert (trial.used("a"), book.used("a").memory_bytes) == (NodeUse(0.25, 5, {}), 15)
    book.grant("w2", "b", lease("w2", "b", 7).share)
    assert (book.used("a").memory_bytes, book.used("b").memory_bytes) == (10, 7)
    book.release("w2")
    book.release("w2")
    assert repr(book) == "<LeaseBook [1 leases on 1 nodes]>"


def test_copies_of_a_lease_book_share_cached_values_of_a_node() -> None:
    """Each step works on a copy. The cached values of nodes with leases used to be computed again in the next step."""
    book = LeaseBook([lease("w1", "a", 10, 0.5)])
    assert book.copy().used("a") is book.copy().used("a")
    trial = book.copy()
    trial.release("w1")
    assert trial.used("a") is not book.used("a")


@pytest.mark.parametrize(
    ("of_node", "fits"),
    [
        ({"machine": "x86_64", "pythons": ("3.11", "3.12")}, True),
        ({"machine": "x86_64", "pythons": ("3.11",)}, False),
        ({"machine": "aarch64", "pythons": ("3.12",)}, False),
        ({}, True),  # an older agent reports neither
        ({"machine": "x86_64", "pythons": ("3.11",), "contains_all": True}, True),  # the image has its own Python
    ],
)
def test_a_node_that_cannot_have_the_packages_is_refused_with_its_reason(of_node: dict[str, Any], fits: bool) -> None:
    nodes, packages = [msgspec.structs.replace(node("a"), **of_node)], PackageNeeds("3.12", "x86_64", 0)
    assert isinstance(place(Resources(), nodes, LeaseBook(), packages=packages), Placement) == fits
    if not fits:
        assert "packages" in why_no_room(Resources(), nodes, LeaseBook(), packages=packages)


@pytest.mark.parametrize(
    ("needs", "trouble", "contains_all", "fits"),
    [
        ({"sandbox"}, {}, False, True),
        ({"sandbox"}, {"sandbox": "no Landlock"}, False, False),
        ({"none"}, {"none": "no namespaces"}, False, False),
        ({"none"}, {"none": "no namespaces"}, True, True),  # its container has no network
        ({"process"}, {"process": "GPUFN_ISOLATION=strict"}, True, False),
        (set(), {"sandbox": "no Landlock"}, False, True),
        ({"gvisor"}, {"gvisor": "no runsc"}, True, False),
    ],
)
def test_a_node_that_does_not_offer_the_isolation_is_refused_with_its_reason(
    needs: set[str], trouble: dict[str, str], contains_all: bool, fits: bool
) -> None:
    nodes = [msgspec.structs.replace(node("a"), isolation_trouble=trouble, contains_all=contains_all)]
    assert isinstance(place(Resources(), nodes, LeaseBook(), needs=frozenset(needs)), Placement) == fits
    if not fits:
        assert next(iter(trouble.values())) in why_no_room(Resources(), nodes, LeaseBook(), needs=frozenset(needs))
