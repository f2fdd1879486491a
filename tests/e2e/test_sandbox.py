"""Attacks by user code in a worker process. docs/trust.md lists them, with the names of the tests."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from gpufn_core.home import Home
from gpufn_runtime.agent.bytecode.background import LEAST_SOURCE_BYTES
from tests.conftest import Platform, missing, running_platform
from tests.e2e.apps.attacks import LIBC
from tests.waiting import until

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "attacks.py"
ISOLATED, VICTIM = APP.with_name("isolated.py"), APP.with_name("neighbour.py")
REFUSE_NAMESPACES = (sys.executable, os.fspath(Path(__file__).with_name("refuse_namespaces.py")))
DENIED = ("PermissionError", "FileNotFoundError")
COMPILED = """
import os
from gpufn import gpu_function

@gpu_function
def compiled(code: str) -> object:
    try:
        return eval(code)
    except OSError as error:
        name = type(error).__name__
        return name if name != "OSError" else f"OSError {error.errno}"
"""
OWN_FOLDERS = {"GPUFN_SANDBOX_FOLDERS": ""}


@contextlib.contextmanager
def attacked(home: Path, **options: Any) -> Iterator[Platform]:
    with running_platform(home, environ=OWN_FOLDERS, **options) as platform:
        platform.gpufn("deploy", APP)
        yield platform


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """A platform whose sandboxes have all parts."""
    with attacked(tmp_path_factory.mktemp("full") / "home") as platform:
        if trouble := {part: why for part, why in nodes_trouble(platform).items() if part in ("sandbox", "none")}:
            missing(f"a kernel that allows all parts of the sandbox: {trouble}")
        platform.gpufn("deploy", ISOLATED)
        yield platform


@pytest.fixture(scope="module")
def without_namespaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with attacked(tmp_path_factory.mktemp("part") / "home", wrapper=REFUSE_NAMESPACES) as platform:
        yield platform


def nodes_trouble(platform: Platform) -> dict[str, str]:
    (node,) = platform.client.get("/v1/nodes").json()["nodes"]
    return dict(node["isolation_trouble"])


@pytest.fixture(params=["full", "without_namespaces"])
def platform_(request: pytest.FixtureRequest) -> Platform:
    platform: Platform = request.getfixturevalue(request.param)
    return platform


def attack(platform: Platform, code: str, function: str = "attacker") -> Any:
    return platform.invoke(function, {"code": code})


def folder_of(platform: Platform, function: str) -> tuple[Path, int]:
    """The folder of a worker of the function, and its process."""
    for folder in Home(platform.home).workers.iterdir():
        with contextlib.suppress(FileNotFoundError):
            process = json.loads((folder / "process.json").read_bytes())
            if process["function"] == function:
                return folder, process["process"]["pid"]
    raise AssertionError(f"{function} has no worker")


def folder_of_victim(platform: Platform) -> tuple[Path, int]:
    platform.invoke("victim")
    return folder_of(platform, "victim")


def number_inside(pid: int) -> int:
    """Return the number of a worker in its PID namespace, which the workers of one template share."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("NSpid:")).split()[-1])


def test_credentials_of_the_bus_cannot_be_read(platform_: Platform) -> None:
    path = platform_.home / "nats" / "credentials.json"
    assert path.exists()
    assert attack(platform_, f"Path('{path}').read_text()") in DENIED


def test_a_home_behind_a_link_is_hidden_in_a_folder_that_workers_may_read(tmp_path: Path) -> None:
    """Regression: only the link was hidden."""
    home = tmp_path / "data" / "home"
    home.mkdir(parents=True)
    (tmp_path / "link").symlink_to(home)
    with running_platform(tmp_path / "link", environ={"GPUFN_SANDBOX_FOLDERS": f"{tmp_path}/data"}) as platform:
        platform.gpufn("deploy", APP)
        for each in (home, platform.home):
            assert attack(platform, f"Path('{each}/nats/credentials.json').read_text()") in DENIED


