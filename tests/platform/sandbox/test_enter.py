"""Entry into sandboxes in child processes: as a plain user without namespaces, and in PID namespaces."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import resource
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from gpufn_core.protocol.launch import Sandbox
from gpufn_platform.sandbox import landlock, seccomp, system_calls
from gpufn_platform.sandbox.enter import enter, enter_pid_namespace
from gpufn_platform.sandbox.pid_namespace import PidNamespace
from gpufn_platform.sandbox.support import probe
from gpufn_runtime.agent.workers.processes import children
from tests.conftest import missing

NOBODY = 65534
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


def in_child(work: Callable[[], object], *, as_root: bool = False) -> str:
    """Run `work` in a child process of a plain user. Return the exception that it raises; "" for none."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0 and not as_root:
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            work()
        except BaseException as error:
            os.write(writer, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        name = pipe.read().decode()
    os.waitpid(child, 0)
    return name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the plain user, with a file that the sandbox hides and one that it shows."""
    if system_calls.landlock_abi() < landlock.SCOPES_ABI:
        missing("a kernel with Landlock's scopes")
    # The plain user cannot read the list, if it is in root's home.
    seccomp.program(os.uname().machine, may_set_up=False)
    for parent in itertools.takewhile(lambda each: each != Path(tempfile.gettempdir()), (tmp_path, *tmp_path.parents)):
        parent.chmod(0o755)
    for name in ("hidden", "own"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o777)
        (tmp_path / name / "file").write_text("x")
        (tmp_path / name / "file").chmod(0o666)
    return tmp_path


def entering(folder: Path, work: Callable[[], object]) -> Callable[[], None]:
    sandbox = Sandbox(writable=(os.fspath(folder / "own"),), hidden=(os.fspath(folder / "hidden"),), namespaces=False)

    def enter_and_work() -> None:
        enter(sandbox)
        work()

    return enter_and_work


@pytest.mark.parametrize(
    ("attempt", "error"),
    [
        (lambda folder: (folder / "own" / "file").write_text("y"), ""),
        (lambda folder: (folder / "own" / "new").mkdir(), ""),
        (lambda folder: Path("/usr").iterdir().__next__(), ""),
        (lambda folder: (folder / "hidden" / "file").read_text(), "PermissionError"),
        (os.listdir, "PermissionError"),
        (lambda folder: os.kill(os.getppid(), 0), "PermissionError"),
        (lambda folder: Path("/proc/self/oom_score_adj").read_text(), ""),
    ],
)
def test_a_plain_user_without_namespaces(folder: Path, attempt: Callable[[Path], object], error: str) -> None:
    assert in_child(entering(folder, lambda: attempt(folder))) == error


@pytest.mark.parametrize(
    ("readable", "hidden"), [("{}", "{}/hidden"), ("{}", "{}/link/hidden"), ("{}/link", "{}/hidden")]
)
def test_a_link_does_not_lead_into_a_hidden_folder(folder: Path, readable: str, hidden: str) -> None:
    """Regression: each name beside a hidden folder is allowed, and Landlock follows a link to its target."""
    (folder / "link").symlink_to(folder)
    sandbox = Sandbox(readable=(readable.format(folder),), hidden=(hidden.format(folder),), namespaces=False)

    def enter_and_read(path: Path) -> None:
        enter(sandbox)
        (folder / "own" / "file").read_text()
        path.read_text()

    for path in (folder / "hidden" / "file", folder / "link" / "hidden" / "file"):
        assert in_child(functools.partial(enter_and_read, path)) == "PermissionError"


def test_a_worker_in_the_sandbox_of_a_template_loses_the_rights_of_the_template(folder: Path) -> None:
    template = Sandbox(writable=(os.fspath(folder),), namespaces=False, is_template=True)

    def enter_both() -> None:
        enter(template)
        (folder / "hidden" / "file").read_text()
        entering(folder, (folder / "hidden" / "file").read_text)()

    assert in_child(enter_both) == "PermissionError"


@pytest.mark.parametrize("is_forked", [True, False], ids=["forked", "cold"])
@pytest.mark.parametrize("as_root", [True, False], ids=["root", "plain user"])
def test_a_worker_sees_itself_and_its_children_only(is_forked: bool, as_root: bool) -> None:
    if trouble := probe().processes:
        missing(f"a PID namespace: {trouble}")

    outside = os.getpid()

    def go_inside_and_list() -> None:
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)
        sandbox = Sandbox(own_pids=True)
        if is_forked:
            go_on_as_worker(enter(Sandbox(is_template=True, own_pids=True)))
        else:
            enter_pid_namespace(sandbox, report=lambda _: None)
        enter(sandbox)
        assert os.getpid() != 1
        assert processes_in_proc() == {str(os.getpid())} == {os.readlink("/proc/self")}
        with pytest.raises(ProcessLookupError):
            os.sched_setaffinity(outside, {0})
        child = os.fork()
        if child == 0:
            os._exit(len(processes_in_proc()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2, "parent and child see each other"

    assert in_child(go_inside_and_list, as_root=as_root) == ""


@pytest.mark.parametrize("as_root", [True, False], ids=["root", "plain user"])
def test_workers_of_one_template_do_not_see_each_other_and_have_their_own_exit_status(as_root: bool) -> None:
    if trouble := probe().processes:
        missing(f"a PID namespace: {trouble}")

    def start_two() -> None:
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_DUMPABLE, 1)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        from_template, to_agent = os.pipe()
        if os.fork() == 0:
            namespace = enter(Sandbox(is_template=True, own_pids=True))
            assert namespace is not None
            for _ in range(2):
                if os.fork() == 0:
                    namespace.enter()
                    if worker := os.fork():
                        os.write(to_agent, f"{worker}\n".encode())
                        os._exit(0)
                    enter(Sandbox(own_pids=True))
                    assert len(processes_in_proc()) == 1
                    signal.pause()
                os.wait()
            os._exit(0)  # the workers live on
        os.close(to_agent)
        with open(from_template) as lines:
            workers = [int(next(lines)), int(next(lines))]
        for worker, number in zip(workers, (signal.SIGTERM, signal.SIGUSR1), strict=True):
            os.kill(worker, 0)
            os.kill(worker, number)
        ends = dict(os.wait() for _ in range(4))
        assert [ends[worker] for worker in workers] == [signal.SIGTERM, signal.SIGUSR1]
        assert sorted(ends.values())[:2] == [0, 0], "the template and process 1"

    assert in_child(start_two, as_root=as_root) == ""


def test_a_template_sees_the_processes_of_the_machine() -> None:
    """It is outside of the PID namespace of its workers. docs/trust.md says so."""

    def enter_and_list() -> None:
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)
        enter(Sandbox(is_template=True, own_pids=True))
        assert "1" in processes_in_proc()

    assert in_child(enter_and_list) == ""


def test_process_1_is_no_program_of_a_user_and_has_no_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: an environment's packages have programs in the PATH of its workers, and one could be called `cat`."""
    if trouble := probe().processes:
        missing(f"a PID namespace: {trouble}")
    program = tmp_path / "cat"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexec /bin/cat\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def create_and_look() -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        PidNamespace(network=True)
        [process_1] = children()
        status = Path(f"/proc/{process_1}/status").read_text().splitlines()
        values = dict(line.split(":\t", 1) for line in status if ":\t" in line)
        assert (values["Seccomp"], values["NoNewPrivs"]) == ("2", "1")
        assert {int(values[name], 16) for name in ("CapPrm", "CapEff", "CapBnd")} == {0}
        assert Path(f"/proc/{process_1}/environ").read_bytes() == f"PATH={os.defpath}\0".encode()

    assert in_child(create_and_look, as_root=True) == ""
    assert not (tmp_path / "ran").exists()


def test_a_process_1_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    if trouble := probe().processes:
        missing(f"a PID namespace: {trouble}")
    monkeypatch.setattr("gpufn_platform.sandbox.pid_namespace._PROCESS_1", "no-such-program")
    assert in_child(lambda: PidNamespace(network=True), as_root=True) == "FileNotFoundError"


def test_a_pid_namespace_ends_with_its_process_1_and_its_creator_detects_it() -> None:
    if trouble := probe().processes:
        missing(f"a PID namespace: {trouble}")

    def create_and_kill() -> None:
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_DUMPABLE, 1)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        namespace = PidNamespace(network=True)
        assert not namespace.has_ended()
        [process_1] = children()
        os.kill(process_1, signal.SIGKILL)
        os.wait()
        assert namespace.has_ended()
        namespace.enter()
        with pytest.raises(OSError, match="annot allocate memory"):
            os.fork()

    assert in_child(create_and_kill) == ""


