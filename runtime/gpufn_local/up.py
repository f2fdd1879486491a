"""`gpufn up`: runs NATS, the gateway, an agent, a runner and a builder on this machine, supervised."""

from __future__ import annotations

import contextlib
import datetime
import errno
import http.client
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import click
import msgspec

from gpufn.cli.terminal.command import Command, FloatRange, IntRange
from gpufn.cli.terminal.output import WrongUsage, as_usage_error, print_fields, say, step
from gpufn_core.encoding.urls import check_bus, public
from gpufn_core.errors import BusUnavailable, Conflict, PlatformError
from gpufn_core.home import Home
from gpufn_core.remove_folder import remove_tree
from gpufn_core.weights.credentials import CREDENTIALS, OF_AWS
from gpufn_local import store_encryption
from gpufn_local.bus_certificates import BusCertificate, given_certificate
from gpufn_local.disk_full import StoreWatch
from gpufn_local.instance_lock import Instance, UpRecord, already_up, claimed, write_record
from gpufn_local.nats_process import LOOPBACK, EmbeddedServer, Leftover
from gpufn_local.store_encryption import CIPHER, StoreEncryption
from gpufn_local.store_encryption import KEY as STORE_KEY
from gpufn_local.supervisor import Program, Supervisor, last_lines
from gpufn_platform.bus.tls import BusTls
from gpufn_platform.process import grace_period, supervisor_fifo
from gpufn_platform.process.private_files import create_private
from gpufn_platform.process.proc_hardening import hide_environment
from gpufn_platform.process.settings import InvalidSetting, node_name, number, sync_setting
from gpufn_platform.sandbox import policy
from gpufn_platform.sandbox.support import probe
from gpufn_platform.secrets.master_key import KEY, MasterKey

_NOTIFY_FD = "GPUFN_UP_NOTIFY_FD"  # file descriptor on which a detached `up` reports whether it started
_READY_TIMEOUT_S = 60.0
_NATS_WAIT_S = 5.0  # an external NATS may be starting at the same time
_NATS_RETRY_S = 0.25
_NATS_PORT = 4222
# In stop order.
_PROGRAMS = {
    "gateway": "gpufn_gateway",
    "agent": "gpufn_runtime.agent",
    "runner": "gpufn_runtime.runner",
    "builder": "gpufn_builder",
}
_WITH_GRACE = ("gateway", "agent")
_WITH_SECRETS = ("gateway", "agent")


class _Address(msgspec.Struct, frozen=True):
    """The address of the gateway. `tls` has the gateway's settings for HTTPS; it is empty for HTTP."""

    host: str
    port: int
    tls: dict[str, str]

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{_reachable(self.host)}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {"GPUFN_HOST": self.host, "GPUFN_PORT": str(self.port), **self.tls}

    def connect(self) -> http.client.HTTPConnection:
        host = _reachable(self.host).strip("[]")
        if not self.tls:
            return http.client.HTTPConnection(host, self.port, timeout=2)
        # Not verified: this is our own gateway, and the names in its certificate are those that its clients use.
        return http.client.HTTPSConnection(host, self.port, timeout=2, context=_unverified_context())


def _unverified_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class _Listen(msgspec.Struct, frozen=True):
    """The address of nats-server for other machines. Port 0: the one of the last start, or any."""

    host: str
    port: int


class _Started(msgspec.Struct):
    url: str = ""
    error: str = ""


@click.command(cls=Command)
@click.option("--port", type=IntRange(0, 65_535), default=8090, help="The gateway's port; 0 picks a free one.")
@click.option("--host", default="127.0.0.1", help="The gateway's address; any except loopback requires an API key.")
@click.option(
    "--tls-cert", envvar="GPUFN_TLS_CERT", type=click.Path(), help="PEM file of a certificate chain, to serve HTTPS."
)
@click.option("--tls-key", envvar="GPUFN_TLS_KEY", type=click.Path(), help="PEM file of the certificate's private key.")
@click.option("--detach", "-d", is_flag=True, help="Return when ready; keep running in background.")
@click.option(
    "--bus-listen",
    envvar="GPUFN_NATS_LISTEN",
    metavar="ADDRESS[:PORT]",
    help="Let other machines join: NATS listens on this address of the machine, with TLS (default port: 4222).",
)
@click.option("--nats", help="URL of your own NATS server, with credentials; start none.")
@click.option(
    "--grace",
    type=FloatRange(min=0),
    help="Seconds that running calls may take to finish on stop (default: GPUFN_GRACE, or 30).",
)
def up(
    *,
    port: int,
    host: str,
    tls_cert: str | None,
    tls_key: str | None,
    detach: bool,
    bus_listen: str | None,
    nats: str | None,
    grace: float | None,
) -> None:
    """Run the platform on this machine.

    State is stored in GPUFN_HOME (~/.gpufn). Ctrl-C or `gpufn down` stops it in order: running calls may finish within
    the grace period; submitted calls that do not finish return to their queues and run again after the next `gpufn up`.
    """
    home = Home.from_env()
    if nats is not None:
        with as_usage_error("--nats"):
            check_bus(nats)
    listen = _listen_address(bus_listen, nats)
    tls = _tls_environment(tls_cert, tls_key)
    if detach:
        with _report_disk_errors(home):
            _detached(home, host, port)
        return
    try:
        with _report_disk_errors(home), claimed(home):
            _run(home, _Address(host, _free_port(host, port), tls), nats, listen, _grace_s(grace))
    except Exception as error:
        _notify(_Started(error=getattr(error, "message", str(error))))
        raise


