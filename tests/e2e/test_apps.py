"""Apps and environments on a whole platform: deploy, calls from one function to another, prune, rollback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Platform

pytestmark = pytest.mark.e2e

SEARCH = """
from gpufn import App

app = App("search")

@app.function(max_workers=1)
def predict(query: str) -> str:
    return "VERSION " + embed.remote(query)

@app.function(max_workers=1)
def embed(query: str) -> str:
    return "search " + query

@app.function(max_workers=1)
def many() -> list[str]:
    return list(embed.map(["a", "b"]))
"""
ADS = SEARCH.replace('"search"', '"ads"').replace("search ", "ads ")


def test_two_apps_in_two_environments(platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: tmp_path / f"{name}.py" for name in ("search", "ads")}
    for file, source, env, version in (
        ("search", SEARCH, "prod", "one"),
        ("search", SEARCH, "dev", "two"),
        ("ads", ADS, "prod", "one"),
    ):
        files[file].write_text(source.replace("VERSION", version))
        platform.gpufn("deploy", files[file], "--env", env)

    # A function calls its own app in its own environment.
    query = {"query": "x"}
    assert platform.invoke("prod/search/predict", query) == "one search x"
    assert platform.invoke("dev/search/predict", query) == "two search x"
    assert platform.invoke("-/ads/predict", query) == "one ads x"
    assert platform.invoke("prod/ads/many") == ["ads a", "ads b"]
    assert platform.post("predict", query).json()["code"] == "function_ambiguous"
    with monkeypatch.context() as patch:
        patch.setenv("GPUFN_ENV", "dev")
        assert platform.gpufn("invoke", "search/predict", '{"query": "x"}') == '"two search x"\n'
        assert platform.gpufn("invoke", "many") == '["search a","search b"]\n'

    # The file loses a function; the other environment keeps it.
    shorter = SEARCH.replace("VERSION", "three").partition("@app.function(max_workers=1)\ndef many")[0]
    files["search"].write_text(shorter)
    kept = platform.try_gpufn("deploy", files["search"], "--env", "prod")
    assert "prod/search/many" in kept.stderr
    assert platform.invoke("prod/search/many") == ["search a", "search b"]
    platform.gpufn("deploy", files["search"], "--env", "prod", "--prune")
    functions = platform.client.get("/v1/functions").json()["functions"]
    names = {each["name"] for each in functions if each["name"].startswith(("prod/", "dev/"))}
    assert names == {
        *(f"prod/search/{each}" for each in ("predict", "embed")),
        *(f"dev/search/{each}" for each in ("predict", "embed", "many")),
        *(f"prod/ads/{each}" for each in ("predict", "embed", "many")),
    }
    assert platform.invoke("prod/search/predict", query) == "three search x"
    platform.gpufn("apps", "rollback", "prod/search")
    assert platform.invoke("prod/search/predict", query) == "one search x"
    for name in names:
        platform.gpufn("rm", name, "--yes")
