"""Signed deploys on a whole platform, with the CLI."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builder import models
from tests.conftest import Platform
from tests.waiting import until

pytestmark = pytest.mark.e2e

APP = """
from gpufn import gpu_function

@gpu_function(idle_timeout=600, max_workers=2)
def sealed_answer() -> int:
    return 42
"""


def test_an_environment_runs_only_code_that_a_trusted_key_signed(platform: Platform, tmp_path: Path) -> None:
    key, app, model = tmp_path / "ci.pem", tmp_path / "app.py", tmp_path / "sealed-model.onnx"
    app.write_text(APP)
    model.write_bytes(models.several_outputs().SerializeToString())
    platform.gpufn("signing", "keygen", "--out", key)
    platform.gpufn("signing", "trust", "ci", "--public-key", f"{key}.pub", "--for", "sealed/*")
    platform.gpufn("signing", "require", "sealed")
    try:
        unsigned = platform.try_gpufn("deploy", app, "--env", "sealed")
        assert (unsigned.returncode, "--sign" in unsigned.stderr) == (5, True)
        platform.gpufn("deploy", app, "--env", "sealed", "--sign", key)
        assert platform.invoke("sealed/default/sealed-answer") == 42
        platform.gpufn("deploy", model, "--env", "sealed", "--sign", key)

        platform.gpufn("signing", "rm", "ci", "--yes")
        platform.gpufn("scale", "sealed/default/sealed-answer", "--min", "2")

        def why() -> str:
            return platform.client.get("/v1/functions/sealed/default/sealed-answer/why").text

        until(lambda: "is not trusted for it" in why(), why)
        assert platform.invoke("sealed/default/sealed-answer") == 42
        listed = json.loads(platform.gpufn("signing", "ls", "--json"))
        assert ([each["name"] for each in listed["keys"]], listed["required"]) == ([], ["sealed"])
    finally:
        platform.gpufn("signing", "allow-unsigned", "sealed")
        for name in ("sealed-answer", "sealed-model"):
            platform.try_gpufn("rm", f"sealed/default/{name}", "--yes")