def test_no_code_of_a_function_runs_before_the_sandbox_is_entered(
    full: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a cold worker started with the function's variables, so PYTHONPATH gave it the rights of gpufn."""
    write = f"import os\nopen(f'{tmp_path}/escaped {{os.environ.get(\"TIER\", \"\")}}', 'w').close()\n"
    (tmp_path / "sitecustomize.py").write_text(write)
    monkeypatch.setenv("EVIL_FOLDER", os.fspath(tmp_path))
    full.gpufn("deploy", APP.with_name("early.py"))
    assert full.invoke("early") == os.fspath(tmp_path)
    assert full.invoke("early_unconfined") == os.fspath(tmp_path)
    assert [path.name for path in tmp_path.glob("escaped*")] == ["escaped process"], "a limit of that tier"


def test_another_functions_bundle_and_config_cannot_be_read(platform_: Platform) -> None:
    platform_.gpufn("deploy", VICTIM)
    platform_.invoke("neighbour")
    folder, _ = folder_of(platform_, "neighbour")
    config = json.loads((folder / "config.json").read_bytes())
    assert Path(config["bundle_dir"]).is_dir()
    for path in (config["bundle_dir"], folder, folder / "tmp"):
        assert attack(platform_, f"os.listdir('{path}')") in DENIED
    assert attack(platform_, f"Path('{folder / 'config.json'}').read_text()") in DENIED


def test_another_workers_bodies_cannot_be_found(platform_: Platform) -> None:
    folder, _ = folder_of_victim(platform_)
    shared = Home(platform_.home).shared_bodies / folder.name
    assert shared.exists()
    assert attack(platform_, f"os.listdir('{shared}')") in DENIED
    assert attack(platform_, f"'{folder.name}' in os.listdir('{shared.parent}')") in (*DENIED, False)


@pytest.mark.parametrize(
    "code",
    ["os.kill({pid}, 0)", "ptrace({pid})", "Path('/proc/{pid}/environ').read_bytes()", "open('/proc/{pid}/mem')"],
)
def test_another_worker_cannot_be_signalled_or_read(platform_: Platform, code: str) -> None:
    _, pid = folder_of_victim(platform_)
    os.kill(pid, 0)
    for number in (pid, number_inside(pid)):
        assert attack(platform_, code.format(pid=number)) in (*DENIED, "ProcessLookupError")


@pytest.mark.parametrize(
    "code",
    [
        "resource.prlimit({pid}, resource.RLIMIT_CPU)",  # with a limit it would kill the process
        "os.setpriority(os.PRIO_PROCESS, {pid}, 0)",
        "os.sched_setscheduler({pid}, os.SCHED_OTHER, os.sched_param(0))",
    ],
)
def test_limits_and_priority_of_another_worker_cannot_be_changed(platform_: Platform, code: str) -> None:
    """Regression: `prlimit` needs only the same user, so a worker could kill any process of the platform by a limit."""
    _, pid = folder_of_victim(platform_)
    for number in (pid, number_inside(pid)):
        assert attack(platform_, code.format(pid=number)) == "PermissionError"


def test_sockets_outside_the_sandbox_cannot_be_reached_by_an_abstract_name(platform_: Platform) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0gpufn-test-{os.getpid()}")
        listener.listen()
        code = f"connect(socket.AF_UNIX, '\\0gpufn-test-{os.getpid()}')"
        assert attack(platform_, code) == "PermissionError"


def test_another_workers_socket_does_not_exist(full: Platform) -> None:
    folder, _ = folder_of_victim(full)
    assert (folder / "s").exists()
    assert attack(full, f"connect(socket.AF_UNIX, '{folder / 's'}')") == "FileNotFoundError"


def test_no_program_gains_privileges(platform_: Platform) -> None:
    status = attack(platform_, "status()")
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}


@pytest.mark.parametrize("code", ["new_user_namespace()", "read_keyring()"])
def test_system_calls_that_docker_refuses_are_refused(platform_: Platform, code: str) -> None:
    assert attack(platform_, code) == "PermissionError"


def test_the_oom_score_of_another_process_cannot_be_changed(platform_: Platform) -> None:
    _, pid = folder_of_victim(platform_)
    for process, outcomes in ((pid, (*DENIED, "OSError 30")), ("self", (4,))):
        code = f"Path('/proc/{process}/oom_score_adj').write_text('1000')"
        assert attack(platform_, code) in outcomes


def test_the_terminals_of_the_machine_cannot_be_opened(platform_: Platform) -> None:
    terminals = attack(platform_, "os.listdir('/dev/pts')")
    assert terminals in (*DENIED, ["ptmx"])
    if terminals == ["ptmx"]:
        assert attack(platform_, "os.close(os.openpty()[0])") is None


@pytest.mark.parametrize("path", ["/etc/shadow", "/etc/sudoers", "/etc/ssh/ssh_host_ed25519_key"])
def test_the_private_files_of_the_system_cannot_be_read(platform_: Platform, path: str) -> None:
    assert attack(platform_, f"Path('{path}').read_text()") in (*DENIED, "")


@pytest.mark.parametrize("path", ["/etc/hosts", "/proc/sys/kernel/core_pattern", "/usr/bin/nohup", "/dev/kmsg"])
def test_the_machines_files_cannot_be_written_to(platform_: Platform, path: str) -> None:
    assert attack(platform_, f"open('{path}', 'r+').close()") in (*DENIED, "OSError 30")


