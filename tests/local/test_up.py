"""`gpufn up` and `gpufn down`: the real platform on loopback."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from gpufn_core.errors import Conflict, InvalidInput
from gpufn_core.home import Home
from gpufn_local.nats_process import Leftover
from gpufn_local.up import _free_port, _report_disk_errors, _without_password
from tests.certificates import Authority
from tests.waiting import until


def _gpufn(home: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpufn", *arguments],
        env={name: value for name, value in os.environ.items() if name != "GPUFN_URL"}
        | {"GPUFN_HOME": str(home)}
        | environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _end(pidfds: dict[str, int]) -> list[str]:
    """The names of the processes that do not end."""
    staying = []
    for name, pidfd in pidfds.items():
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(20_000):
            staying.append(name)
        os.close(pidfd)
    return staying


def _first_worker(home: Path) -> int:
    """Return the pid of a worker, once one runs."""
    path = until(lambda: next((Home(home).run / "w").glob("*/process.json"), None), "a worker is started")
    return int(json.loads(path.read_bytes())["process"]["pid"])


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A GPUFN_HOME. The processes that `up` started end with the test, even if it fails."""
    yield tmp_path
    record = tmp_path / "up.json"
    if not record.exists():
        return
    up = json.loads(record.read_bytes())
    pidfds = {}
    for name, pid in {"up": up["pid"], **up["pids"]}.items():
        with contextlib.suppress(ProcessLookupError):
            pidfds[name] = os.pidfd_open(pid)
            if not _is_of(pid, tmp_path):  # the process has ended, and its pid may have been reused
                os.close(pidfds.pop(name))
    for pidfd in pidfds.values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    assert _end(pidfds) == []


def _is_of(pid: int, home: Path) -> bool:
    try:
        started_with = [Path(f"/proc/{pid}/{file}").read_bytes() for file in ("environ", "cmdline")]
    except OSError:
        return False
    return any(os.fsencode(home) in each for each in started_with)


@pytest.mark.e2e
def test_up_detached_is_ready_when_it_returns_and_down_leaves_nothing(home: Path) -> None:
    started = _gpufn(home, "up", "--detach", "--port", "0")
    assert started.returncode == 0, started.stderr
    record = json.loads((home / "up.json").read_bytes())
    try:
        assert record["url"] in started.stdout.splitlines()[0]
        assert httpx.get(f"{record['url']}/readyz").status_code == 200
        assert sorted(record["pids"]) == ["agent", "builder", "gateway", "nats", "runner"]
        assert "@" not in record["nats_url"]
        assert _gpufn(home, "ls").returncode == 0  # located through up.json

        again = _gpufn(home, "up", "--detach", "--port", "0")
        assert (again.returncode, again.stderr.count("\n"), record["url"] in again.stderr) == (1, 1, True)
        pidfds = {name: os.pidfd_open(pid) for name, pid in (record["pids"] | {"up": record["pid"]}).items()}
    finally:
        stopped = _gpufn(home, "down")
    assert (stopped.returncode, stopped.stdout) == (0, f"stopped {record['url']}\n")
    assert _end(pidfds) == []
    assert not (home / "up.json").exists()


_RUNS_FOR_LONG = """
import time
from gpufn import gpu_function

@gpu_function
def slow() -> None:
    time.sleep(600)
"""


@pytest.mark.e2e
def test_a_killed_up_leaves_nothing_behind_and_can_start_again(home: Path) -> None:
    (app := home / "app.py").write_text(_RUNS_FOR_LONG)
    assert _gpufn(home, "up", "--detach", "--port", "0").returncode == 0
    record = json.loads((home / "up.json").read_bytes())
    pidfds = {name: os.pidfd_open(pid) for name, pid in record["pids"].items()}
    assert _gpufn(home, "deploy", str(app)).returncode == 0
    assert _gpufn(home, "submit", "slow").returncode == 0
    pidfds["worker"] = os.pidfd_open(_first_worker(home))
    os.kill(record["pid"], signal.SIGKILL)
    assert _end(pidfds) == []
    again = _gpufn(home, "up", "--detach", "--port", "0")
    _gpufn(home, "down")
    assert again.returncode == 0, again.stderr


@pytest.mark.e2e
def test_a_nats_server_that_outlives_up_is_ended_by_the_next_up_or_by_down(home: Path) -> None:
    """It was stopped with SIGSTOP, so it could not handle the signal of its supervisor's death."""
    for command in (("up", "--detach", "--port", "0"), ("down",)):
        assert _gpufn(home, "up", "--detach", "--port", "0").returncode in (0, 1)  # it is up again
        record = json.loads((home / "up.json").read_bytes())
        left = os.pidfd_open(record["pids"]["nats"])
        signal.pidfd_send_signal(left, signal.SIGSTOP)
        os.kill(record["pid"], signal.SIGKILL)
        others = {name: os.pidfd_open(pid) for name, pid in record["pids"].items() if name != "nats"}
        assert _end(others) == []
        recovered = _gpufn(home, *command)
        assert (recovered.returncode, recovered.stderr) == (0, "")
        assert _end({"nats": left}) == []
    ended = f"stopped nats-server (pid {record['pids']['nats']}), which an earlier `gpufn up` left in {home}\n"
    assert recovered.stdout == ended
    idle = _gpufn(home, "down")
    assert (idle.returncode, idle.stdout.count("\n"), str(home) in idle.stdout) == (0, 1, True)


