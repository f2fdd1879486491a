"""Properties of placement: nothing is leased twice, everything released is free again, and shares are packed at least
as well as by first fit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufn_core.domain.devices.device import Device, DeviceShare, DeviceType, Health, MpsLevel, NodeFacts, Share
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.resources import Resources
from gpufn_core.spec.units import MIN_PROCESS_BYTES
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.node_choice import NoRoom, Placement
from gpufn_gateway.controller.state.leases import Lease, LeaseBook
from tests.gateway.controller.known_worlds import place, why_no_room
from tests.gateway.controller.simulation import GIB, cpu, gpu

MPS = NodeFacts(mps=MpsLevel.V2)
LIMITS = Limits(mps_clients_per_gpu=4, time_shares_per_gpu=3)
KINDS = {"NVIDIA L4": 24, "NVIDIA A100": 80}


@st.composite
def _devices(draw: st.DrawFn, node: str) -> tuple[Device, ...]:
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=4))
    health = st.sampled_from([Health.HEALTHY, Health.HEALTHY, Health.DEGRADED, Health.FAILED])
    return tuple(
        Device(f"{node}-{n}", DeviceType.GPU, kind, KINDS[kind] * GIB, health=draw(health))
        for n, kind in enumerate(kinds)
    )


@st.composite
def _nodes(draw: st.DrawFn) -> list[NodeReport]:
    facts = st.sampled_from([MPS, MPS, NodeFacts()])
    return [
        NodeReport(name, 0.0, (cpu(4.0, 16 * GIB), *draw(_devices(name))), facts=draw(facts))
        for name in ("a", "b", "c")[: draw(st.integers(1, 3))]
    ]


_gpu_names = st.lists(st.sampled_from(["any", "L4", "A100", "H100"]), min_size=1, max_size=2).map(tuple)
_domains = st.sampled_from(["", "x"])
_wants = st.one_of(
    st.builds(Resources, cpu=st.sampled_from([0.1, 2.0]), memory_bytes=st.sampled_from([None, GIB, 9 * GIB])),
    st.builds(Resources, gpu=_gpu_names, gpu_count=st.integers(1, 3)),
    st.builds(Resources, gpu=_gpu_names, share=st.just(Share.TIME), trust_domain=_domains),
    st.builds(
        Resources,
        gpu=_gpu_names,
        share=st.just(Share.MPS),
        vram_bytes=st.integers(1, 90).map(lambda gib: gib * GIB),
        sm_percent=st.sampled_from([None, 10, 60]),
        trust_domain=_domains,
    ),
)
# The needs of a worker that arrives, or the number of a worker that leaves.
_steps = st.lists(st.one_of(_wants, st.integers(0, 50)), max_size=60)


def _check(nodes: list[NodeReport], held: dict[str, tuple[str, DeviceShare]]) -> None:
    """Recompute the use from the shares, independently of the book."""
    for node in nodes:
        shares = [share for where, share in held.values() if where == node.node]
        pool = next(device for device in node.devices if device.type is DeviceType.CPU)
        assert sum(share.memory_bytes for share in shares) <= pool.memory_bytes
        assert sum(share.cores for share in shares) <= pool.cores * LIMITS.cpu_oversubscription + 1e-6
        known = {device.uuid: device for device in node.devices}
        for uuid in {uuid for share in shares for uuid in share.gpus}:
            tenants = [share for share in shares if uuid in share.gpus]
            assert known[uuid].health is Health.HEALTHY
            assert len({(share.mode, share.trust_domain) for share in tenants}) == 1
            assert len(tenants) <= {Share.EXCLUSIVE: 1, Share.TIME: 3, Share.MPS: 4}[tenants[0].mode]
            assert sum(share.vram_bytes for share in tenants) <= known[uuid].memory_bytes
            assert tenants[0].mode is not Share.MPS or node.facts.mps is not MpsLevel.NONE


@settings(max_examples=200)
@given(_nodes(), _steps)
def test_nothing_is_leased_twice_and_all_leases_are_released(
    nodes: list[NodeReport], steps: list[Resources | int]
) -> None:
    book = LeaseBook()
    held: dict[str, tuple[str, DeviceShare]] = {}
    for number, step in enumerate(steps):
        if isinstance(step, int):
            if held:
                gone = list(held)[step % len(held)]
                del held[gone]
                book.release(gone)
            continue
        found = place(step, nodes, book, LIMITS)
        if isinstance(found, Placement):
            assert len(set(found.share.gpus)) == (step.gpu_count if step.gpu else 0)
            held[f"w{number}"] = found.node, found.share
            book.grant(f"w{number}", found.node, found.share)
        else:
            text = why_no_room(step, nodes, book, LIMITS)
            assert all(node.node in text for node in nodes)
            if found.at_any_size:
                smaller = msgspec.structs.replace(step, cpu=0.01, memory_bytes=MIN_PROCESS_BYTES)
                assert isinstance(place(smaller, nodes, book, LIMITS), NoRoom)
        _check(nodes, held)
    for worker in held:
        book.release(worker)
    assert [book.used(node.node) for node in nodes] == [LeaseBook().used("")] * len(nodes)


@settings(max_examples=100)
@given(_nodes(), _wants, st.randoms(use_true_random=False))
def test_the_order_of_the_nodes_and_of_their_devices_decides_nothing(
    nodes: list[NodeReport], wants: Resources, shuffled: random.Random
) -> None:
    devices = {node.node: shuffled.sample(node.devices, len(node.devices)) for node in nodes}
    others = [
        NodeReport(node.node, 0.0, tuple(devices[node.node]), facts=node.facts)
        for node in shuffled.sample(nodes, len(nodes))
    ]
    assert place(wants, others, LeaseBook()) == place(wants, nodes, LeaseBook())


# --- packing ----------------------------------------------------------------------------------------------------------

Trace = list[tuple[str, Resources | None]]  # a worker arrives with its request, or leaves (None)


def _trace(seed: int) -> Trace:
    """Return a trace of workers of forty functions, with the sizes of typical models. Nine in ten share a GPU, one in
    ten wants a whole one. Each lives for a while, and more arrive than fit."""
    chance = random.Random(seed)
    sizes = [chance.choice([1, 1, 2, 2, 3, 4, 6, 8, 10, 12, 16, 20]) for _ in range(40)]
    living: list[str] = []
    trace: Trace = []
    for number in range(400):
        if living and chance.random() < 0.42:
            trace.append((living.pop(chance.randrange(len(living))), None))
            continue
        size = chance.choice(sizes)
        part = Resources(gpu=("any",), share=Share.MPS, vram_bytes=size * GIB)
        trace.append((f"w{number}", part if chance.random() < 0.9 else Resources(gpu=("any",))))
        living.append(f"w{number}")
    return trace


def _first_fit(wants: Resources, node: NodeReport, book: LeaseBook) -> Placement | None:
    used = book.used(node.node)
    for device in node.devices[1:]:
        use = used.gpus.get(device.uuid)
        share = DeviceShare("cpu", 0.1, 1, (device.uuid,), wants.share, wants.vram_bytes or 0)
        if use is None or (
            use.mode is wants.share is Share.MPS and use.vram_bytes + share.vram_bytes <= device.memory_bytes
        ):
            return Placement(node.node, share, "")
    return None


def _packed(trace: Trace, gpus: int, *, by_first_fit: bool) -> tuple[int, int]:
    """Return the GPUs in use and the leased GiB, each summed over the steps."""
    node = NodeReport("a", 0.0, (cpu(512, 4096 * GIB), *(gpu(f"g{n}") for n in range(gpus))), facts=MPS)
    book = LeaseBook()
    taken = leased = 0
    for worker, wants in trace:
        if wants is None:
            book.release(worker)
        else:
            found = _first_fit(wants, node, book) if by_first_fit else place(wants, [node], book)
            if isinstance(found, Placement):
                book.grant(worker, found.node, found.share)
        used = book.used("a").gpus.values()
        taken += len(used)
        leased += sum(use.vram_bytes // GIB or 24 for use in used)
    return taken, leased


def test_shares_are_packed_at_least_as_well_as_by_first_fit() -> None:
    traces = [_trace(seed) for seed in range(12)]
    total = {
        (gpus, first): [
            sum(column) for column in zip(*(_packed(t, gpus, by_first_fit=first) for t in traces), strict=True)
        ]
        for gpus in (8, 64)
        for first in (False, True)
    }
    plenty, plenty_by_first_fit = total[64, False], total[64, True]
    assert plenty[1] == plenty_by_first_fit[1]  # all are placed
    assert plenty[0] < 0.98 * plenty_by_first_fit[0]  # on fewer GPUs
    assert total[8, False][1] > 1.01 * total[8, True][1]  # if GPUs are scarce, more of their memory is in use


# --- many at a time ---------------------------------------------------------------------------------------------------


def test_a_thousand_workers_that_all_differ_are_placed_on_a_hundred_nodes() -> None:
    nodes = [
        NodeReport(f"n{n}", 0.0, (cpu(64, 512 * GIB), *(gpu(f"g{n}-{m}") for m in range(8))), facts=MPS)
        for n in range(100)
    ]
    book = LeaseBook()
    for number, wants in enumerate(_all_different(1000)):
        found = place(wants, nodes, book)
        assert isinstance(found, Placement)
        book.grant(f"w{number}", found.node, found.share)


def _all_different(count: int) -> Iterator[Resources]:
    sizes = itertools.cycle([2, 4, 6, 10])
    for number in range(count):
        if number % 10 == 9:
            yield Resources(gpu=("A100", "L4"), memory_bytes=GIB + number)
        else:
            domain = f"d{number % 7}" if number % 2 else ""
            size_bytes = next(sizes) * GIB + number
            yield Resources(gpu=("any",), share=Share.MPS, vram_bytes=size_bytes, sm_percent=25, trust_domain=domain)


@settings(max_examples=100)
@given(_nodes(), st.lists(_wants, max_size=30))
def test_a_book_with_cached_values_answers_like_a_new_one(nodes: list[NodeReport], wants: list[Resources]) -> None:
    book = LeaseBook()
    held: list[Lease] = []
    for number, each in enumerate(wants):
        found = place(each, nodes, book, LIMITS)
        assert found == place(each, nodes, LeaseBook(held), LIMITS)
        if isinstance(found, Placement):
            held.append(Lease(f"w{number}", found.node, found.share))
            book.grant(f"w{number}", found.node, found.share)