def test_the_own_files_work(platform_: Platform) -> None:
    code = "Path(os.environ['HOME'], 'x').write_text('1'), __import__('multiprocessing').Lock().acquire()"
    assert attack(platform_, code) == [1, True]


def test_tmp_is_private_and_limited(full: Platform, tmp_path: Path) -> None:
    assert attack(full, f"os.path.exists('{tmp_path}')") is False
    memory = attack(full, "os.statvfs('/tmp').f_blocks * os.statvfs('/tmp').f_frsize")
    assert 0 < memory < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def test_network_none_reaches_nothing_but_the_runner(full: Platform) -> None:
    address = urlsplit(full.url)
    code = f"socket.create_connection(('127.0.0.1', {address.port})).close()"
    assert attack(full, code) is None
    assert attack(full, code, "offline") == errno.ENETUNREACH
    assert attack(full, "[name for _, name in socket.if_nameindex()]", "offline") == ["lo"]


def test_a_worker_changes_no_file_that_the_platform_uses(platform_: Platform) -> None:
    """The platform reads and removes these files with its own rights."""
    assert attack(platform_, "None") is None
    folder, _ = folder_of(platform_, "attacker")
    for code in ("os.symlink('/etc', '{}/x')", "os.rename('{0}/tmp', '{0}/y')", "os.unlink('{}/process.json')"):
        assert attack(platform_, code.format(folder)) in (*DENIED, "OSError 30", "OSError 18", "OSError 16"), code


def test_workers_load_byte_code_that_no_worker_can_write(platform_: Platform, tmp_path: Path) -> None:
    (tmp_path / "compiled.py").write_text(COMPILED + "# text\n" * LEAST_SOURCE_BYTES)
    platform_.gpufn("deploy", tmp_path / "compiled.py")
    digest = platform_.client.get("/v1/functions/compiled/revisions/1").json()["bundle"]
    name = f"compiled.{sys.implementation.cache_tag}.pyc"
    cached = Home(platform_.home).bundles / digest / "__pycache__" / name
    until(cached.exists)
    before = cached.read_bytes()
    for code in ("open(__cached__, 'r+')", "open(__cached__ + '.pyc', 'w')", "os.unlink(__cached__)"):
        assert attack(platform_, code, "compiled") in (*DENIED, "OSError 30"), code
    assert attack(platform_, "__cached__", "compiled") == os.fspath(cached)
    assert (cached.read_bytes(), os.listdir(cached.parent)) == (before, [name])


