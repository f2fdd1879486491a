"""Faults of the platform's processes: kill -9, and SIGSTOP for a while, at random from a seed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpufn_core.home import Home

_LONGEST_STOP_S = 20.0

Pids = Callable[[], list[int]]


def of_up(home: Path, name: str) -> Pids:
    """The process `name` of `gpufn up`, from up.json; no process while it starts."""

    def pids() -> list[int]:
        try:
            return [json.loads((home / "up.json").read_bytes())["pids"][name]]
        except (OSError, KeyError, ValueError):
            return []

    return pids


def workers(home: Path) -> Pids:
    """Loaded workers: their working folder is their bundle."""
    return lambda: pids_inside(Home(home).bundles)


def pids_inside(*folders: Path) -> list[int]:
    """Return the processes whose working folder is one of these folders or below one of them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                folder = (entry / "cwd").readlink()
                if any(folder.is_relative_to(above) for above in folders):
                    found.append(int(entry.name))
    return found


def terminate(pids: list[int]) -> None:
    """Send SIGTERM to all processes of a node at once, as systemd does."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


@dataclass
class Victim:
    """The target of a fault.

    Each fault calls `pids` and signals one of these processes. `revive` receives its pid after a kill. If `act` is set,
    the fault calls it with all pids instead.
    """

    pids: Pids
    weight: int = 1
    revive: Callable[[int], None] | None = None
    act: Callable[[list[int]], None] | None = None


@dataclass
class Faults:
    """Random faults, caused in the caller's thread."""

    victims: Mapping[str, Victim]
    seed: int
    done: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)
    # When nats-servers were killed, and stopped before that, in unix seconds.
    bus_killed_at: list[float] = field(default_factory=list)
    _bus_stopped_at: dict[int, float] = field(default_factory=dict)  # by pid

    def run(self, for_s: float) -> None:
        """Cause faults, and return when all processes run again or are starting.

        The longest stop grows with `for_s`: in long runs, processes stop for longer than leases and deliveries last.
        """
        dice, longest_s = random.Random(self.seed), min(for_s / 4, _LONGEST_STOP_S)
        end, resumers = time.monotonic() + for_s, []
        names = list(self.victims)
        weights = [self.victims[name].weight for name in names]
        while time.monotonic() < end:
            time.sleep(dice.uniform(0.1, 0.9))
            [name] = dice.choices(names, weights)
            is_kill, pick = dice.random() < 0.6, dice.random()
            stop_s = dice.triangular(0.1, longest_s, 0.5)
            victim = self.victims[name]
            pids = victim.pids()
            if not pids:
                continue
            if victim.act is not None:
                self._act(name, victim.act, pids)
                continue
            pid = sorted(pids)[int(pick * len(pids))]
            if is_kill:
                self._hit(f"kill {name}", pid, signal.SIGKILL)
                if victim.revive is not None:
                    victim.revive(pid)
            elif self._hit(f"stop {name}", pid, signal.SIGSTOP):
                resumer = threading.Timer(stop_s, self._signal, (pid, signal.SIGCONT))
                resumer.start()
                resumers.append(resumer)
        for resumer in resumers:
            resumer.join()
        for name, victim in self.victims.items():  # a short run may not have picked them
            if victim.act is not None and not self.done[name] and (pids := victim.pids()):
                self._act(name, victim.act, pids)

    def _act(self, name: str, act: Callable[[list[int]], None], pids: list[int]) -> None:
        self.done[name] += 1
        self.log.append(f"{time.monotonic():.2f} {name} {pids}")
        act(pids)

    def _hit(self, what: str, pid: int, number: signal.Signals) -> bool:
        if not self._signal(pid, number):
            return False
        self.done[what] += 1
        self.log.append(f"{time.monotonic():.2f} {what} ({pid})")
        if what == "stop nats":
            self._bus_stopped_at[pid] = time.time()
        elif what == "kill nats":
            self.bus_killed_at += [time.time(), self._bus_stopped_at.get(pid, 0.0)]
        return True

    @staticmethod
    def _signal(pid: int, number: signal.Signals) -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False
