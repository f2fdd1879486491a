"""The gateway's parcels: large bodies of calls, and what becomes of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpufn.errors import CapacityError
from gpufn.parcels import LEAST_BYTES
from gpufn_gateway.bodies import BodyBudget, BodyReader, ClientGone
from gpufn_gateway.call_bodies import CallBodies
from gpufn_gateway.parcels import GatewayParcels

LARGE = b"x" * LEAST_BYTES


def parcels_in(root: Path, name: str = "gw-1", *, limit: int = 1 << 30, reaches_all: bool = True) -> GatewayParcels:
    parcels = GatewayParcels(root, name, budget=BodyBudget(limit), reaches_all=lambda: reaches_all)
    parcels.open()
    return parcels


def bodies_of(parcels: GatewayParcels) -> CallBodies:
    budget = BodyBudget(1 << 30)
    inline = BodyReader(LEAST_BYTES + 1, 30, what="a call's arguments", budget=budget)
    large = BodyReader(4 * LEAST_BYTES, 30, what="a call's arguments", budget=budget)
    return CallBodies(inline, large, parcels)


def files_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} - {"lock"}


class Client:
    def __init__(self, *parts: bytes, leaves: bool = False) -> None:
        self.headers = {b"content-length": b"%d" % sum(map(len, parts))}
        self._parts = list(parts)
        self._leaves = leaves

    async def receive(self) -> dict[str, object]:
        if not self._parts:
            return {"type": "http.disconnect"}
        part = self._parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self._parts) or self._leaves}


async def test_a_large_body_is_a_parcel_of_what_came(tmp_path: Path) -> None:
    parcels = parcels_in(tmp_path)
    bodies = bodies_of(parcels)
    client = Client(LARGE, LARGE)
    body = await bodies.take(client.headers, client.receive, may_be_parcel=True)
    assert body.data == b""
    assert body.parcel is not None
    assert body.size == 2 * LEAST_BYTES
    assert (tmp_path / "gw-1" / body.parcel.name).read_bytes() == LARGE + LARGE
    bodies.discard(body)
    assert files_in(tmp_path / "gw-1") == set()


async def test_a_small_body_and_one_that_may_not_are_in_memory(tmp_path: Path) -> None:
    bodies = bodies_of(parcels_in(tmp_path))
    for client, may_be_parcel in ((Client(b"small"), True), (Client(LARGE), False)):
        body = await bodies.take(client.headers, client.receive, may_be_parcel=may_be_parcel)
        assert body.parcel is None
        assert body.data
    assert bodies.wrap(LARGE, may_be_parcel=False).data == LARGE
    assert bodies.wrap(LARGE, may_be_parcel=True).data == b""


async def test_runners_on_other_hosts_get_bodies_in_messages(tmp_path: Path) -> None:
    bodies = bodies_of(parcels_in(tmp_path, reaches_all=False))
    client = Client(LARGE)
    assert (await bodies.take(client.headers, client.receive, may_be_parcel=True)).data == LARGE


async def test_a_client_that_leaves_midway_leaves_nothing(tmp_path: Path) -> None:
    parcels = parcels_in(tmp_path, limit=2 * LEAST_BYTES)
    client = Client(LARGE, leaves=True)
    with pytest.raises(ClientGone):
        await bodies_of(parcels).take(client.headers, client.receive, may_be_parcel=True)
    assert files_in(tmp_path / "gw-1") == set()
    parcels.keep(LARGE + LARGE)  # and its bytes are free


async def test_all_parcels_together_are_bounded(tmp_path: Path) -> None:
    parcels = parcels_in(tmp_path, limit=LEAST_BYTES)
    first = parcels.keep(LARGE)
    with pytest.raises(CapacityError):
        parcels.keep(LARGE)
    with pytest.raises(CapacityError):
        await parcels.receive(Client(LARGE).receive, LEAST_BYTES)
    parcels.discard(first)
    parcels.discard(await parcels.receive(Client(LARGE).receive, LEAST_BYTES))


def test_what_a_dead_gateway_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    dead = tmp_path / "gw-dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / ("0" * 26)).write_bytes(b"left")
    living = parcels_in(tmp_path, "gw-living")
    kept = living.keep(LARGE)
    mine = parcels_in(tmp_path, "gw-mine")
    assert not dead.exists()
    assert files_in(tmp_path / "gw-living") == {kept.name}
    mine.close()
    assert not (tmp_path / "gw-mine").exists()


def test_results_that_came_for_nobody_are_swept(tmp_path: Path) -> None:
    parcels = parcels_in(tmp_path)
    kept = parcels.keep(LARGE)
    folder = tmp_path / "gw-1"
    stray, fresh = folder / ("0" * 26), folder / ("1" * 26)
    for path in (stray, fresh):
        path.write_bytes(b"result")
    for path in (stray, folder / kept.name):
        os.utime(path, (0, 0))
    parcels.sweep()
    assert files_in(folder) == {kept.name, fresh.name}
