"""Secrets through the gateway, on a real bus: no response and no record has a value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn_core.home import Home
from gpufn_core.protocol import subjects
from gpufn_core.spec.naming.secret_scopes import SecretRef
from gpufn_gateway.openapi.request_bodies import MAX_SECRET_BYTES
from gpufn_gateway.secrets.secrets import check_master_key
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.secrets.envelope import decode_secret
from gpufn_platform.secrets.master_key import MasterKey
from tests.gateway.whole import DIGEST, Whole, gateway_on

VALUE = "hf_correct-horse"


@pytest.fixture
def master_key(tmp_path: Path) -> MasterKey:
    master_key = MasterKey.from_env({}, Home(tmp_path))
    master_key.create_file()
    return master_key


async def deploy(gateway: Whole, make: Any, name: str, secrets: tuple[str, ...]) -> Any:
    spec = msgspec.structs.replace(make.spec(name), secrets=secrets)
    return await gateway.http.post("/v1/functions", content=msgspec.json.encode({"spec": spec, "bundle": DIGEST}))


async def stored_value(gateway: Whole, master_key: MasterKey, name: str, scope: str = "*") -> str:
    ref = SecretRef(name, scope)
    entry, keyring = await gateway.buckets.secrets.get(ref.key), master_key.load()
    assert entry is not None
    assert keyring is not None
    assert VALUE.encode() not in entry.value
    return keyring.open(decode_secret(entry.value), ref)


async def test_a_secret_is_set_listed_and_removed(nats: Any, master_key: MasterKey, problem: Any) -> None:
    async with gateway_on(nats, master_key=master_key) as gateway:
        first = await gateway.http.put("/v1/secrets/A_TOKEN", json={"value": VALUE})
        second = await gateway.http.put("/v1/secrets/A_TOKEN", json={"value": VALUE})
        assert [each.json()["version"] for each in (first, second)] == [1, 2]
        listed = await gateway.http.get("/v1/secrets")
        assert [(each["name"], each["functions"]) for each in listed.json()["secrets"]] == [("A_TOKEN", [])]
        assert VALUE not in first.text + listed.text
        assert await stored_value(gateway, master_key, "A_TOKEN") == VALUE
        assert (await gateway.http.delete("/v1/secrets/A_TOKEN")).status_code == 204
        assert problem(await gateway.http.delete("/v1/secrets/A_TOKEN")) == (404, "secret_not_found")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKEN", ""),
        ("TOKEN", "x" * (MAX_SECRET_BYTES + 1)),
        ("TOKEN", "a\0b"),
        ("TOKEN", 1),
        ("MY-TOKEN", "x"),
        ("1TOKEN", "x"),
        ("GPUFN_API_KEY", "x"),
    ],
)
async def test_bad_input(nats: Any, master_key: MasterKey, problem: Any, name: str, value: object) -> None:
    async with gateway_on(nats, master_key=master_key) as gateway:
        assert problem(await gateway.http.put(f"/v1/secrets/{name}", json={"value": value})) == (
            422,
            "invalid_input",
        )


async def test_without_a_master_key_no_secret_can_be_set(nats: Any, tmp_path: Path, problem: Any) -> None:
    async with gateway_on(nats, master_key=MasterKey.from_env({}, Home(tmp_path))) as gateway:
        assert problem(await gateway.http.put("/v1/secrets/TOKEN", json={"value": "x"})) == (409, "conflict")


async def test_a_deploy_names_the_secrets_that_are_missing(
    nats: Any, make: Any, master_key: MasterKey, problem: Any
) -> None:
    async with gateway_on(nats, master_key=master_key) as gateway:
        await gateway.http.put("/v1/secrets/B_TOKEN", json={"value": VALUE})
        answer = await deploy(gateway, make, "lacks", ("B_TOKEN", "B_ONE", "B_TWO"))
        assert problem(answer) == (422, "invalid_spec")
        detail = answer.json()["detail"]
        assert "gpufn secrets set B_ONE" in detail
        assert "gpufn secrets set B_TWO" in detail
        assert "B_TOKEN" not in detail
        of_an_app = await deploy(gateway, make, "prod/search/lacks", ("B_ONE",))
        assert "gpufn secrets set B_ONE --env prod --app search" in of_an_app.json()["detail"]


async def test_a_changed_value_makes_a_new_revision_of_each_function_that_uses_it(
    nats: Any, make: Any, master_key: MasterKey, problem: Any
) -> None:
    async with gateway_on(nats, master_key=master_key) as gateway:
        await gateway.http.put("/v1/secrets/C_TOKEN", json={"value": VALUE})
        for name, secrets in (("uses", ("C_TOKEN",)), ("uses-not", ())):
            assert (await deploy(gateway, make, name, secrets)).status_code == 201
        assert problem(await gateway.http.delete("/v1/secrets/C_TOKEN")) == (409, "conflict")
        changed = (await gateway.http.put("/v1/secrets/C_TOKEN", json={"value": "other"})).json()
        assert (changed["version"], changed["functions"]) == (2, ["uses"])
        assert [gateway.registry.functions[name].active for name in ("uses", "uses-not")] == [2, 1]
        before, after = (gateway.registry.revisions["uses"][number] for number in (1, 2))
        assert (after.spec, after.bundle, after.code, after.state) == (
            before.spec, before.bundle, before.code, before.state,
        )  # fmt: skip


async def test_a_secret_of_an_app_replaces_that_of_its_environment_for_its_functions_only(
    nats: Any, make: Any, master_key: MasterKey, problem: Any
) -> None:
    names = ("prod/search/f", "prod/ads/f", "dev/search/f")
    async with gateway_on(nats, master_key=master_key) as gateway:

        async def put(scope: str) -> list[str]:
            answer = await gateway.http.put(f"/v1/secrets/F_TOKEN{scope}", json={"value": VALUE})
            assert answer.status_code == 200, answer.text
            functions: list[str] = answer.json()["functions"]
            return functions

        def active() -> list[int]:
            return [gateway.registry.functions[name].active for name in names]

        await put("")
        for name in names:
            assert (await deploy(gateway, make, name, ("F_TOKEN",))).status_code == 201
        before = active()
        assert await put("?scope=prod/*") == ["prod/ads/f", "prod/search/f"]
        assert await put("?scope=prod/search/*") == ["prod/search/f"]
        assert await put("?scope=prod/other/*") == []
        assert [now - then for now, then in zip(active(), before, strict=True)] == [2, 1, 0]
        assert await put("") == ["dev/search/f"]
        assert await stored_value(gateway, master_key, "F_TOKEN", "prod/search/*") == VALUE
        listed = (await gateway.http.get("/v1/secrets")).json()["secrets"]
        assert [each["scope"] for each in listed if each["name"] == "F_TOKEN"] == [
            "*", "prod/*", "prod/other/*", "prod/search/*",
        ]  # fmt: skip
        # The functions were deployed with the secret for all functions, so they may get that again.
        for scope in ("?scope=prod/search/*", "?scope=prod/*", "?scope=prod/other/*"):
            assert (await gateway.http.delete(f"/v1/secrets/F_TOKEN{scope}")).status_code == 204, scope
        assert [now - then for now, then in zip(active(), before, strict=True)] == [4, 2, 1]
        assert problem(await gateway.http.delete("/v1/secrets/F_TOKEN")) == (409, "conflict")
        for name in names:
            await gateway.http.delete(f"/v1/functions/{name}")


@pytest.mark.parametrize("scope", ["", "Prod/*", "prod/versions/*", "prod/search", "*/search/*", "prod/*/*"])
async def test_a_wrong_scope(nats: Any, master_key: MasterKey, problem: Any, scope: str) -> None:
    async with gateway_on(nats, master_key=master_key) as gateway:
        answer = await gateway.http.put(f"/v1/secrets/TOKEN?scope={scope}", json={"value": "x"})
        assert problem(answer) == (422, "invalid_input")


async def test_a_rotation_encrypts_all_secrets_under_a_new_key_and_drops_the_old_one(
    nats: Any, master_key: MasterKey
) -> None:
    async with gateway_on(nats, master_key=master_key) as gateway:
        for entry in await gateway.buckets.secrets.entries():  # of other tests, under other keys
            await gateway.buckets.secrets.delete(entry.key)
        for name in ("D_ONE", "D_TWO?scope=prod/*"):
            await gateway.http.put(f"/v1/secrets/{name}", json={"value": VALUE})
        before = master_key.load()
        assert (await gateway.http.post("/v1/secrets/rotate")).json() == {"encrypted": 2}
        after = master_key.load()
        assert before is not None
        assert after is not None
        assert len(after.keys) == 1
        assert after.keys != before.keys
        assert await stored_value(gateway, master_key, "D_TWO", "prod/*") == VALUE


async def test_a_wrong_master_key_at_the_start_names_the_setting(
    nats: Any, master_key: MasterKey, tmp_path: Path
) -> None:
    async with gateway_on(nats, master_key=master_key) as gateway:
        await gateway.http.put("/v1/secrets/E_TOKEN", json={"value": VALUE})
        other = MasterKey.from_env({}, Home(tmp_path / "other"))
        bucket = KeyValue(gateway.bus, subjects.SECRETS)
        with pytest.raises(InvalidSetting, match=r"GPUFN_MASTER_KEY_FILE.*E_TOKEN"):
            await check_master_key(bucket, other)
        assert await stored_value(gateway, master_key, "E_TOKEN") == VALUE
        await gateway.http.delete("/v1/secrets/E_TOKEN")
