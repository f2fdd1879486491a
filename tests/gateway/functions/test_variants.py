"""Variants: made by calls, renewed by calls, and deleted when nothing uses them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_core.domain.revision import Revision
from gpufn_core.errors import Forbidden, FunctionNotFound, InvalidInput, TooManyVariants
from gpufn_core.protocol.reports import FunctionStatus, WorkerCounts
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_core.spec.naming.variant_names import variant_name
from gpufn_gateway.auth.access import LOCAL, principal_with
from gpufn_gateway.functions.deploy_checks import DeployOptions
from gpufn_gateway.functions.variants import TTL_S, Variants
from gpufn_gateway.garbage_collection import rules
from tests.gateway.functions.test_leases import Leader
from tests.gateway.whole import DIGEST, Whole, gateway_on
from tests.waiting import until_async

SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "string", "default": "base"}},
    "additionalProperties": False,
}


async def deploy(gateway: Whole, name: str, **options: Any) -> None:
    spec = FunctionSpec(
        name=name,
        entry=EntryPoint("app", "Clf"),
        methods=(MethodSpec("predict"),),
        is_class=True,
        constructor=SCHEMA,
        **options,
    )
    await gateway.deploys.deploy(spec, DIGEST, DeployOptions(check=False))
    await until_async(lambda: name in gateway.registry.functions)


async def test_a_variant_lives_as_long_as_it_is_called_or_in_use(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        await deploy(gateway, "v-lives", max_variants=1)
        leader = Leader(gateway)
        variants = Variants(gateway.registry, gateway.deploys, leader.clock)
        path, name = "v-lives(size=big).predict", variant_name("v-lives", {"size": "big"})
        target = await variants.provide(path, LOCAL)
        assert (target.name, target.method.name) == (name, "predict")
        assert (await variants.provide(path, LOCAL)).number == target.number == 1
        assert (await variants.provide("v-lives(size=base).predict", LOCAL)).name == "v-lives"

        with pytest.raises(TooManyVariants):
            await variants.provide("v-lives(size=small).predict", LOCAL)
        for refused in ("v-lives(colour=red).predict", "v-lives(%7B%22size%22%3A3%7D).predict"):
            with pytest.raises(InvalidInput):
                await variants.provide(refused, LOCAL)
        for missing in ("v-lives(size=small).train", "v-other(size=big).predict", "v-lives=0123456789.predict"):
            with pytest.raises(FunctionNotFound):
                await variants.provide(missing, LOCAL)

        await leader.after(0)
        leader.clock.by_s = TTL_S + 1
        for in_use in (None, {(name, 1)}):  # unknown, or with a worker or a call
            leader.in_use = in_use
            await leader.after(0)
            assert name in gateway.registry.functions
        leader.in_use = set()
        await leader.after(0)
        assert name not in gateway.registry.functions
        assert (await variants.provide(path, LOCAL)).number == 2  # a number is not used twice

        none = [
            FunctionStatus(function=each, serving=n, workers=WorkerCounts()) for each, n in (("v-lives", 1), (name, 2))
        ]
        gateway.report(*none)
        await deploy(gateway, "v-lives")  # the next call copies the new revision
        assert (await variants.provide(f"{name}.predict", LOCAL)).revision.key == (name, 3)
        await gateway.deploys.delete("v-lives")
        assert not gateway.registry.variants_of("v-lives")


async def test_keys_see_a_variant_as_its_function(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        await deploy(gateway, "v-keys")
        await gateway.variants.provide("v-keys(size=big).predict", principal_with("a", ["invoke:v-keys"], None))
        with pytest.raises(FunctionNotFound):
            await gateway.variants.provide("v-keys(size=big).predict", principal_with("b", ["invoke:other"], None))
        path, name = "v-keys(size=big&@cpu=2).predict", variant_name("v-keys", {"size": "big"})
        with pytest.raises(Forbidden):
            await gateway.variants.provide(path, principal_with("a", ["invoke:v-keys"], None))
        changed = await gateway.variants.provide(path, principal_with("d", ["invoke:v-keys", "deploy:v-keys"], None))
        assert (changed.revision.spec.resources.cpu, changed.revision.spec.name) == (2.0, "v-keys")
        with pytest.raises(Forbidden):
            await gateway.variants.provide_for_function("v-keys", "@cpu=2", "prod/other/caller")
        assert principal_with("c", ["read:v-keys"], None).may_read(name)
        listed = (await gateway.http.get("/v1/apps")).json()["apps"]
        assert name not in [each for app in listed for each in app["functions"]]
        document = (await gateway.http.get("/openapi.json")).json()
        assert not [path for path in document["paths"] if "=" in path]
        await gateway.deploys.delete("v-keys")


def test_the_tombstone_of_a_variant_is_a_valid_record() -> None:
    spec = FunctionSpec(name="clf", entry=EntryPoint("app", "Clf"), methods=(MethodSpec(),))
    revision = Revision(function="clf=0123456789", number=1, spec=spec, bundle=DIGEST, created_at=0.0)
    stored = rules.tombstone(revision)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=Revision) == stored
