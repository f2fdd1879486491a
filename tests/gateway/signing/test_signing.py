"""Signed deploys through the gateway, on a real bus."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_core.ids import Digest
from gpufn_core.signing.ed25519 import Signer
from gpufn_core.signing.statement import DeploySignature, Statement
from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_gateway.auth.access import new_key
from gpufn_gateway.functions.deploy_checks import DeployOptions
from tests.gateway.whole import DIGEST, Whole, gateway_on

SIGNER, OTHER = Signer.new(), Signer.new()


def signature_of(spec: FunctionSpec, signer: Signer = SIGNER, bundle: Digest = DIGEST) -> DeploySignature:
    return signer.sign(Statement.of(spec.name, spec, bundle, 1.0))


async def deploy(gateway: Whole, spec: FunctionSpec, signature: DeploySignature | None = None) -> Any:
    body = {"spec": spec, "bundle": DIGEST, "signature": signature}
    return await gateway.http.post("/v1/functions", content=msgspec.json.encode(body))


async def trust(gateway: Whole, name: str, pattern: str, signer: Signer = SIGNER) -> Any:
    body = {"public_key": signer.public_pem(), "patterns": [pattern]}
    return await gateway.http.put(f"/v1/signing/keys/{name}", json=body)


async def require(gateway: Whole, environment: str, *, force: bool = False) -> Any:
    return await gateway.http.put(f"/v1/signing/required/{environment}", json={"force": force})


async def clean_up(gateway: Whole, environment: str, *keys: str) -> None:
    for key in keys:
        await gateway.http.delete(f"/v1/signing/keys/{key}")
    await gateway.http.delete(f"/v1/signing/required/{environment}")
    for name in [name for name in gateway.registry.functions if name.startswith(f"{environment}/")]:
        await gateway.http.delete(f"/v1/functions/{name}")


async def test_an_environment_accepts_only_deploys_of_a_key_trusted_for_it(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        spec = make.spec("sign-a/app/f")
        assert (await trust(gateway, "sign-a", "sign-a/*")).json()["id"] == SIGNER.id
        assert (await require(gateway, "sign-a")).json()["required"].count("sign-a") == 1
        unsigned = await deploy(gateway, spec)
        unknown = await deploy(gateway, spec, signature_of(spec, OTHER))
        moved = await deploy(gateway, spec, signature_of(make.spec("sign-a/app/g")))
        assert [problem(each) for each in (unsigned, unknown, moved)] == [(403, "untrusted_deploy")] * 3
        assert "sign-a/*" not in unknown.text
        assert not await gateway.revisions.keys("sign-a/app/f.")
        assert (await deploy(gateway, spec, signature_of(spec))).status_code == 201
        other = make.spec("sign-b/app/f")
        assert problem(await deploy(gateway, other, signature_of(other))) == (403, "untrusted_deploy")
        assert (await deploy(gateway, other)).status_code == 201
        listed = (await gateway.http.get("/v1/signing")).json()["keys"]
        assert [each["functions"] for each in listed if each["name"] == "sign-a"] == [["sign-a/app/f"]]
        revisions = (await gateway.http.get("/v1/functions/sign-a/app/f/revisions")).json()["revisions"]
        assert [each["signed_by"] for each in revisions] == [SIGNER.id]
        await clean_up(gateway, "sign-a", "sign-a")
        await clean_up(gateway, "sign-b")


async def test_a_restart_keeps_the_signature_and_a_rollback_to_an_unsigned_revision_is_refused(
    nats: Any, make: Any, problem: Any
) -> None:
    async with gateway_on(nats) as gateway:
        spec = make.spec("sign-c/app/f")
        await deploy(gateway, spec)
        await trust(gateway, "sign-c", "sign-c/*")
        assert problem(await require(gateway, "sign-c")) == (409, "conflict")
        options = DeployOptions(check=False, signature=signature_of(spec))
        await gateway.deploys.deploy(spec, DIGEST, options)
        assert (await require(gateway, "sign-c")).status_code == 200
        await gateway.deploys.restart(spec.name)
        gateway.signatures.check_new(gateway.registry.revision(spec.name, 3))
        refused = await gateway.http.post(f"/v1/functions/{spec.name}/rollback", json={"revision": 1})
        assert problem(refused) == (403, "untrusted_deploy")
        assert (await gateway.http.get(f"/v1/functions/{spec.name}")).json()["active"] == 3
        back = await gateway.http.post(f"/v1/functions/{spec.name}/rollback", json={"revision": 2})
        assert back.json()["active"] == 2
        await clean_up(gateway, "sign-c", "sign-c")


async def test_an_app_is_rolled_back_as_a_whole_or_not_at_all(nats: Any, make: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        await trust(gateway, "sign-d", "sign-d/*")
        names = ("sign-d/app/f", "sign-d/app/g")
        for number, deploy_id in enumerate(("1", "2")):
            for name in names:
                spec = make.spec(name)
                is_signed = number or name == names[0]
                signature = signature_of(spec) if is_signed else None
                options = DeployOptions(check=False, deploy_id=deploy_id, signature=signature)
                await gateway.deploys.deploy(spec, DIGEST, options)
        await require(gateway, "sign-d")
        refused = await gateway.http.post("/v1/apps/sign-d/app/rollback")
        assert problem(refused) == (403, "untrusted_deploy")
        assert [gateway.registry.functions[name].active for name in names] == [2, 2]
        await clean_up(gateway, "sign-d", "sign-d")


async def test_the_rules_for_a_trusted_key(nats: Any, problem: Any) -> None:
    async with gateway_on(nats) as gateway:
        assert problem(await trust(gateway, "Not_A_Name", "*")) == (422, "invalid_input")
        assert problem(await trust(gateway, "sign-e", "pre*")) == (422, "invalid_input")
        for body in ({"public_key": "x"}, {"public_key": SIGNER.public_pem(), "patterns": []}, {}):
            assert problem(await gateway.http.put("/v1/signing/keys/sign-e", json=body)) == (422, "invalid_input")
        third = Signer.new()
        await trust(gateway, "sign-e", "*", third)
        assert problem(await trust(gateway, "sign-f", "*", third)) == (409, "conflict")
        assert (await trust(gateway, "sign-e", "dev/*", third)).json()["patterns"] == ["dev/*"]
        assert (await gateway.http.delete("/v1/signing/keys/sign-e")).json()["id"] == third.id
        assert problem(await gateway.http.delete("/v1/signing/keys/sign-e")) == (404, "signer_not_found")
        assert problem(await require(gateway, "Not-An-Environment")) == (422, "invalid_input")


@pytest.mark.parametrize("scope", ["deploy", "read"])
async def test_only_an_administrator_changes_the_rules(nats: Any, problem: Any, scope: str) -> None:
    async with gateway_on(nats) as gateway:
        key, secret = new_key("test", (scope,), 1.0)
        gateway.access.put(key)
        gateway.http.headers["authorization"] = f"Bearer {secret}"
        assert (await gateway.http.get("/v1/signing")).status_code == 200
        for response in (
            await trust(gateway, "sign-g", "*"),
            await require(gateway, "sign-g"),
            await gateway.http.delete("/v1/signing/keys/sign-g"),
            await gateway.http.delete("/v1/signing/required/sign-g"),
        ):
            assert problem(response) == (403, "forbidden")