@contextlib.contextmanager
def _report_disk_errors(home: Home) -> Iterator[None]:
    """Turn the error of a full or read-only disk into a one-line PlatformError."""
    try:
        yield
    except BrokenPipeError:  # the reader of our output closed it
        raise
    except OSError as error:
        raise PlatformError(f"cannot write {error.filename or home.root}: {error.strerror}") from error


def _run(home: Home, address: _Address, nats: str | None, listen: _Listen | None, grace_s: float) -> None:
    if nats is not None:
        BusTls.from_env(os.environ).check([server.strip() for server in nats.split(",")])
        if StoreEncryption.is_set(os.environ):
            raise InvalidSetting(f"{CIPHER} works only with the nats-server of `gpufn up`. Configure your own servers.")
        _wait_for_nats(nats)
    elif (leftover := Leftover.find(home.nats)) is not None:
        _say(f"shutting down nats-server (pid {leftover.pid}), which an earlier `gpufn up` left; it starts again")
        leftover.end()
    home.ensure()
    master_key = MasterKey.from_env(os.environ, home)
    if master_key.file == home.master_key:
        master_key.create_file()
    platform = _Platform(home, address, nats, listen, grace_s)
    grace_period.clear_grace(home)
    supervisor = Supervisor(
        programs=[Program(name, module, name in _WITH_GRACE) for name, module in _PROGRAMS.items()],
        environment=platform.environment,
        start_bus=None if nats else platform.start_bus,
        is_ready=platform.is_ready,
        changed=platform.changed,
        say=_say,
        must_restart_bus=platform.store.must_restart,
        grace_s=lambda: grace_period.grace_s(home, grace_s),
        stopping=platform.stopping,
        logs=home.logs,
        bus_log=platform.bus_log,
        cwd=home.root,
        ready_timeout_s=_READY_TIMEOUT_S,
    )
    try:
        with supervisor_fifo.open_fifo(home.supervisor_fifo):
            supervisor.run()
    finally:
        home.remove_runtime_folders()
    say("stopped", err=True)


def _grace_s(option: float | None) -> float:
    if option is not None:
        return option
    return number("GPUFN_GRACE", os.environ.get("GPUFN_GRACE") or str(grace_period.GRACE_S))


def _tls_environment(cert: str | None, key: str | None) -> dict[str, str]:
    """Return the gateway's settings for HTTPS; empty for HTTP. Its working folder is not ours."""
    if not cert and not key:
        return {}
    if not cert or not key:
        missing = "--tls-key" if cert else "--tls-cert"
        raise WrongUsage("HTTPS needs both files: --tls-cert and --tls-key", field=missing)
    return {"GPUFN_TLS_CERT": os.path.abspath(cert), "GPUFN_TLS_KEY": os.path.abspath(key)}


def _listen_address(text: str | None, nats: str | None) -> _Listen | None:
    """Parse --bus-listen."""
    if not text:
        return None
    if nats is not None:
        raise WrongUsage(
            "--bus-listen is for the NATS server of `gpufn up`, and --nats starts none", field="--bus-listen"
        )
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname or "", _NATS_PORT if parts.port is None else parts.port
        resolved = {info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)} if host else set()
    except (ValueError, OSError):
        resolved = set()
    if not resolved or resolved & {"0.0.0.0", "::"}:  # noqa: S104
        raise WrongUsage(
            f"{text!r} is not one address: write the address or host name by which the other machines reach this one",
            field="--bus-listen",
        )
    return _Listen(host, port)