def test_a_link_that_a_worker_leaves_is_not_followed(platform_: Platform, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    assert attack(platform_, "None") is None
    folder, _ = folder_of(platform_, "attacker")
    bodies = Home(platform_.home).shared_bodies / folder.name
    for place in (f"{folder}/tmp/link", f"{bodies}/{'0' * 26}"):
        assert attack(platform_, f"os.symlink('{tmp_path}', '{place}')") is None
    assert platform_.post("attacker", {"code": "os._exit(1)"}).status_code == 502
    until(lambda: not folder.exists() and not bodies.exists())
    assert (tmp_path / "file").read_text() == "kept"


def test_a_call_finds_files_of_an_earlier_call(full: Platform) -> None:
    """A documented limit of all tiers: calls of one function share its workers."""
    assert attack(full, "globals().__setitem__('left_behind', 1)") is None
    assert attack(full, "left_behind") == 1


@dataclass(frozen=True)
class Targets:
    """The targets of the attacks below. The attacks refer to the fields by name."""

    home: Path
    pid: int  # process of the victim
    folder: Path  # worker folder of the victim
    bus_port: int
    terminal: str
    socket: Path  # socket of another program; `abstract` is its abstract name
    abstract: str
    segment: int  # System V memory


@pytest.fixture
def targets(platform_: Platform, tmp_path: Path) -> Iterator[Targets]:
    folder, pid = folder_of_victim(platform_)
    bus = json.loads(Home(platform_.home).up_file.read_bytes())["nats_url"]
    leader, terminal = os.openpty()
    name = f"gpufn-works-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as by_path, socket.socket(socket.AF_UNIX) as by_name:
        for listener, address in ((by_path, f"{tmp_path}/s"), (by_name, f"\0{name}")):
            listener.bind(address)
            listener.listen()
        port = urlsplit(bus).port or 0
        segment = LIBC.shmget(0, 4096, 0o1600)  # IPC_PRIVATE, IPC_CREAT
        yield Targets(platform_.home, pid, folder, port, os.ttyname(terminal), tmp_path / "s", name, segment)
        LIBC.shmctl(segment, 0, None)  # IPC_RMID
    os.close(leader)
    os.close(terminal)


IN_PROCESS = {
    "credentials": "Path('{home}/nats/credentials.json').read_text() != ''",
    "files of another function": "Path('{folder}/config.json').read_text() != ''",
    "bodies": "'{folder.name}' in os.listdir('{shared}')",
    "signal": "os.kill({pid}, 0) is None",
    "read": "Path('/proc/{pid}/environ').read_bytes() != b''",
    "limit": "len(resource.prlimit({pid}, resource.RLIMIT_CPU)) == 2",
    "priority": "os.setpriority(os.PRIO_PROCESS, {pid}, 0) is None",
    "memory": "Path('/proc/{pid}/oom_score_adj').write_text(Path('/proc/{pid}/oom_score_adj').read_text()) > 0",
    "abstract socket": "connect(socket.AF_UNIX, '\\0{abstract}')",
    "setuid": "status()['NoNewPrivs'] == '0'",
    "namespaces": "outcome_of('unshare', '--user', 'true') == 0",
    "key ring": "read_keyring() > 0",
    "terminal": "os.close(os.open('{terminal}', os.O_RDWR | os.O_NOCTTY)) is None",
    "bundle": "open(os.path.dirname(__file__) + '/written', 'w').close() is None",
    "links": "os.symlink('/etc', '{folder}/link') is None",
    "tmp": "os.path.exists('{home}/up.log')",
}
AS_ROOT = {
    "write": "open('/etc/hosts', 'r+').close() is None",
    "private files": "Path('/etc/shadow').read_text() != ''",
}
WITHOUT_NAMESPACES = {
    "socket": "connect(socket.AF_UNIX, '{socket}')",
    "system v memory": "attach({segment})",
    "processes": "Path('/proc/{pid}/cmdline').read_bytes() != b''",
    "cores": "os.sched_setaffinity({pid}, os.sched_getaffinity({pid})) is None",
    "fork": "resource.getrlimit(resource.RLIMIT_NPROC)[1] != 4096",
}
EVERYWHERE = {
    "neighbour's cores": "os.sched_setaffinity({pid}, os.sched_getaffinity({pid})) is None",
    "port": "connect(socket.AF_INET, ('127.0.0.1', {bus_port}))",
}


def works(platform: Platform, function: str, code: str, targets: Targets) -> bool:
    fields = vars(targets) | {"shared": Home(targets.home).shared_bodies}
    return attack(platform, code.format(**fields), function) is True


@pytest.mark.parametrize("platform_", ["full"], indirect=True)
@pytest.mark.parametrize("name", [*IN_PROCESS, *AS_ROOT, *WITHOUT_NAMESPACES, *EVERYWHERE])
def test_in_a_process_without_a_sandbox_the_attack_works(platform_: Platform, targets: Targets, name: str) -> None:
    """These are limits of the tier 'process'. docs/trust.md says so."""
    code = (IN_PROCESS | AS_ROOT | WITHOUT_NAMESPACES | EVERYWHERE)[name]
    if name in AS_ROOT and os.geteuid():
        missing("a platform of root")
    assert works(platform_, "unconfined", code, targets)


@pytest.mark.parametrize("platform_", ["without_namespaces"], indirect=True)
@pytest.mark.parametrize("name", WITHOUT_NAMESPACES)
def test_in_a_sandbox_without_namespaces_the_attack_works(platform_: Platform, targets: Targets, name: str) -> None:
    """These are limits of a node that refuses namespaces. docs/trust.md says so."""
    assert works(platform_, "attacker", WITHOUT_NAMESPACES[name], targets)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_in_each_sandbox_the_attack_works(platform_: Platform, targets: Targets, name: str) -> None:
    """These are limits of the sandbox. docs/trust.md says so."""
    neighbour = dataclasses.replace(targets, pid=number_inside(targets.pid))
    assert works(platform_, "attacker", EVERYWHERE[name], neighbour)


@pytest.mark.parametrize("platform_", ["full"], indirect=True)
@pytest.mark.parametrize("name", [*IN_PROCESS, *AS_ROOT, *WITHOUT_NAMESPACES])
def test_in_a_sandbox_the_same_attack_fails(platform_: Platform, targets: Targets, name: str) -> None:
    code = (IN_PROCESS | AS_ROOT | WITHOUT_NAMESPACES)[name]
    assert not works(platform_, "attacker", code, targets)


def test_a_node_without_namespaces_reports_missing_tiers(without_namespaces: Platform) -> None:
    assert {"sandbox", "none", "egress"} <= nodes_trouble(without_namespaces).keys()


def test_a_strict_node_without_namespaces_does_not_start(tmp_path: Path) -> None:
    ended = subprocess.run(
        [*REFUSE_NAMESPACES, sys.executable, "-m", "gpufn", "up", "--port", "0"],
        env=os.environ | {"GPUFN_HOME": str(tmp_path / "home"), "GPUFN_ISOLATION": "strict"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "GPUFN_ISOLATION=strict" in ended.stderr
