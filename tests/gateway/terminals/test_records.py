"""The right to open a terminal, and the record of a terminal: a variant that accepts no calls."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_core.domain.revision import Revision
from gpufn_core.errors import CapacityError, Forbidden, FunctionNotFound
from gpufn_core.ids import Digest
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_gateway.auth.access import LOCAL, Principal, principal_with
from gpufn_gateway.functions.deploy_checks import DeployOptions
from gpufn_gateway.functions.secret_use import check_secret_view
from gpufn_gateway.terminals.records import MAX_TERMINALS
from gpufn_gateway.terminals.terminals import function_in
from tests.gateway.whole import DIGEST, Whole, gateway_on
from tests.waiting import until_async


async def deployed(gateway: Whole, name: str, **options: Any) -> None:
    spec = FunctionSpec(name=name, entry=EntryPoint("app", "f"), methods=(MethodSpec(),), max_variants=1, **options)
    await gateway.deploys.deploy(spec, DIGEST, DeployOptions(check=False))
    await until_async(lambda: name in gateway.registry.functions)


async def test_a_terminal_is_a_variant_that_cannot_be_called(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        await deployed(gateway, "t-f", env={"KEY": "hidden"})
        function = gateway.registry.function("t-f")
        target = await gateway.terminal_records.add(function)
        assert target.revision.variant is not None
        assert (target.revision.variant.is_terminal, target.revision.spec.env) == (True, {"KEY": "hidden"})
        for verb in ("invoke", "submit"):
            refused = await gateway.http.post(f"/v1/functions/{target.name}/{verb}", json={})
            assert (refused.status_code, refused.json()["code"]) == (404, "function_not_found")
        assert (await gateway.http.get(f"/v1/functions/{target.name}/exec")).status_code == 404
        assert "hidden" not in (await gateway.http.get("/v1/functions")).text

        for _ in range(MAX_TERMINALS - 1):
            await gateway.terminal_records.add(function)
        with pytest.raises(CapacityError):
            await gateway.terminal_records.add(function)
        await gateway.terminal_records.remove(target)
        await gateway.terminal_records.remove(target)
        await gateway.terminal_records.add(function)
        await gateway.deploys.delete("t-f")
        await until_async(lambda: not any(name.startswith("t-f") for name in gateway.registry.functions))
        with pytest.raises(FunctionNotFound):
            await gateway.variants.provide(target.name, LOCAL)


async def test_a_name_without_a_function_is_not_found(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        assert (await gateway.http.get("/v1/functions/t-missing/exec")).status_code == 404


@pytest.mark.parametrize(
    ("scopes", "scope", "is_allowed"),
    [
        (("admin",), "*", True),
        (("exec:prod/shop/*",), "prod/shop/*", False),
        (("exec:prod/shop/*", "deploy:prod/shop/f"), "prod/shop/*", False),
        (("exec:prod/shop/*", "deploy:prod/shop/*"), "prod/shop/*", True),
        (("exec:prod/shop/*", "deploy:prod/shop/*"), "*", False),
        (("exec", "deploy"), "*", True),
    ],
)
def test_a_terminal_needs_the_right_to_each_secret(scopes: tuple[str, ...], scope: str, is_allowed: bool) -> None:
    spec = FunctionSpec(name="prod/shop/f", entry=EntryPoint("app", "f"), methods=(MethodSpec(),), secrets=("TOKEN",))
    revision = Revision(
        function="prod/shop/f",
        number=1,
        spec=spec,
        bundle=Digest(DIGEST),
        created_at=0.0,
        secret_scopes={"TOKEN": scope},
    )
    principal: Principal = principal_with("key", scopes, None)
    if is_allowed:
        check_secret_view(principal, revision)
    else:
        with pytest.raises(Forbidden):
            check_secret_view(principal, revision)
    check_secret_view(principal, msgspec.structs.replace(revision, spec=msgspec.structs.replace(spec, secrets=())))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/functions/f/exec", "f"),
        ("/v1/functions/prod/shop/f/exec", "prod/shop/f"),
        ("/v1/functions/exec", None),
        ("/v1/functions//exec", None),
        ("/web/a/b/c/exec", None),
        ("/v1/functions/f/exec/", None),
    ],
)
def test_the_path_of_a_terminal(path: str, name: str | None) -> None:
    assert function_in(path) == name