def _wait_for_nats(nats: str) -> None:
    """Raise BusUnavailable if no server responds. Otherwise each process would report the same error, many times."""
    give_up = time.monotonic() + _NATS_WAIT_S
    while errors := _connect_errors(nats):
        if time.monotonic() >= give_up:
            raise BusUnavailable(f"no NATS server responds at {errors}")
        time.sleep(_NATS_RETRY_S)


def _connect_errors(nats: str) -> str:
    """Return the error of each server; empty if one accepts a connection."""
    errors = []
    for server in map(urlsplit, map(str.strip, nats.split(","))):
        host, port = server.hostname or "", server.port or _NATS_PORT
        try:
            socket.create_connection((host, port), timeout=2).close()
        except OSError as error:
            errors.append(f"{host}:{port} ({error.strerror or error})")
        else:
            return ""
    return ", ".join(errors)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be a file on the full disk
        say(f"gpufn: {text}", err=True)


class _Platform:
    """The addresses of one `gpufn up`, and the environment of its processes."""

    def __init__(self, home: Home, address: _Address, nats: str | None, listen: _Listen | None, grace_s: float) -> None:
        self.home = home
        self._grace_s = grace_s
        self._address, self._nats, self._listen = address, nats, listen
        self._bus_tls = BusTls.from_env(os.environ)
        self._node = node_name(os.environ)
        self._isolation = _isolation()  # before the credentials: a process that hides them cannot find out
        self._credentials = _take_from_environment(*CREDENTIALS)
        self._master_key = _take_from_environment(KEY)
        self._sync = sync_setting(os.environ)
        self._encryption = StoreEncryption.from_env(os.environ, home)
        _take_from_environment(STORE_KEY)
        self.bus_log = home.nats / "nats.log"
        self.store = StoreWatch(home.nats, self.bus_log, _say)
        self._bus: EmbeddedServer | None = None
        self._announced = False

    def start_bus(self) -> EmbeddedServer:
        """Start NATS, on its previous port, so that clients reconnect."""
        self.store.started()
        certificate = self._certificate() if self._listen else None
        host, port = (self._listen.host, self._listen.port) if self._listen else (LOOPBACK, 0)
        if store_encryption.must_convert(self.home.nats, self._encryption):
            _say(f"encrypting a copy of {self.home.nats / 'jetstream'}, which takes some seconds per GB")
        authority = self._bus_tls.authority_text()
        self._bus = EmbeddedServer.start(
            self.home.nats,
            host=host,
            port=self._bus.port if self._bus else port,
            certificate=certificate,
            encryption=self._encryption,
            sync_interval_s=self._sync.interval_s,
            ends_with_parent=True,
        )
        if self._listen is None:
            remove_tree(self.home.nats / "join")
        else:
            try:
                self._bus.write_join_files(authority)
            except OSError as error:  # the server runs even if the disk is full
                _say(f"cannot write the settings for other machines, {error.filename}: {error.strerror}")
        return self._bus

    def _certificate(self) -> BusCertificate:
        """Return the certificate of the user, or a new one if ours is near its end."""
        assert self._listen is not None
        folder = self.home.nats / "tls"
        if (given := given_certificate(os.environ)) is not None:
            (folder / "ca.pem").unlink(missing_ok=True)
            return given
        self.home.nats.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = (self._listen.host, "localhost", LOOPBACK, "::1", socket.gethostname())
        from gpufn_local.bus_authority import own_certificate  # noqa: PLC0415  8 MB, which TLS alone needs

        own = own_certificate(folder, names, datetime.datetime.now(datetime.UTC))
        self._bus_tls = BusTls(ca_file=str(own.ca_file))
        return own

    def environment(self, role: str) -> dict[str, str]:
        search = os.environ.get("PYTHONPATH")
        return {
            **os.environ,
            **self._credentials_of(role),
            **(self._master_key if role in _WITH_SECRETS else {}),
            **({"PYTHONPATH": os.pathsep.join(map(os.path.abspath, search.split(os.pathsep)))} if search else {}),
            "GPUFN_HOME": str(self.home.root),
            "GPUFN_NATS_URL": self._nats_url(role),
            **self._address.environment,
            "GPUFN_NODE": self._node,
            "GPUFN_SUPERVISOR_FIFO": str(self.home.supervisor_fifo),
            "GPUFN_GRACE": str(self._grace_s),
            **self._bus_tls.environment,
            **({"GPUFN_NATS_STORE": str(self.home.nats)} if self._nats is None else {}),
        }

    def _credentials_of(self, role: str) -> dict[str, str]:
        """Return the credentials of weights for the agent, and those of the store of volumes for all that use it."""
        if role == "agent":
            return self._credentials
        if role in ("gateway", "runner") and os.environ.get("GPUFN_VOLUME_STORE"):
            return {name: value for name, value in self._credentials.items() if name in OF_AWS}
        return {}

    def is_ready(self) -> bool:
        connection = self._address.connect()
        try:
            with contextlib.closing(connection):
                connection.request("GET", "/readyz")
                return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False

    def stopping(self, remaining_s: float) -> None:
        """Show on a terminal why stopping takes long."""
        if sys.stderr.isatty() and (calls := grace_period.running_calls(self.home)):
            progress = grace_period.describe_running_calls(calls)
            _say(f"stopping: {progress}, for {remaining_s:.0f} s at most (Ctrl-C ends them now)")

    def changed(self, pids: dict[str, int], ready: bool) -> None:
        nats_url = _without_password(self._nats_url("gateway"))
        record = UpRecord(
            pid=os.getpid(), url=self._address.url, nats_url=nats_url, node=self._node, pids=pids, ready=ready,
            grace_s=self._grace_s,
        )  # fmt: skip
        try:
            write_record(self.home, record)
        except OSError as error:
            if not self._announced:
                raise
            # The platform keeps running. Its address stays the same, and the next change writes the pids.
            _say(f"cannot write {self.home.up_file}: {error.strerror}")
        if ready and not self._announced:
            self._announced = True
            _announce(self.home, record, self._isolation)
            _notify(_Started(url=self._address.url))

    def _nats_url(self, role: str) -> str:
        if self._nats is not None:
            return self._nats
        assert self._bus is not None
        return self._bus.url_for(role)