@pytest.mark.e2e
def test_a_process_that_cannot_start_ends_up_with_its_own_message(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFN_LOG_LEVEL", "SHOUTING")
    ended = _gpufn(home, "up", "--detach", "--port", "0")
    assert ended.returncode == 1
    assert re.fullmatch(r"gpufn: gateway cannot start: .*SHOUTING.*\n", ended.stderr)
    assert Leftover.find(home / "nats") is None
    assert not (home / "up.json").exists()


def test_a_nats_server_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    homes = {tmp_path / "one": (), tmp_path / "other": ("--detach",)}
    with socket.socket() as taken, ThreadPoolExecutor() as pool:  # at the same time: both wait for it for a while
        taken.bind(("127.0.0.1", 0))  # but does not listen
        server = f"127.0.0.1:{taken.getsockname()[1]}"
        command = ("up", "--port", "0", "--nats", f"nats://me:s3cret@{server}")
        for ended in pool.map(lambda home: _gpufn(home, *command, *homes[home]), homes):
            assert (ended.returncode, ended.stdout) == (1, "")
            assert re.fullmatch(rf"gpufn: .* {server} \(Connection refused\)\n", ended.stderr), ended.stderr
    assert not [home for home in homes if (home / "up.json").exists()]


def test_settings_of_the_bus_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    own = ("--nats", "nats://me:s3cret@192.0.2.1:4222")
    for options, environ, named in (
        (own, {}, "GPUFN_NATS_PLAINTEXT"),
        (own, {"GPUFN_NATS_PLAINTEXT": "allow", "GPUFN_NATS_CA": "x", "GPUFN_NATS_CA_FILE": "x"}, "GPUFN_NATS_CA_FILE"),
        (("--nats", "nats://127.0.0.1:9"), {"GPUFN_STORE_CIPHER": "aes"}, "GPUFN_STORE_CIPHER"),
        ((), {"GPUFN_STORE_CIPHER": "rot13"}, "GPUFN_STORE_CIPHER"),
        (
            ("--bus-listen", "127.0.0.1:0"),
            {"GPUFN_NATS_TLS_CERT": "x", "GPUFN_NATS_TLS_KEY": "x"},
            "GPUFN_NATS_TLS_CERT",
        ),
    ):
        ended = _gpufn(tmp_path, "up", "--port", "0", *options, **environ)
        assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1), ended.stderr
        assert named in ended.stderr
        assert "s3cret" not in ended.stderr


@pytest.mark.parametrize("detach", [(), ("--detach",)])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nats", "foo"), "--nats: 'foo' is not a NATS server's address: write for example nats://HOST:4222"),
        (("--nats", ""), "--nats: '' is not a NATS server's address: write for example nats://HOST:4222"),
        (("--nats", "nats://a:b@h:99999"), "--nats: 'nats://h:99999' is not a NATS server's address: .+"),
        (("--bus-listen", "0.0.0.0"), r"--bus-listen: '0\.0\.0\.0' is not one address: .+"),
        (("--bus-listen", "h:99999"), "--bus-listen: 'h:99999' is not one address: .+"),
        (("--bus-listen", "127.0.0.1", "--nats", "nats://127.0.0.1"), "--bus-listen is .+"),
        (("--host", ""), "--host: '' is not an address of this machine"),
        (("--host", "192.0.2.1"), r"--host: cannot listen on 192\.0\.2\.1:0: Cannot assign requested address"),
    ],
)
def test_an_address_that_is_none_is_one_line_before_anything_starts(
    tmp_path: Path, options: tuple[str, ...], message: str, detach: tuple[str, ...]
) -> None:
    ended = _gpufn(tmp_path, "up", "--port", "0", *options, *detach)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(f"gpufn: {message}\n", ended.stderr), ended.stderr
    assert not (tmp_path / "logs" / "gateway.log").exists()


# In closed folders, and with other readers: the user of a worker's container connects to the worker's socket, and reads
# the bundle through links in its own folder. The worker writes the bytecode.
_READ_BY_CONTAINERS = {
    "w/*/s": 0o666,
    "bundles/*": 0o755,
    "bundles/*/app.py": 0o444,
    "bundles/*/__pycache__": 0o755,
    "bundles/*/__pycache__/*.pyc": 0o644,
}


def _expected_mode(path: Path, kind: int) -> int:
    for pattern, mode in _READ_BY_CONTAINERS.items():
        if path.match(pattern):
            return mode
    return 0o700 if stat.S_ISDIR(kind) else 0o600


