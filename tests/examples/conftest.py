"""Each example is deployed to a running platform and called as its README says."""

from __future__ import annotations

from importlib.util import find_spec

from tests.conftest import ROOT, Platform, missing


def deploy(platform: Platform, example: str, *needs: str) -> None:
    for module in needs:
        if find_spec(module) is None:
            missing(f"{module} is not installed: see examples/{example}/README.md")
    platform.gpufn("deploy", ROOT / "examples" / example / "app.py")
