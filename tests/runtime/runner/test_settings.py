from __future__ import annotations

import pytest

from gpufn_platform.process.settings import InvalidSetting
from gpufn_runtime.runner.settings import RunnerSettings

_ENVIRON = {"GPUFN_NATS_URL": "nats://host:4222", "GPUFN_NODE": "a"}


def test_two_workers_have_a_turn_on_a_gpu_by_default() -> None:
    assert RunnerSettings.from_env(_ENVIRON).turns_per_gpu == 2
    assert RunnerSettings.from_env(_ENVIRON | {"GPUFN_TURNS_PER_GPU": "1"}).turns_per_gpu == 1


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "49"])
def test_a_number_of_turns_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match="whole number from 1 to 48"):
        RunnerSettings.from_env(_ENVIRON | {"GPUFN_TURNS_PER_GPU": text})
