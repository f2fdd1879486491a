"""The supervisor with small programs in place of the platform's: real processes, real signals."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpufn_core.errors import Conflict
from gpufn_core.home import Home
from gpufn_local.instance_lock import Instance, UpRecord, claimed, write_record

# Programs that write their events to `events`, and a supervisor that reports on standard output.
_SCRIPT = """
import os, sys
from pathlib import Path
from gpufn_local.nats_process import EmbeddedServer
from gpufn_local.supervisor import Program, Supervisor
from gpufn.errors import PlatformError

folder = Path(sys.argv[1])
supervisor = Supervisor(
    programs=[Program(name, name) for name in sys.argv[2:]],
    environment=lambda name: os.environ | {"PYTHONPATH": str(folder), "EVENTS": str(folder / "events")},
    start_bus=(lambda: EmbeddedServer.start(folder, ends_with_parent=True)) if "HAS_BUS" in os.environ else None,
    is_ready=lambda: all((folder / f"{name}.is-ready").exists() for name in sys.argv[2:]),
    logs=folder / "logs",
    bus_log=folder / "nats.log",
    cwd=folder,
    ready_timeout_s=20,
    silent_s=float(os.environ.get("RUNNER_SILENCE_S", "60")),
    changed=lambda pids, ready: print("pids", *(f"{name}={pid}" for name, pid in pids.items()), ready, flush=True),
    say=lambda text: print("say", text, flush=True),
)
try:
    supervisor.run()
except PlatformError as error:
    print("failed", error, flush=True)
print("done", flush=True)
"""
_LIVES = """
import os, signal, sys, threading
name = __spec__.name
def note(text):
    with open(os.environ["EVENTS"], "a") as events: events.write(f"{name} {text}\\n")
def stop(*_):
    note("stops")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
note("starts")
open(f"{name}.is-ready", "w").close()
signal.pause()
"""
# Sends a heartbeat; the first time it then hangs, in the way that HANGS names.
_HANGS = """
import asyncio, os, signal, time
from gpufn_platform.process.watchdog import notify_watchdog
async def serve():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    notify_watchdog()
    open("hangs.is-ready", "a").write("x")
    if os.environ["HANGS"] == "stops" and os.path.getsize("hangs.is-ready") == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif os.environ["HANGS"] == "waits" and os.path.getsize("hangs.is-ready") == 1:
        time.sleep(3600)
    await stopped.wait()
