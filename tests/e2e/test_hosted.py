"""Code of other platforms, deployed as it is, and called through their clients."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from replicate.client import Client
from replicate.exceptions import ReplicateError

from tests.conftest import Platform
from tests.waiting import until

APPS = Path(__file__).parent / "apps"


def test_a_cog_project_runs_behind_replicates_client(platform: Platform) -> None:
    deployed = platform.try_gpufn("deploy", str(APPS / "cog_project"))
    assert deployed.returncode == 0, deployed.stderr
    assert "build.python_packages" in deployed.stderr
    client = Client(api_token="any", base_url=f"{platform.url}/replicate")
    try:
        fields = {"name": "Ada", "times": 2, "tone": "loud", "suffix": io.BytesIO(b"!")}
        file: Any = client.run("default/shouter", fields)
        assert file.read() == b"HELLO ADA HELLO ADA!"
        refused = []
        for wrong in ({"times": 9}, {"tone": "sad"}, {"other": 1}, {"name": "longer than ten"}):
            with pytest.raises(ReplicateError) as caught:
                client.run("default/shouter", {"name": "Ada", **wrong})
            refused.append(caught.value.status)
        assert refused == [422] * 4
    finally:
        client._client.close()


def test_items_of_a_generator_arrive_before_its_end(platform: Platform, tmp_path: Path) -> None:
    platform.gpufn("deploy", str(APPS / "gated.py"))
    client = Client(api_token="any", base_url=f"{platform.url}/replicate")
    try:
        events = client.stream("default/gated", input={"gate": str(tmp_path / "one")})
        assert next(events).data == "first"
        (tmp_path / "one").touch()
        assert [event.data for event in events] == ["second", "{}"]
    finally:
        client._client.close()
    job = platform.client.post("/v2/gated/run", json={"input": {"gate": str(tmp_path / "two")}}).json()["id"]

    def stream() -> list[str]:
        return [each["output"] for each in platform.client.get(f"/v2/gated/stream/{job}").json()["stream"]]

    assert until(stream) == ["first"]
    (tmp_path / "two").touch()
    assert until(stream) == ["second"]
    assert stream() == []


def test_a_runpod_handler_runs_behind_runpods_api(platform: Platform) -> None:
    deployed = platform.try_gpufn("deploy", "--as", "runpod", str(APPS / "runpod_handler.py"), "--name", "steps")
    assert deployed.returncode == 0, deployed.stderr
    done = platform.client.post("/v2/steps/runsync", json={"input": {"steps": 2}}).json()
    assert (done["status"], done["output"]) == ("COMPLETED", [{"step": 0}, {"step": 1}])
    failed = platform.client.post("/v2/steps/runsync", json={"input": {"steps": "two", "more": 1}}).json()
    assert (failed["status"], "more" in failed["error"]) == ("FAILED", True)