@pytest.mark.e2e
def test_files_of_the_platform_are_for_its_user_only(home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    app = tmp_path_factory.mktemp("app") / "app.py"
    app.write_text("from gpufn import gpu_function\n\n\n@gpu_function\ndef double(n: int) -> int:\n    return 2 * n\n")
    home.chmod(0o755)
    try:
        for command in (["up", "--detach", "--port", "0"], ["deploy", str(app)], ["invoke", "double", '{"n": 1}']):
            done = _gpufn(home, *command)
            assert done.returncode == 0, done.stderr
        seen, wrong = set(), {}
        for path in (home, *home.rglob("*"), *Home(home).run.rglob("*")):
            with contextlib.suppress(FileNotFoundError):  # such as temporary files of nats-server
                found = path.lstat().st_mode
                if stat.S_ISLNK(found):  # it has no rights of its own
                    continue
                seen.add(path.name)
                if (mode := stat.S_IMODE(found)) != _expected_mode(path, found):
                    wrong[str(path)] = oct(mode)
        assert wrong == {}
        assert seen >= {"credentials.json", "gateway.log", "up.log", "up.json", "config.json", "s", "app.py", "msgs"}
    finally:
        assert _gpufn(home, "down").returncode == 0


@pytest.mark.e2e
def test_with_a_certificate_the_platform_speaks_https_and_the_cli_trusts_its_authority(
    home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    authority = Authority(tmp_path_factory.mktemp("ca"))
    files = authority.issue("gateway")
    options = ("--tls-cert", os.path.relpath(files.chain), "--tls-key", os.path.relpath(files.key))
    started = _gpufn(home, "up", "--detach", "--port", "0", *options)
    assert started.returncode == 0, started.stderr
    url = json.loads((home / "up.json").read_bytes())["url"]
    try:
        assert url.startswith("https://127.0.0.1:")
        assert url in started.stdout
        assert _gpufn(home, "ls", GPUFN_CA_FILE=str(authority.file)).returncode == 0
        refused = _gpufn(home, "ls")
        assert (refused.returncode, "GPUFN_CA_FILE" in refused.stderr) == (3, True)
        checked = _gpufn(home, "doctor")
        assert (checked.returncode, "GPUFN_CA_FILE" in checked.stdout) == (1, True)
        other_name = _gpufn(home, "ls", GPUFN_CA_FILE=str(authority.file), GPUFN_URL=url.replace("127.0.0.1", "127.1"))
        assert (other_name.returncode, "GPUFN_URL" in other_name.stderr) == (3, True)
    finally:
        assert _gpufn(home, "down").returncode == 0


@pytest.mark.e2e
def test_a_certificate_that_cannot_be_used_ends_the_start_with_the_name_of_its_file(home: Path) -> None:
    damaged = home / "damaged.pem"
    damaged.write_text("no certificate")
    ended = _gpufn(home, "up", "--port", "0", "--tls-cert", str(damaged), "--tls-key", str(damaged))
    assert ended.returncode == 1
    assert f"GPUFN_TLS_CERT={damaged}" in ended.stderr


@pytest.mark.parametrize("option", ["--tls-cert", "--tls-key"])
def test_https_needs_a_certificate_and_its_key(home: Path, option: str) -> None:
    ended = _gpufn(home, "up", "--port", "0", option, "file.pem")
    assert (ended.returncode, "--tls-cert" in ended.stderr, "--tls-key" in ended.stderr) == (2, True, True)


@pytest.mark.parametrize("options", [(), ("--detach",)])
def test_a_home_that_cannot_be_is_one_line(options: tuple[str, ...]) -> None:
    ended = _gpufn(Path("/proc/x"), "up", "--port", "0", *options)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.fullmatch(r"gpufn: cannot write /proc/x.*: .+\n", ended.stderr)


def test_a_reader_that_leaves_the_output_is_not_a_disk_error(tmp_path: Path) -> None:
    with pytest.raises(BrokenPipeError), _report_disk_errors(Home(tmp_path)):
        raise BrokenPipeError


def test_a_port_that_is_taken_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Conflict, match=f"port {port} on 127.0.0.1 .* --port"):
            _free_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"192\.0\.2\.1:8090") as caught:
        _free_port("192.0.2.1", 8090)
    assert os.strerror(errno.EADDRNOTAVAIL) in caught.value.message


def test_a_name_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(InvalidInput, match="'nosuch'") as caught:
        _free_port("nosuch", 0)
    assert caught.value.field == "--host"


def test_a_shown_address_has_no_password() -> None:
    assert _without_password("nats://admin:s3cret@127.0.0.1:4222") == "nats://127.0.0.1:4222"
    cluster = "nats://admin:s3cret@10.0.0.1:4222, nats://admin:s3cret@10.0.0.2:4222"
    assert _without_password(cluster) == "nats://10.0.0.1:4222,nats://10.0.0.2:4222"