def test_workers_that_cooperate_pass_data_by_the_pipe_that_holds_their_namespace() -> None:
    """docs/trust.md says so. A worker may open the pipe for reading by its own descriptor."""
    if trouble := probe().processes:
        missing(f"a PID namespace: {trouble}")

    def fork_two() -> None:
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)
        namespace = enter(Sandbox(is_template=True, own_pids=True))
        assert namespace is not None
        namespace.enter()
        received, opened = os.pipe(), os.pipe()
        if os.fork() == 0:
            enter(Sandbox(own_pids=True))
            pipe = os.open(f"/proc/self/fd/{namespace._held}", os.O_RDONLY)
            os.write(opened[1], b"1")
            os.write(received[1], os.read(pipe, 1))
            os._exit(0)
        if (writer := os.fork()) == 0:
            enter(Sandbox(own_pids=True))
            os.read(opened[0], 1)
            while True:  # process 1 reads too
                os.write(namespace._held, b"x")
        assert os.read(received[0], 1) == b"x"
        os.kill(writer, signal.SIGKILL)

    assert in_child(fork_two, as_root=True) == ""


@pytest.mark.parametrize("folder", ["/proc", "/.proc"])
def test_a_template_of_root_cannot_change_the_kernel_s_settings(folder: str) -> None:
    """It has the /proc of its workers besides its own one. A setting names the program that handles core dumps."""
    if os.geteuid() or (trouble := probe().processes):
        missing(f"a platform of root: {trouble}")

    def enter_and_write() -> None:
        enter(Sandbox(is_template=True, own_pids=True))
        assert "sys" in os.listdir(folder)
        with pytest.raises(OSError, match="ead-only"):
            os.open(f"{folder}/sys/kernel/core_pattern", os.O_WRONLY)
        assert not os.path.getsize(f"{folder}/keys")
        assert not Path(f"{folder}/keys").read_text()

    assert in_child(enter_and_write, as_root=True) == ""


