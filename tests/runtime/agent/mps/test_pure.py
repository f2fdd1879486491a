"""Conditions of a daemon, environment of a client, and attribution of faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufn_core.domain.devices.device import DeviceShare, Share
from gpufn_core.domain.invocation import DELIVERIES_ON_FAILED_GPUS
from gpufn_core.spec.priority import Priority
from gpufn_runtime.agent.mps.client import client_environment
from gpufn_runtime.agent.mps.condition import Condition, Observation, Server, condition_of
from gpufn_runtime.agent.mps.fault_attribution import FORGOTTEN_S, Suspects

OWN = 1000


@pytest.mark.parametrize(
    ("seen", "condition"),
    [
        (Observation(is_alive=False), Condition.DOWN),
        (Observation(is_alive=True), Condition.HUNG),
        (Observation(is_alive=True, answers=True), Condition.STARTING),
        (Observation(True, True, (Server(1, "INITIALIZING", OWN),)), Condition.STARTING),
        (Observation(True, True, (Server(1, "ACTIVE", OWN),)), Condition.ACTIVE),
        (Observation(True, True, (Server(1, "FAULT", OWN),)), Condition.FAULT),
        (Observation(True, True, (Server(1, "ACTIVE", OWN), Server(2, "FAULT", OWN))), Condition.FAULT),
        (Observation(True, True, (Server(1, "ACTIVE", 0),)), Condition.FOREIGN),
        (Observation(True, True, (Server(1, "ACTIVE", None),)), Condition.ACTIVE),  # it has ended in the meantime
        (Observation(True, True, (Server(1, "WHATEVER", OWN),)), Condition.STARTING),
    ],
)
def test_the_meaning_of_the_answers(seen: Observation, condition: Condition) -> None:
    assert condition_of(seen, OWN) is condition


@pytest.mark.parametrize(
    ("sm_percent", "vram_bytes", "limits"),
    [(100, 6 << 30, {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=6144M"}),
     (25, (1 << 30) + 5, {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1024M", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"})],
)  # fmt: skip
def test_a_client_is_held_by_its_environment(sm_percent: int, vram_bytes: int, limits: dict[str, str]) -> None:
    share = DeviceShare("cpu", 0.1, 1, ("GPU-1",), Share.MPS, vram_bytes, sm_percent)
    assert client_environment(share, Path("/run/p"), Priority.NORMAL) == {"CUDA_MPS_PIPE_DIRECTORY": "/run/p", **limits}


@pytest.mark.parametrize(("priority", "level"), [(Priority.HI, None), (Priority.NORMAL, None), (Priority.LOW, "1")])
def test_clients_of_low_functions_have_the_lower_of_two_priorities(priority: Priority, level: str | None) -> None:
    share = DeviceShare("cpu", 0.1, 1, ("GPU-1",), Share.MPS, 1 << 30)
    assert client_environment(share, Path("/run/p"), priority).get("CUDA_MPS_CLIENT_PRIORITY") == level


def _after(*incidents: str, every_s: float = 1.0) -> set[str]:
    suspects = Suspects()
    for number, tenants in enumerate(incidents):
        suspects.record("GPU-1", [(name, 1) for name in tenants], number * every_s)
    return {name for name, _ in suspects.quarantined}


@pytest.mark.parametrize(
    ("incidents", "quarantined"),
    [
        (["f"] * DELIVERIES_ON_FAILED_GPUS, set()),  # one call may have caused all of them
        (["f", "f", "f", "f"], {"f"}),
        (["fg", "fh", "fi", "fj"], {"f"}),
        (["fg", "gh", "hf", "fg"], set()),
        (["fg", "fg", "fg", "fg"], {"f", "g"}),  # they cannot be distinguished
        (["f", "f", "g", "f", "f", "f", "f"], {"f"}),
    ],
)
def test_a_revision_present_at_each_fault_is_quarantined(incidents: list[str], quarantined: set[str]) -> None:
    assert _after(*incidents) == quarantined


def test_incidents_are_forgotten_and_gpus_are_apart() -> None:
    assert _after("f", "f", "f", "f", every_s=FORGOTTEN_S) == set()
    suspects = Suspects()
    for gpu in ("GPU-1", "GPU-2", "GPU-3", "GPU-4"):
        suspects.record(gpu, [("f", 1)], 0.0)
    assert suspects.quarantined == set()
