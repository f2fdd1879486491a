"""TLS on the bus, with a real nats-server: what is verified, and that no password leaves in plain text."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import json
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.errors import BusUnavailable
from gpufn_local.bus_authority import own_certificate
from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.tls import BusTls
from gpufn_platform.process.settings import InvalidSetting
from tests.waiting import until

NOW = datetime.datetime.now(datetime.UTC)
YEAR, FEW_DAYS = datetime.timedelta(days=365), datetime.timedelta(days=20)


@contextlib.contextmanager
def server_with(folder: Path, *names: str, now: datetime.datetime = NOW) -> Iterator[tuple[EmbeddedServer, BusTls]]:
    """A server whose certificate is for `names`, and the trust in its authority."""
    folder.mkdir(exist_ok=True)
    certificate = own_certificate(folder / "tls", names, now)
    with EmbeddedServer.start(folder, certificate=certificate) as server:
        yield server, BusTls(ca_file=str(certificate.ca_file))


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedServer, BusTls]]:
    with server_with(tmp_path_factory.mktemp("tls"), "127.0.0.1") as pair:
        yield pair


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_messages_of_any_size_pass(secure: tuple[EmbeddedServer, BusTls], loop: str) -> None:
    server, tls = secure

    async def scenario() -> list[int]:
        bus = await Bus.connect(server.url, name="t", tls=tls)
        bus.subscribe("t.echo", lambda message: bus.publish(message.reply, message.payload))
        answers = [await bus.request("t.echo", b"x" * size) for size in (1, 2_000_000, 3)]
        await bus.close()
        return [len(answer.payload) for answer in answers]

    factory = pytest.importorskip("uvloop").new_event_loop if loop == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        assert runner.run(scenario()) == [1, 2_000_000, 3]


async def test_the_settings_of_another_machine_are_enough(secure: tuple[EmbeddedServer, BusTls]) -> None:
    server, tls = secure
    folder = server.write_join_files(tls.authority_text())
    assert sorted(path.name for path in folder.iterdir()) == [
        f"{role}.env" for role in ("agent", "builder", "gateway", "runner")
    ]
    path = folder / "agent.env"
    assert path.stat().st_mode & 0o777 == 0o600
    environ = dict(line.split("=", 1) for line in path.read_text().splitlines())
    bus = await Bus.connect(environ["GPUFN_NATS_URL"], name="t", tls=BusTls.from_env(environ))
    assert bus.server_info["tls_required"]
    await bus.close()


async def test_a_connection_is_verified_again_after_a_restart(tmp_path: Path) -> None:
    again = asyncio.Event()
    with server_with(tmp_path, "127.0.0.1", now=NOW - 1.5 * YEAR) as (server, tls):
        bus = await Bus.connect(server.url, name="t", tls=tls)
        bus.on_reconnect(again.set)
        server.kill()
    with server_with(tmp_path, "127.0.0.1") as (server, _):  # with a renewed certificate
        await asyncio.wait_for(again.wait(), 20)
        await bus.flush()
    await bus.close()


async def refusal(server: EmbeddedServer, tls: BusTls, url: str = "") -> str:
    with pytest.raises(BusUnavailable) as error:
        await Bus.connect(url or server.url, name="t", tls=tls)
    return error.value.message


async def test_a_server_of_another_authority_is_refused(secure: tuple[EmbeddedServer, BusTls], tmp_path: Path) -> None:
    other = own_certificate(tmp_path / "tls", ["127.0.0.1"], NOW)
    for tls in (BusTls(ca_file=str(other.ca_file)), BusTls()):
        message = await refusal(secure[0], tls)
        assert "GPUFN_NATS_CA_FILE" in message
        assert f":{secure[0].port}" in message


async def test_a_server_with_another_name_is_refused(tmp_path: Path) -> None:
    with server_with(tmp_path, "bus.example.org", "192.0.2.7") as (server, tls):
        assert "another name or address" in await refusal(server, tls)
        assert "another name or address" in await refusal(server, tls, server.url.replace("127.0.0.1", "localhost"))


async def test_a_server_whose_certificate_has_expired_is_refused(tmp_path: Path) -> None:
    with server_with(tmp_path, "127.0.0.1", now=NOW - 3 * YEAR) as (server, tls):
        assert "expired" in await refusal(server, tls)


async def test_a_certificate_near_its_end_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with server_with(tmp_path, "127.0.0.1", now=NOW - 2 * YEAR + FEW_DAYS) as (server, tls):
        bus = await Bus.connect(server.url, name="t", tls=tls)
        await bus.close()
    assert [record.levelname for record in caplog.records if "certificate" in record.getMessage()] == ["WARNING"]


async def test_no_password_is_sent_to_a_server_without_tls(secure: tuple[EmbeddedServer, BusTls]) -> None:
    """An attacker between client and server responds instead of the server, and does not offer TLS."""
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":8388608,"headers":true}\r\n')
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(4096):
                received.put_nowait(data)
        received.put_nowait(b"end")
        writer.close()

    fake = await asyncio.start_server(on_client, "127.0.0.1", 0)
    async with fake:
        url = f"tls://agent:s3cret@127.0.0.1:{fake.sockets[0].getsockname()[1]}"
        assert "does not speak TLS" in await refusal(secure[0], secure[1], url)
        assert await received.get() == b"end"


def test_a_client_in_plain_text_is_refused_by_the_server(secure: tuple[EmbeddedServer, BusTls]) -> None:
    server, _ = secure
    password = json.loads((server.directory / "credentials.json").read_bytes())["agent"]
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as plain:
        plain.recv(4096)
        plain.sendall(b'CONNECT {"user":"agent","pass":"%b"}\r\nPING\r\n' % password.encode())
        with contextlib.suppress(ConnectionResetError):
            assert b"PONG" not in plain.recv(4096)


@pytest.mark.parametrize("server", ["nats://a:b@10.0.0.1:4222", "nats://bus.example.org", "nats://a:b@[fd00::1]"])
async def test_plain_text_to_another_machine_needs_consent(server: str) -> None:
    with pytest.raises(InvalidSetting, match="GPUFN_NATS_PLAINTEXT=allow") as error:
        await Bus.connect(f"nats://a:b@127.0.0.1:9,{server}", name="t")
    assert "a:b" not in error.value.message
    BusTls.from_env({"GPUFN_NATS_PLAINTEXT": "allow"}).check([server])
    BusTls().check([server.replace("nats://", "tls://"), "nats://localhost", "nats://[::1]:4222"])


@pytest.mark.parametrize(
    "environ",
    [
        {"GPUFN_NATS_PLAINTEXT": "yes"},
        {"GPUFN_NATS_CA": "MII", "GPUFN_NATS_CA_FILE": "ca.pem"},
        {"GPUFN_NATS_CA": "no base64!"},
        {"GPUFN_NATS_CA": base64.b64encode(b"no certificate").decode()},
        {"GPUFN_NATS_CA_FILE": "/no/such/file"},
        {"GPUFN_NATS_CA_FILE": __file__},
    ],
)
def test_wrong_settings_are_named(environ: dict[str, str]) -> None:
    with pytest.raises(InvalidSetting, match=next(reversed(environ))):
        BusTls.from_env(environ).context(["tls://h"])


def test_without_tls_no_authorities_are_read() -> None:
    assert BusTls().context(["nats://127.0.0.1"]) is None
    context = BusTls().context(["tls://h"])
    assert context is not None
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_the_watchdog_greets_a_server_with_tls_and_leaves_no_error(
    secure: tuple[EmbeddedServer, BusTls],
) -> None:
    from gpufn_local.watchdog_listener import _TlsGreeter

    server, _ = secure
    log = server.directory / "nats.log"
    before = log.read_bytes().count(b"[ERR]")
    greeter = _TlsGreeter("127.0.0.1", server.port, every_s=15)
    assert [greeter.has_greeted(now) for now in (0, 1, 15)] == [True, False, True]
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as plain:
        plain.recv(1)  # its reset is logged after errors of the greeter, if there were any
    until(lambda: log.read_bytes().count(b"[ERR]") > before, "the server logs a failed handshake")
    assert log.read_bytes().count(b"[ERR]") == before + 1


def test_a_stopped_server_with_tls_has_not_greeted(secure: Any) -> None:
    from gpufn_local.watchdog_listener import _TlsGreeter

    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not _TlsGreeter("127.0.0.1", silent.getsockname()[1], every_s=15).has_greeted(0)
