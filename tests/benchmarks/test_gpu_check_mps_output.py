"""The verbatim output of MPS, with fake programs and a fake libcuda."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_check import mps_client, mps_session
from gpu_check.checks import mps_memory, mps_output
from gpu_check.machine import Gpu, Machine
from measure import descendants
from tests.conftest import ROOT
from tests.runtime.agent.mps.machine import Machine as Programs

GPU = Gpu("GPU-1", "NVIDIA X", 24 << 30, "9.0")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    played = Programs(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{played.folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", ":".join(map(str, [ROOT / "tests/e2e/gpu_stand_in", ROOT])))
    monkeypatch.setenv("PLAYED_MPS_CONTROL", f"{played.folder}/nvidia-cuda-mps-control")
    monkeypatch.setattr(mps_output, "_PERCENT", (50,))
    monkeypatch.setattr(mps_output, "_LIMITS", ("0=2048M",))
    yield played
    played.end()


def machine(programs: Programs) -> Machine:
    return Machine(gpus=(GPU,), programs={"nvidia-cuda-mps-control": str(programs.folder)})


def test_commands_and_answers_of_mps_are_kept_word_by_word(programs: Programs) -> None:
    found = mps_output.mps_output(machine(programs))
    assert found.wrong == []
    assert list(map(list, found.tables[0].rows)) == [
        ["PINNED_DEVICE_MEM_LIMIT 0=2048M", True, 58, 2048, False],
        ["ACTIVE_THREAD_PERCENTAGE 50", True, 30, 24 << 10, True],
    ]
    said = {asked.partition(": ")[2]: answer for asked, answer in found.said.items()}
    assert "\n[exit code 0" in next(answer for asked, answer in said.items() if asked.startswith("get_client_list"))
    assert "Unknown command" in said["ps"]
    assert "cuModuleLoadData" in said["a fault"]  # which the fake library lacks
    assert said["control.log"] == "Start\n"
    assert programs.rests()


def test_the_message_of_the_daemon_is_kept_if_no_server_starts(programs: Programs) -> None:
    programs.set(broken=True)
    found = mps_output.mps_output(machine(programs))
    assert len(found.wrong) == 1
    assert "ACTIVE" in found.wrong[0]
    assert "library do not match" in "".join(found.said.values())
    assert programs.rests()


def test_the_clients_whose_memory_is_compared_end_before_the_daemon_quits(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon with connected clients waits for them: the step took 20 s longer."""
    send, clients_at_quit = mps_session.ControlSession.send, list[str]()

    def spy(session: mps_session.ControlSession, command: str, when: str = "") -> str:
        if command == "quit":
            commands = (Path(f"/proc/{pid}/cmdline").read_text() for pid in descendants(os.getpid()))
            clients_at_quit.extend(each for each in commands if str(mps_client.__file__) in each)
        return send(session, command, when)

    monkeypatch.setattr(mps_session.ControlSession, "send", spy)
    found = mps_memory.mps_memory(machine(programs))
    assert len(found.tables[0].rows) == 2
    assert clients_at_quit == []
    assert programs.rests()