stopped = asyncio.Event()
asyncio.run(serve())
"""
_CANNOT = "import sys\nprint('the port is wrong', flush=True)\nsys.exit(78)"
_ENDS = "print('oh no', flush=True)\nraise SystemExit(1)"


class _Run:
    def __init__(self, folder: Path, programs: dict[str, str]) -> None:
        for name, text in programs.items():
            (folder / f"{name}.py").write_text(text)
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, str(folder), *programs], stdout=subprocess.PIPE, text=True
        )

    def until(self, *words: str) -> str:
        """Return the next line that contains all of `words`."""
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if all(word in line for word in words):
                return line
        pytest.fail(f"{words} did not come; the output was:\n{''.join(seen)}")

    def rest(self) -> str:
        out, _ = self.process.communicate(timeout=20)
        return out

    def events(self) -> list[str]:
        return (self.folder / "events").read_text().splitlines()


def _pids(line: str) -> dict[str, int]:
    return {name: int(pid) for name, _, pid in (word.partition("=") for word in line.split() if "=" in word)}


def _ends(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(10_000))


def test_programs_stop_in_their_order(tmp_path: Path) -> None:
    run = _Run(tmp_path, {"first": _LIVES, "second": _LIVES})
    run.until("pids", "True")
    run.process.terminate()
    assert run.rest().endswith("done\n")
    assert [event for event in run.events() if "stops" in event] == ["first stops", "second stops"]


def test_a_process_that_dies_is_restarted(tmp_path: Path) -> None:
    run = _Run(tmp_path, {"first": _LIVES})
    old = _pids(run.until("pids", "True"))["first"]
    os.kill(old, signal.SIGKILL)
    restart = run.until("say")
    assert all(fact in restart for fact in ("first", "SIGKILL", " 0.1 s"))
    new = _pids(run.until("pids", "first="))["first"]
    assert new != old
    run.process.terminate()
    run.rest()


@pytest.mark.parametrize("how", ["stops", "waits"])
def test_a_process_that_hangs_is_ended_and_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("HANGS", how)
    monkeypatch.setenv("RUNNER_SILENCE_S", "3")
    run = _Run(tmp_path, {"hangs": _HANGS})
    old = _pids(run.until("pids", "hangs="))["hangs"]
    assert f"no heartbeat for 3 s (stack dump: {tmp_path}/logs/hangs.log)" in run.until("say hangs hangs")
    assert "hangs was killed by SIG" in run.until("say")
    assert _pids(run.until("pids", "hangs="))["hangs"] != old
    run.process.terminate()
    run.rest()
    if how == "waits":
        assert "in serve" in (tmp_path / "logs/hangs.log").read_text()  # the stack dump


def test_a_bus_that_hangs_is_ended_and_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAS_BUS", "yes")
    monkeypatch.setenv("RUNNER_SILENCE_S", "3")
    run = _Run(tmp_path, {"first": _LIVES})
    old = _pids(run.until("pids", "True"))["nats"]
    os.kill(old, signal.SIGSTOP)
    assert f"no heartbeat for 3 s (stack dump: {tmp_path}/nats.log)" in run.until("say nats hangs")
    run.until("say nats", "restarting in")
    assert _pids(run.until("pids", "nats="))["nats"] != old
    run.process.terminate()
    assert run.rest().endswith("done\n")
    assert "goroutine" in (tmp_path / "nats.log").read_text()  # the stack dump


def test_a_program_that_cannot_start_stops_everything_with_its_last_lines(tmp_path: Path) -> None:
    run = _Run(tmp_path, {"other": _LIVES, "bad": _CANNOT})
    failure = run.rest().partition("failed ")[2].splitlines()[0]
    assert "bad" in failure
    assert failure.endswith(": the port is wrong")


def test_a_program_that_ends_again_and_again_before_it_was_ready_stops_everything(tmp_path: Path) -> None:
    run = _Run(tmp_path, {"bad": _ENDS})
    output = run.rest()
    assert output.count("restarting in") == 2
    assert output.partition("failed bad")[2].partition(":\n")[2].startswith("oh no\noh no\noh no\n")


def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    run = _Run(tmp_path, {"first": _LIVES, "second": _LIVES})
    pidfds = [os.pidfd_open(pid) for pid in _pids(run.until("pids", "True")).values()]
    run.process.kill()
    assert [_ends(pidfd) for pidfd in pidfds] == [True, True]
    for pidfd in pidfds:
        os.close(pidfd)
    run.rest()


def test_nats_ends_with_a_supervisor_that_is_killed_after_its_helpers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAS_BUS", "yes")
    run = _Run(tmp_path, {"first": _LIVES})
    pids = _pids(run.until("pids", "True"))
    nats = os.pidfd_open(pids["nats"])
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
    for helper in set(map(int, children)) - set(pids.values()):
        os.kill(helper, signal.SIGKILL)
    run.process.kill()
    assert _ends(nats)
    os.close(nats)
    run.rest()


def test_a_log_that_has_grown_is_put_aside_at_a_start(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "first.log").write_bytes(b"x" * ((10 << 20) + 1))
    run = _Run(tmp_path, {"first": _LIVES})
    run.until("pids", "True")
    run.process.terminate()
    run.rest()
    assert (tmp_path / "logs" / "first.log.1").stat().st_size > 10 << 20
    assert (tmp_path / "logs" / "first.log").stat().st_size < 1000


def test_a_home_has_one_platform(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert Instance.running(home) is None
    with claimed(home):
        write_record(home, UpRecord(pid=os.getpid(), url="http://x", nats_url="nats://x", node="n"))
        found = Instance.running(home)
        assert found is not None
        assert found.record.url == "http://x"
        with pytest.raises(Conflict, match=rf"http://x \(pid {os.getpid()}\)"), claimed(home):
            pass
    assert Instance.running(home) is None
    assert not home.up_file.exists()
