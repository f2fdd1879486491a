from __future__ import annotations

import signal
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.errors import BusUnavailable, ProtocolMismatch
from gpufn_local import nats_process
from gpufn_local.nats_process import EmbeddedServer, Leftover
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.roles import ROLES
from gpufn_platform.bus.server_check import check_server


async def test_a_restart_keeps_port_credentials_and_data(connect: Any, tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path) as server:
        url = server.url_for("gateway")
        bus = await connect(server)
        await bus.js("STREAM.CREATE.KEPT", {"name": "KEPT", "subjects": ["kept"]})
        await bus.publish_stored("kept", b"")
        assert server.exit_code is None
        await bus.close()
    assert server.exit_code is not None
    with EmbeddedServer.start(tmp_path) as server:
        assert server.url_for("gateway") == url
        bus = await connect(server)
        assert (await bus.js("STREAM.INFO.KEPT"))["state"]["messages"] == 1
        await bus.close()


@pytest.mark.parametrize("damaged", [b"", b"\xff\x00{", b"[1, 2]", b'{"gateway": 7}', b'{"gateway": "kept", "ag'])
def test_damaged_credentials_are_made_again(damaged: bytes, tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    path.write_bytes(damaged)
    made = nats_process._credentials(path)
    assert sorted(made) == sorted(ROLES)
    assert all(len(password) == 32 for password in made.values())
    assert nats_process._credentials(path) == made, "from now on they stay"


def test_secrets_are_readable_by_their_owner_alone(nats: EmbeddedServer) -> None:
    modes = {
        name: stat.S_IMODE((nats.directory / name).stat().st_mode) for name in ("credentials.json", "nats.conf", "lock")
    }
    assert modes == {"credentials.json": 0o600, "nats.conf": 0o600, "lock": 0o600}


def test_a_second_server_on_the_same_directory_is_refused(nats: EmbeddedServer) -> None:
    with pytest.raises(BusUnavailable, match=rf"A nats-server \(pid {nats.pid}\) already runs on"):
        EmbeddedServer.start(nats.directory)


def test_a_server_is_found_by_its_directory_and_shut_down(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path) as server:
        assert Leftover.find(tmp_path.parent) is None
        found = Leftover.find(tmp_path)
        assert found is not None
        assert found.pid == server.pid
        server._process.send_signal(signal.SIGSTOP)
        found.end()
        assert server._process.wait(0) == 0  # not killed
    assert Leftover.find(tmp_path) is None


def test_a_process_that_only_names_the_configuration_is_no_server(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with subprocess.Popen(["cat", "-", tmp_path / "nats.conf"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL):
        assert Leftover.find(tmp_path) is None


def test_a_start_that_is_interrupted_leaves_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # The process exists, and its pid is stored next. A server may be ready before the first poll.
        patch.setattr("gpufn_local.nats_process.os.pwrite", interrupt)
        with pytest.raises(KeyboardInterrupt):
            EmbeddedServer.start(tmp_path)
    EmbeddedServer.start(tmp_path).stop()


def test_a_used_port_is_named_or_avoided_if_none_was_requested(tmp_path: Path) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        port = squatter.getsockname()[1]
        with pytest.raises(BusUnavailable, match=rf"Port {port} on 127\.0\.0\.1 is taken"):
            EmbeddedServer.start(tmp_path, port=port)
        (tmp_path / "port").write_text(str(port))
        with EmbeddedServer.start(tmp_path) as server:
            assert server.port != port


def test_a_missing_binary_names_the_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.files", lambda name: [])
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(BusUnavailable, match="pip install gpufn-platform"):
        EmbeddedServer.start(tmp_path)


def test_a_server_that_does_not_start_reports_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_process, "_config", lambda *_: "nonsense: {")
    with pytest.raises(BusUnavailable, match=rf"{tmp_path}/nats\.log"):
        EmbeddedServer.start(tmp_path)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    reason = nats_process._start_error("[FTL] mkdir: no space left on device\n", "", tmp_path / "nats.log")
    assert str(reason) == f"The disk below {tmp_path} is full: nats-server cannot start."


async def test_the_self_check_accepts_our_own_server(connect: Any, nats: EmbeddedServer) -> None:
    await check_server(await connect(nats, "gateway"))


async def test_the_self_check_refuses_another_form_of_acknowledgements(
    connect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = nats_process._config
    monkeypatch.setattr(nats_process, "_config", lambda *args: config(*args).replace("v2: false", "v2: true"))
    with EmbeddedServer.start(tmp_path) as server:
        bus: Bus = await connect(server)
        with pytest.raises(ProtocolMismatch, match=r"set `feature_flags \{ js_ack_fc_v2: false \}`"):
            await check_server(bus)
        await bus.close()


async def test_the_self_check_refuses_an_old_server(connect: Any, nats: EmbeddedServer) -> None:
    bus = await connect(nats)
    bus._link.info["version"] = "2.10.29"
    with pytest.raises(ProtocolMismatch, match=r"nats-server 2\.10\.29 is too old"):
        await check_server(bus)


@pytest.mark.parametrize("name", ["Zoë is here", "状态", 'a "$HOME" {x} # \\n'])
def test_a_directory_may_have_any_name(tmp_path: Path, name: str) -> None:
    with EmbeddedServer.start(tmp_path / name) as server:
        assert server.exit_code is None
    assert {path.name for path in (tmp_path / name).iterdir()} > {"jetstream", "nats.conf", "port"}
