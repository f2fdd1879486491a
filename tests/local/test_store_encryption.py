"""The encrypted store: a real nats-server, and what a start with other settings does."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from gpufn_core.home import Home
from gpufn_local import store_encryption
from gpufn_local.nats_process import EmbeddedServer
from gpufn_local.store_encryption import StoreEncryption
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.secrets.envelope import Keyring, new_master_key

MARK = b"a text that an encrypted store does not show"
KEYS = [Keyring([new_master_key()]).text().strip() for _ in range(2)]
MESSAGES, FETCHED, ACKNOWLEDGED = 50, 10, 4


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def encrypted(home: Home, cipher: str = "aes", **environ: str) -> StoreEncryption | None:
    return StoreEncryption.from_env({"GPUFN_STORE_CIPHER": cipher, **environ}, home)


def fill(server: EmbeddedServer) -> None:
    """Store messages, and the position of a consumer among them."""

    async def work() -> None:
        bus = await Bus.connect(server.url, name="t")
        await bus.js("STREAM.CREATE.S", {"name": "S", "subjects": ["s"]})
        for _ in range(MESSAGES):
            await bus.publish_stored("s", MARK)
        config = {"durable_name": "c", "ack_policy": "explicit", "ack_wait": 3600 * 10**9}
        await bus.js("CONSUMER.DURABLE.CREATE.S.c", {"stream_name": "S", "config": config})
        inbox, replies = bus.new_inbox(), asyncio.Queue[str]()
        bus.subscribe(inbox, lambda message: replies.put_nowait(message.reply))
        bus.publish("$JS.API.CONSUMER.MSG.NEXT.S.c", b'{"batch":%d}' % FETCHED, reply=inbox)
        deliveries = [await replies.get() for _ in range(FETCHED)]
        for reply in deliveries[:ACKNOWLEDGED]:
            await bus.request(reply, b"+ACK")
        await bus.close()

    asyncio.run(work())


def content(server: EmbeddedServer) -> tuple[int, int, int]:
    """The messages, and how many of them the consumer has fetched and acknowledged."""

    async def work() -> tuple[int, int, int]:
        bus = await Bus.connect(server.url, name="t")
        stream, consumer = await bus.js("STREAM.INFO.S"), await bus.js("CONSUMER.INFO.S.c")
        first = await bus.js("STREAM.MSG.GET.S", {"seq": 1})
        assert first["message"]["data"]
        await bus.close()
        return stream["state"]["messages"], consumer["delivered"]["stream_seq"], consumer["ack_floor"]["stream_seq"]

    return asyncio.run(work())


WHOLE = (MESSAGES, FETCHED, ACKNOWLEDGED)


def shows_text(home: Home) -> bool:
    return any(MARK in path.read_bytes() for path in home.nats.rglob("*") if path.is_file())


@pytest.mark.parametrize("cipher", ["aes", "chachapoly"])
def test_a_new_store_is_encrypted_and_survives_kills(home: Home, cipher: str) -> None:
    encryption = encrypted(home, cipher)
    assert encryption is not None
    with EmbeddedServer.start(home.nats, encryption=encryption) as server:
        fill(server)
        arguments = Path(f"/proc/{server.pid}/cmdline").read_bytes()
        server.kill()
    assert encryption.key.encode() not in arguments
    assert not shows_text(home)
    assert not any(encryption.key.encode() in path.read_bytes() for path in home.nats.rglob("*") if path.is_file())
    assert home.store_key.stat().st_mode & 0o777 == 0o600
    with EmbeddedServer.start(home.nats, encryption=encrypted(home, cipher)) as server:
        assert content(server)[:2] == WHOLE[:2]  # a killed server may forget acknowledgements, also without a cipher


def test_an_existing_store_is_encrypted_and_its_cipher_changed(home: Home) -> None:
    with EmbeddedServer.start(home.nats) as server:
        fill(server)
    assert shows_text(home)
    for cipher in ("aes", "chachapoly"):
        with EmbeddedServer.start(home.nats, encryption=encrypted(home, cipher)) as server:
            assert content(server) == WHOLE
        assert not shows_text(home)
        assert {path.name for path in home.nats.iterdir()} & {"encrypting", "replaced"} == set()


def test_an_interrupted_encryption_begins_again(home: Home) -> None:
    with EmbeddedServer.start(home.nats) as server:
        fill(server)
    encryption = encrypted(home)
    store_encryption.write_record(home.nats, encryption)
    shutil.copytree(home.nats / "jetstream", home.nats / "encrypting" / "jetstream")
    (home.nats / "jetstream").rename(home.nats / "replaced")  # killed before the copy took its place
    with EmbeddedServer.start(home.nats, encryption=encryption) as server:
        assert content(server) == WHOLE
    assert not shows_text(home)
    (home.nats / "encrypting").mkdir()  # killed after it
    with EmbeddedServer.start(home.nats, encryption=encryption) as server:
        assert content(server) == WHOLE
    assert not (home.nats / "encrypting").exists()


def test_a_start_that_could_not_read_the_store_is_refused_and_changes_nothing(home: Home) -> None:
    right = encrypted(home, GPUFN_STORE_KEY=KEYS[0])
    with EmbeddedServer.start(home.nats, encryption=right) as server:
        fill(server)
    wrong = encrypted(home, GPUFN_STORE_KEY=KEYS[1])
    for encryption, named in ((wrong, "GPUFN_STORE_KEY"), (None, "GPUFN_STORE_CIPHER")):
        with pytest.raises(InvalidSetting, match=named):
            EmbeddedServer.start(home.nats, encryption=encryption)
    record = home.nats / "encryption.json"
    kept = record.read_bytes()
    record.unlink()
    with pytest.raises(InvalidSetting, match=r"encryption\.json"):
        EmbeddedServer.start(home.nats, encryption=right)
    record.write_bytes(kept)
    with EmbeddedServer.start(home.nats, encryption=right) as server:
        assert content(server) == WHOLE


def test_no_key_is_made_for_a_store_that_has_one(home: Home) -> None:
    with EmbeddedServer.start(home.nats, encryption=encrypted(home)) as server:
        fill(server)
    home.store_key.unlink()
    with pytest.raises(InvalidSetting, match="GPUFN_STORE_KEY_FILE"):
        encrypted(home)
    assert not home.store_key.exists()


def test_a_plain_store_needs_no_settings(home: Home) -> None:
    assert StoreEncryption.from_env({}, home) is None
    assert encrypted(home, "off") is None
    assert not home.store_key.exists()
    store_encryption.check(home.nats, None)


@pytest.mark.parametrize(
    ("cipher", "environ", "named"),
    [
        ("des", {}, "GPUFN_STORE_CIPHER"),
        ("aes", {"GPUFN_STORE_KEY": "short"}, "GPUFN_STORE_KEY"),
        ("aes", {"GPUFN_STORE_KEY": " ".join(KEYS)}, "GPUFN_STORE_KEY"),
        ("aes", {"GPUFN_STORE_KEY_COMMAND": "false"}, "GPUFN_STORE_KEY_COMMAND"),
        ("aes", {"GPUFN_STORE_KEY_FILE": "/no/such/file"}, "GPUFN_STORE_KEY_FILE"),
    ],
)
def test_wrong_settings_are_named(home: Home, cipher: str, environ: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidSetting, match=named) as error:
        encrypted(home, cipher, **environ)
    assert KEYS[0] not in error.value.message
