"""Values of secrets at the agent: rotations, and what is missing."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from gpufn_core.errors import PlatformError, SecretNotFound
from gpufn_core.home import Home
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_core.spec.naming.secret_scopes import SecretRef
from gpufn_platform.bus.storage.key_value import Entry
from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.secrets.envelope import Keyring, SealedSecret, new_master_key
from gpufn_platform.secrets.master_key import MasterKey
from gpufn_runtime.agent.workers.secret_values import StoredSecrets

OLD, NEW = new_master_key(), new_master_key()


class Bucket:
    def __init__(self, *secrets: SealedSecret) -> None:
        self.secrets = {secret.ref.key: secret for secret in secrets}

    async def get(self, name: str) -> Entry | None:
        secret = self.secrets.get(name)
        return None if secret is None else Entry(name, encode(secret), 1)

    async def entries(self) -> list[Entry]:
        return [Entry(name, encode(secret), 1) for name, secret in self.secrets.items()]


@pytest.fixture
def master_key(tmp_path: Any) -> MasterKey:
    return MasterKey.from_env({}, Home(tmp_path))


def stored(bucket: Bucket, master_key: MasterKey) -> StoredSecrets:
    return StoredSecrets(cast("Any", bucket), master_key)


def spec(*secrets: str) -> FunctionSpec:
    entry = EntryPoint("app", "f")
    return FunctionSpec(name="prod/search/f", entry=entry, methods=(MethodSpec(),), secrets=secrets)


@pytest.mark.parametrize(
    ("stored_for", "widest", "got"),
    [
        ((), "", "*"),
        (("prod",), "", "prod/*"),
        (("prod", "prod/search"), "", "prod/search/*"),
        (("prod/ads", "dev/search"), "", "*"),
        (("prod",), "prod/*", "prod/*"),
    ],
)
def test_the_most_specific_secret_is_delivered(
    master_key: MasterKey, stored_for: tuple[str, ...], widest: str, got: str
) -> None:
    keyring = Keyring([OLD])
    master_key.replace_file(keyring)
    refs = [SecretRef("TOKEN"), *(SecretRef("TOKEN", f"{scope}/*") for scope in stored_for)]
    secrets = stored(Bucket(*(keyring.seal(ref, 1, ref.scope, 1.0) for ref in refs)), master_key)
    assert asyncio.run(secrets.values(spec("TOKEN"), {"TOKEN": widest} if widest else {})) == {"TOKEN": got}


def test_a_function_does_not_get_a_secret_of_a_wider_scope_than_it_was_deployed_with(master_key: MasterKey) -> None:
    keyring = Keyring([OLD])
    master_key.replace_file(keyring)
    secrets = stored(Bucket(keyring.seal(SecretRef("TOKEN"), 1, "of all", 1.0)), master_key)
    with pytest.raises(SecretNotFound, match="TOKEN --env prod --app search"):
        asyncio.run(secrets.values(spec("TOKEN"), {"TOKEN": "prod/search/*"}))


def test_a_record_that_was_moved_is_not_delivered(master_key: MasterKey) -> None:
    keyring = Keyring([OLD])
    master_key.replace_file(keyring)
    bucket = Bucket()
    bucket.secrets["prod/search/TOKEN"] = keyring.seal(SecretRef("TOKEN", "prod/ads/*"), 1, "theirs", 1.0)
    with pytest.raises(PlatformError):
        asyncio.run(stored(bucket, master_key).values(spec("TOKEN"), {}))


def test_values_are_read_before_and_after_a_rotation(master_key: MasterKey) -> None:
    bucket = Bucket(Keyring([OLD]).seal(SecretRef("TOKEN"), 1, "value", 1.0))
    secrets = stored(bucket, master_key)
    master_key.replace_file(Keyring([OLD]))
    assert asyncio.run(secrets.values(spec("TOKEN"), {})) == {"TOKEN": "value"}
    master_key.replace_file(Keyring([NEW]))
    bucket.secrets["TOKEN"] = Keyring([NEW, OLD]).rewrap(bucket.secrets["TOKEN"])
    assert asyncio.run(secrets.values(spec("TOKEN"), {})) == {"TOKEN": "value"}


def test_a_function_without_secrets_needs_no_master_key(master_key: MasterKey) -> None:
    assert asyncio.run(stored(Bucket(), master_key).values(spec(), {})) == {}


def test_a_missing_secret_is_named(master_key: MasterKey) -> None:
    secrets = stored(Bucket(Keyring([OLD]).seal(SecretRef("TOKEN"), 1, "value", 1.0)), master_key)
    with pytest.raises(PlatformError, match="GPUFN_MASTER_KEY_FILE"):
        asyncio.run(secrets.values(spec("TOKEN"), {}))
    with pytest.raises(SecretNotFound, match="gpufn secrets set OTHER"):
        asyncio.run(secrets.values(spec("OTHER"), {}))


def test_a_node_with_a_wrong_key_does_not_start_and_one_without_does(master_key: MasterKey) -> None:
    secrets = stored(Bucket(Keyring([OLD]).seal(SecretRef("TOKEN"), 1, "value", 1.0)), master_key)
    asyncio.run(secrets.check())
    master_key.replace_file(Keyring([NEW]))
    with pytest.raises(InvalidSetting, match="GPUFN_MASTER_KEY_FILE"):
        asyncio.run(secrets.check())
