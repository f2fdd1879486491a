"""Detection of GPU features, with fakes of NVIDIA's programs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpufn_core.domain.devices.device import MpsLevel, NodeFacts
from gpufn_runtime.agent.devices.facts import has_own_pids, node_facts
from tests.runtime.agent.mps.machine import Machine

NO_FACTS = NodeFacts(has_own_pids=has_own_pids())
V3 = "usage: ...\nmodules:\n  server\n  namespace\n"


@pytest.fixture(autouse=True)
def only_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.mark.parametrize(
    ("help_text", "capacity", "level"),
    [
        ("usage: nvidia-cuda-mps-control [-d | -f]", "", MpsLevel.V2),
        ("server", "", MpsLevel.V2),
        (V3, "", MpsLevel.V3),
        (V3, "nvidia/0000:01:00.0/vidmem 85899345920\n", MpsLevel.V3_MEMORY),
    ],
)
def test_a_level_is_the_output_of_the_program(
    help_text: str, capacity: str, level: MpsLevel, machine: Machine, tmp_path: Path
) -> None:
    machine.set(v3_help=help_text)
    file = tmp_path / "dmem.capacity"
    if capacity:
        file.write_text(capacity)
    assert node_facts(True, file) == msgspec.structs.replace(NO_FACTS, mps=level)


def test_without_the_program_there_is_no_mps_and_without_gpus_it_is_not_run(machine: Machine) -> None:
    assert node_facts(False) == NodeFacts()
    (machine.folder / "nvidia-cuda-mps-control").unlink()
    assert node_facts(True) == NO_FACTS


@pytest.mark.parametrize(("namespace", "is_own"), [("pid:[4026531836]", False), ("pid:[4026532201]", True)])
def test_an_agent_in_a_container_may_have_pids_of_its_own(tmp_path: Path, namespace: str, is_own: bool) -> None:
    (tmp_path / "pid").symlink_to(namespace)
    assert has_own_pids(tmp_path / "pid") is is_own
