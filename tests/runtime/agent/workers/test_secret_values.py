"""Values of secrets at the agent: rotations, and what is missing."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from gpufn_core.errors import PlatformError, SecretNotFound
from gpufn_core.home import Home
from gpufn_core.protocol.codec import encode
from gpufn_platform.bus.storage.key_value import Entry
from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.secrets.envelope import Keyring, SealedSecret, new_master_key
from gpufn_platform.secrets.master_key import MasterKey
from gpufn_runtime.agent.workers.secret_values import StoredSecrets

OLD, NEW = new_master_key(), new_master_key()


class Bucket:
    def __init__(self, *secrets: SealedSecret) -> None:
        self.secrets = {secret.name: secret for secret in secrets}

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


def test_values_are_read_before_and_after_a_rotation(master_key: MasterKey) -> None:
    bucket = Bucket(Keyring([OLD]).seal("TOKEN", 1, "value", 1.0))
    secrets = stored(bucket, master_key)
    master_key.replace_file(Keyring([OLD]))
    assert asyncio.run(secrets.values(["TOKEN"])) == {"TOKEN": "value"}
    master_key.replace_file(Keyring([NEW]))
    bucket.secrets["TOKEN"] = Keyring([NEW, OLD]).rewrap(bucket.secrets["TOKEN"])
    assert asyncio.run(secrets.values(["TOKEN"])) == {"TOKEN": "value"}


def test_a_function_without_secrets_needs_no_master_key(master_key: MasterKey) -> None:
    assert asyncio.run(stored(Bucket(), master_key).values([])) == {}


def test_what_is_missing_is_named(master_key: MasterKey) -> None:
    secrets = stored(Bucket(Keyring([OLD]).seal("TOKEN", 1, "value", 1.0)), master_key)
    with pytest.raises(PlatformError, match="GPUFN_MASTER_KEY_FILE"):
        asyncio.run(secrets.values(["TOKEN"]))
    with pytest.raises(SecretNotFound, match="gpufn secrets set OTHER"):
        asyncio.run(secrets.values(["OTHER"]))


def test_a_node_with_a_wrong_key_does_not_start_and_one_without_does(master_key: MasterKey) -> None:
    secrets = stored(Bucket(Keyring([OLD]).seal("TOKEN", 1, "value", 1.0)), master_key)
    asyncio.run(secrets.check())
    master_key.replace_file(Keyring([NEW]))
    with pytest.raises(InvalidSetting, match="GPUFN_MASTER_KEY_FILE"):
        asyncio.run(secrets.check())
