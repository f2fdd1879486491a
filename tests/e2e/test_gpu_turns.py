"""Functions that take turns on one GPU, which is declared but does not exist. A call that waits reports its turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import running_platform
from tests.waiting import until

pytestmark = pytest.mark.e2e

GPUS = [{"uuid": "GPU-0", "type": "gpu", "kind": "NVIDIA L4", "memory_bytes": 24 << 30}]
APP = """
import os, time
from gpufn import gpu_function

@gpu_function(gpu="any", share="time", max_workers=1)
def lasting(mark: str) -> str:
    while not os.path.exists(mark):
        time.sleep(0.01)
    return "done"

@gpu_function(gpu="any", share="time", max_workers=1)
def short() -> str:
    return "done"
"""


def test_a_call_waits_for_the_turn_of_another_function_and_reports_it(tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(APP)
    environ = {"GPUFN_DEVICES": json.dumps(GPUS), "GPUFN_TURNS_PER_GPU": "1"}
    with running_platform(tmp_path / "home", environ=environ) as platform:
        platform.gpufn("deploy", app)
        assert platform.invoke("short") == "done"

        # HTTP, because commands are too slow: the turn passes to the next function after 10 s.
        def get(path: str) -> Any:
            return platform.client.get(path).json()

        def submit(function: str, **arguments: str) -> str:
            return str(platform.client.post(f"/v1/functions/{function}/submit", json=arguments).json()["id"])

        mark = tmp_path / "mark"
        calls = [submit("lasting", mark=str(mark))]
        until(lambda: get(f"/v1/invocations/{calls[0]}")["state"] == "running")
        calls.append(submit("short"))
        status = until(lambda: (found := get(f"/v1/invocations/{calls[1]}"))["waiting"]["reason"] == "turn" and found)
        assert (status["state"], status["waiting"]["detail"]) == ("queued", "it waits for its turn on GPU-0")
        why = until(lambda: get("/v1/functions/short/why")["waiting"])
        assert (why["reason"], why["detail"]) == ("turn", "waits for its turn on GPU-0")
        mark.touch()
        for call in calls:
            assert json.loads(platform.gpufn("result", call, "--wait")) == "done"
