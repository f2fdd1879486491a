"""Machine with fakes of NVIDIA's programs on its PATH (see `programs/`), and methods to break it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpufn_runtime.agent.mps.control import Control
from tests.waiting import until

_PROGRAMS = Path(__file__).parent / "programs"


class PatientControl(Control):
    """Control with a long timeout for a busy machine, and a short one for a hanging daemon."""

    def __init__(self, machine: Machine, pipe: Path) -> None:
        super().__init__(pipe)
        self._machine, self._pipe = machine, pipe

    async def command(self, text: str) -> str:
        self._timeout_s = 0.3 if self._machine.state(self._pipe).get("hangs") else 30.0
        return await super().command(text)


class Machine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for program in _PROGRAMS.iterdir():
            # Without `env`, which may find Python slowly, and without imports that only slow down the start.
            _, _, text = program.read_text().partition("\n")
            (folder / program.name).write_text(f"#!{sys.executable} -ISE\n{text}")
            (folder / program.name).chmod(0o755)

    def set(self, **what: Any) -> None:
        """Set a fault. `broken`: a daemon ends at once. `slow`: a server stays INITIALIZING."""
        (self.folder / "machine.json").write_text(json.dumps(what))

    # --- one GPU's daemon, by its pipe directory ---

    def control(self, pipe: Path) -> Control:
        return PatientControl(self, pipe)

    def state(self, pipe: Path) -> dict[str, Any]:
        return _read(self._file(pipe))

    def server(self, pipe: Path) -> dict[str, Any]:
        """Return the newest daemon."""
        servers = self.state(pipe)["servers"]
        found: dict[str, Any] = servers[max(servers, key=int)]
        return found

    def clients(self, pipe: Path) -> list[int]:
        """Return the clients of all servers of the daemon, which starts its first server with its first client."""
        return [pid for server in self.state(pipe).get("servers", {}).values() for pid in server["clients"]]

    def connect(self, pipe: Path, *pids: int) -> None:
        """Make processes clients."""
        self._change(pipe, lambda state: _newest(state)["clients"].extend(pids))

    def fault(self, pipe: Path, *, sticky: bool = False) -> None:
        """Put the server in FAULT, as if by a client; `sticky`: permanently."""
        self._change(pipe, lambda state: (_newest(state).update(status="FAULT"), state.update(sticky=sticky)))

    def hang(self, pipe: Path, hangs: bool = True) -> None:
        self._change(pipe, lambda state: state.update(hangs=hangs))

    def kill_daemon(self, pipe: Path) -> None:
        pid = self.state(pipe)["daemon"]
        os.kill(pid, signal.SIGKILL)
        while _is_alive(pid):  # it takes a moment
            os.sched_yield()

    # --- compute modes ---

    @property
    def modes(self) -> dict[str, str]:
        file = self.folder / "modes.json"
        found: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def forbid_modes(self) -> None:
        (self.folder / "modes.json").write_text(json.dumps({"forbidden": True}))

    # --- at the end of a test ---

    def running(self) -> list[int]:
        """Return the daemons and servers that still run."""
        found = []
        for file in self.folder.glob("*.json"):
            state = _read(file)
            if "daemon" in state:
                found += [pid for pid in (state["daemon"], *map(int, state["servers"])) if _is_alive(pid)]
        return found

    def rests(self) -> bool:
        """Wait until nothing runs: killed processes need a moment to end. A process that stays fails the test."""
        until(lambda: not self.running(), self.running)
        return True

    def end(self) -> None:
        for pid in self.running():
            os.kill(pid, signal.SIGKILL)

    def _file(self, pipe: Path) -> Path:
        return self.folder / (str(pipe).replace("/", "_") + ".json")

    def _change(self, pipe: Path, what: Callable[[dict[str, Any]], object]) -> None:
        with self._file(pipe).open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            state = json.load(file)
            what(state)
            file.seek(0)
            file.truncate()
            json.dump(state, file)


def _read(path: Path) -> dict[str, Any]:
    """Read the state while it is not being written; it may not exist yet."""
    if not path.exists():
        return {}
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        found: dict[str, Any] = json.loads(file.read() or "{}")
        return found


def _newest(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state["servers"][max(state["servers"], key=int)]
    return found


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