def _take_from_environment(*names: str) -> dict[str, str]:
    """Take credentials out of our environment. Only the processes that need them get them: workers are processes of
    this user, and may read the environments of others."""
    if not any(name in os.environ for name in names):
        return {}
    hide_environment(*names)
    return {name: os.environ.pop(name) for name in names if name in os.environ}


def _announce(home: Home, record: UpRecord, isolation: str) -> None:
    say(f"gpufn is up at {record.url}")
    fields = [
        ("bus", record.nats_url),
        ("node", record.node),
        ("workers", isolation),
        ("state", home.root),
        ("logs", home.logs),
    ]
    if (home.nats / "join").exists():
        fields.append(("join", f"{home.nats / 'join'}: settings for the other machines"))
    print_fields(fields)
    say("Deploy a file with `gpufn deploy FILE`; stop with `gpufn down`.")


def _detached(home: Home, host: str, port: int) -> None:
    """Start the same command in its own session, and wait for its report."""
    if (running := Instance.running(home)) is not None:
        raise already_up(running)
    _free_port(host, port)  # reject invalid options here, as without --detach
    home.logs.mkdir(parents=True, exist_ok=True)
    log = home.logs / "up.log"
    reader, writer = os.pipe()
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--detach", "-d")]
    with step("Starting"), open(log, "ab", opener=create_private) as output:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "gpufn", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, _NOTIFY_FD: str(writer)},
            pass_fds=[writer],
            start_new_session=True,
        )
        os.close(writer)
        with open(reader, "rb") as pipe:
            report = pipe.read()
    started = msgspec.json.decode(report, type=_Started) if report else _Started(error=last_lines(log))
    if started.error:
        process.wait()
        raise PlatformError(started.error)
    if (running := Instance.running(home)) is not None:
        _announce(home, running.record, _isolation())


def _isolation() -> str:
    """Describe how worker processes are isolated. Raises InvalidSetting."""
    return policy.describe(policy.isolation(os.environ.get("GPUFN_ISOLATION", "")), probe())


def _notify(started: _Started) -> None:
    if descriptor := os.environ.pop(_NOTIFY_FD, None):
        with open(int(descriptor), "wb") as pipe:
            pipe.write(msgspec.json.encode(started))


def _free_port(host: str, port: int) -> int:
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise WrongUsage(f"{host!r} is not an address of this machine", field="--host") from error
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Conflict(
                f"port {port} on {host} is taken: stop the program that listens there, or choose another --port"
            ) from error
        raise WrongUsage(f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}", field="--host") from error


def _reachable(host: str) -> str:
    """Return the host name that reaches a server on this machine that listens on `host`."""
    if host in ("0.0.0.0", ""):  # noqa: S104
        return "127.0.0.1"
    return f"[{'::1' if host == '::' else host}]" if ":" in host else host


def _without_password(url: str) -> str:
    """`url`: one server or several, separated by commas."""
    return ",".join(public(server.strip()) for server in url.split(","))
