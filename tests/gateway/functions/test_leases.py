"""Temporary functions on a real bus: leases are renewed, taken over, and deleted when they expire."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gpufn_core.domain.revision import Lease, RevisionKey, RevisionState
from gpufn_core.errors import FunctionNotFound
from gpufn_gateway.functions.deploy_checks import DeployOptions, LeaseLost
from gpufn_gateway.functions.lease_expiry import LeaseExpiry
from tests.gateway.whole import DIGEST, Whole, gateway_on
from tests.waiting import until_async

MINUTE = 60.0


class Ahead:
    """A clock that a test sets forward."""

    def __init__(self) -> None:
        self.by_s = 0.0

    def time(self) -> float:
        return time.time() + self.by_s

    def monotonic(self) -> float:
        return time.monotonic() + self.by_s


class Leader:
    """The expiry of leases in a gateway that leads or does not."""

    def __init__(self, gateway: Whole) -> None:
        self.clock = Ahead()
        self.leads = True
        self.in_use: set[RevisionKey] | None = set()
        self.expiry = LeaseExpiry(
            gateway.registry,
            gateway.deploys,
            gateway.audit,
            self.clock,
            leads=lambda: self.leads,
            in_use=lambda: self.in_use,
        )

    async def after(self, seconds: float) -> None:
        self.clock.by_s += seconds
        await self.expiry.step()


@pytest.mark.parametrize(
    ("renewed_at", "leading_since", "has_expired"), [(0.0, 0.0, True), (950.0, 0.0, False), (0.0, 950.0, False)]
)
def test_a_lease_counts_from_its_renewal_or_from_the_start_of_the_leader(
    renewed_at: float, leading_since: float, has_expired: bool
) -> None:
    assert Lease("a", MINUTE, renewed_at).has_expired(1000.0, leading_since) is has_expired


async def deploy(gateway: Whole, make: Any, name: str, lease: str | None) -> None:
    options = DeployOptions(check=False, lease=None if lease is None else Lease(lease, MINUTE))
    await gateway.deploys.deploy(make.spec(name), DIGEST, options)
    await until_async(lambda: name in gateway.registry.functions)


async def test_only_unrenewed_functions_are_deleted(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        for name, lease in (("temporary", "a"), ("renewed", "a"), ("permanent", None)):
            await deploy(gateway, make, name, lease)
        leader = Leader(gateway)
        await leader.after(0)
        renewed = Lease("a", 3 * MINUTE)
        await gateway.deploys.renew("renewed", renewed)
        leader.leads = False
        await leader.after(MINUTE + 1)
        leader.leads = True
        await leader.after(0)  # the client could not renew while no gateway led
        assert "temporary" in gateway.registry.functions
        await leader.after(MINUTE + 1)
        await until_async(lambda: "temporary" not in gateway.registry.functions)
        assert {"renewed", "permanent"} <= gateway.registry.functions.keys()
        await until_async(lambda: gateway.registry.revisions["temporary"][1].state is RevisionState.RETIRED)
        last = await gateway.audit.last()
        assert last is not None
        assert (last.principal, last.object) == ("platform", "temporary")
        with pytest.raises(FunctionNotFound):
            await gateway.deploys.renew("temporary", renewed)


async def test_the_newest_holder_has_the_lease(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await deploy(gateway, make, "shared", "first")
        await deploy(gateway, make, "shared", "second")
        with pytest.raises(LeaseLost):
            await gateway.deploys.renew("shared", Lease("first", MINUTE))
        path = "/v1/functions/shared"
        assert (await gateway.http.delete(path, params={"lease": "first"})).status_code == 409
        answer = await gateway.http.post(f"{path}/lease", json={"id": "second", "ttl_s": 7})
        assert (answer.status_code, answer.json()["lease"]["ttl_s"]) == (200, 7)
        assert (await gateway.deploys.restart("shared")).lease is not None
        assert (await gateway.http.delete(path, params={"lease": "second"})).status_code == 204


async def test_a_permanent_function_never_becomes_temporary(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await deploy(gateway, make, "promoted", "a")
        await deploy(gateway, make, "promoted", None)
        with pytest.raises(LeaseLost):
            await gateway.deploys.renew("promoted", Lease("a", MINUTE))
        with pytest.raises(LeaseLost):
            await deploy(gateway, make, "promoted", "b")
        await gateway.deploys.rollback("promoted", 1)
        restarted = await gateway.deploys.restart("promoted")  # from a revision that was temporary
        assert restarted.lease is None


async def test_a_bundle_requires_the_right_to_deploy(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await deploy(gateway, make, "readable", None)
        await until_async(lambda: 1 in gateway.registry.revisions.get("readable", {}))
        answer = await gateway.http.get("/v1/functions/readable/revisions/1/bundle")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/zip")
        assert (await gateway.http.get("/v1/functions/readable/revisions/9/bundle")).status_code == 404