def test_the_limit_of_locked_memory_is_raised_before_a_worker_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may not raise it any more in the user namespace that owns the PID namespace."""
    steps: list[object] = []
    monkeypatch.setattr(resource, "setrlimit", lambda limit, _: steps.append(limit))
    monkeypatch.setattr("gpufn_platform.sandbox.enter.go_on_inside", lambda _, network: steps.append("moved"))
    monkeypatch.setattr("gpufn_platform.sandbox.enter._entered", [])
    enter_pid_namespace(Sandbox(gpus=True, own_pids=True), report=lambda _: None)
    assert steps == [resource.RLIMIT_MEMLOCK, "moved"]


def go_on_as_worker(namespace: PidNamespace | None) -> None:
    """Return in a process that is forked from this template as its workers are."""
    assert namespace is not None
    if os.fork() == 0:
        namespace.enter()
        if os.fork() == 0:
            return
    os._exit(0)


def processes_in_proc() -> set[str]:
    return {name for name in os.listdir("/proc") if name.isdigit()}


def test_a_worker_without_a_network_does_not_run_where_there_are_no_namespaces(folder: Path) -> None:
    assert in_child(lambda: enter(Sandbox(namespaces=False, network=False))) == "PermissionError"


def test_the_processes_of_a_worker_are_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpufn_platform.sandbox.enter.MAX_PROCESSES", 8)

    def fork_without_end() -> None:
        # A process that changed its user cannot write its own uid_map without this.
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)
        enter(Sandbox(readable=("/usr", "/lib", "/lib64"), writable=(os.fspath(folder / "own"),)))
        children = []
        try:
            for _ in range(64):
                child = os.fork()
                if child == 0:
                    signal.pause()
                children.append(child)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)

    if (raised := in_child(fork_without_end)) == "PermissionError":
        missing("user namespaces of plain users")
    assert raised == "BlockingIOError"
