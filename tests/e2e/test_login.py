"""`gpufn login` at a running platform, with a real OpenID provider."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import glewlwyd
from tests.conftest import ROOT, Platform, running_platform

pytestmark = pytest.mark.e2e

CONSOLE = ROOT / "gateway" / "gpufn_gateway" / "console" / "assets" / "index.html"  # built by scripts/console
ROLES = """
[groups]
devs = ["invoke:*"]
ops = ["admin"]
"""
APP = """
import gpufn

@gpufn.gpu_function
def greet(name: str) -> str:
    return f"hello {name}"
"""


class User:
    """A person with a home folder of their own."""

    def __init__(self, name: str, platform: Platform, home: Path) -> None:
        self.name, self.home = name, home
        self._environ = {**os.environ, "GPUFN_URL": platform.url, "GPUFN_HOME": str(home)}

    def gpufn(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gpufn", *arguments]
        return subprocess.run(command, env=self._environ, capture_output=True, text=True, timeout=60, check=False)

    def log_in(self, provider: glewlwyd.Glewlwyd) -> None:
        command = [sys.executable, "-m", "gpufn", "login"]
        with subprocess.Popen(command, env=self._environ, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            shown = re.search(r"https?://\S+", process.stderr.readline())
            assert shown is not None
            provider.approve(shown[0], self.name)
            assert process.wait(60) == 0, process.stderr.read()


def log_in_to_the_console(platform: Platform, provider: glewlwyd.Glewlwyd, user: str) -> dict[str, Any]:
    """Log in as a browser does. Return the principal of the session."""
    provider.allow_redirect(f"{platform.url}/console/login/callback")
    navigation = {"sec-fetch-dest": "document", "sec-fetch-mode": "navigate", "sec-fetch-site": "none"}
    with httpx.Client(base_url=platform.url, trust_env=False, timeout=10) as browser:

        def page() -> dict[str, str]:
            found = re.search(r'gpufn-page-token" content="(.*?)"', browser.get("/console", headers=navigation).text)
            assert found is not None
            return {"x-gpufn-page": found[1], "sec-fetch-site": "same-origin"}

        url = browser.post("/console/login", json={"next": "/console/calls"}, headers=page()).json()["url"]
        returned = browser.get(provider.log_in(url, user), headers=navigation | {"sec-fetch-site": "cross-site"})
        assert (returned.status_code, returned.headers["location"]) == (303, "/console/calls")
        me: dict[str, Any] = browser.get("/console/api/v1/auth/me", headers=page()).json()
        return me


def test_users_log_in_with_a_real_provider(tmp_path: Path) -> None:
    (tmp_path / "roles.toml").write_text(ROLES)
    (tmp_path / "app.py").write_text(APP)
    users = {"alice": "devs", "olga": "ops"}
    with glewlwyd.serving(tmp_path, users) as provider:
        settings = {
            "GPUFN_OIDC_ISSUER": provider.issuer,
            "GPUFN_OIDC_CLIENT_ID": glewlwyd.CLIENT,
            "GPUFN_OIDC_ROLES": str(tmp_path / "roles.toml"),
        }
        with running_platform(tmp_path / "home", environ=settings) as platform:
            platform.gpufn("deploy", str(tmp_path / "app.py"))
            platform.gpufn("keys", "create", "--scope", "admin")
            alice, olga = (User(name, platform, tmp_path / f"home-{name}") for name in users)
            assert alice.gpufn("invoke", "greet", '{"name": "x"}').returncode == 5
            alice.log_in(provider)
            olga.log_in(provider)
            me = json.loads(alice.gpufn("whoami", "--json").stdout)
            assert (me["name"], me["scopes"]) == ("alice@example.org", ["invoke:*"])
            assert alice.gpufn("invoke", "greet", '{"name": "x"}').stdout.strip() == '"hello x"'
            submitted = alice.gpufn("submit", "greet", '{"name": "y"}').stdout.strip()
            assert alice.gpufn("result", submitted).stdout.strip() == '"hello y"'
            assert alice.gpufn("keys", "ls").returncode == 5
            assert me["id"] in olga.gpufn("users", "ls", "--json").stdout
            if CONSOLE.is_file():
                session = log_in_to_the_console(platform, provider, "alice")
                assert (session["id"], session["scopes"]) == (me["id"], ["invoke:*"])
            assert olga.gpufn("users", "revoke", me["id"]).returncode == 0
            assert alice.gpufn("whoami").returncode == 5
