"""`gpufn login` at a running platform, with real OpenID providers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpufn_core.home import Home
from tests import dex, glewlwyd
from tests.conftest import ROOT, Platform, running_platform
from tests.openid_provider import CLIENT, Provider

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

    def log_in(self, provider: Provider) -> None:
        with self.logging_in() as (process, url):
            provider.approve(url, self.name)
            assert process.wait(60) == 0

    @contextmanager
    def logging_in(self) -> Iterator[tuple[subprocess.Popen[str], str]]:
        """Start a login. Yield its process, and the address at which the user approves it."""
        command = [sys.executable, "-m", "gpufn", "login"]
        with subprocess.Popen(command, env=self._environ, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            first = process.stderr.readline()
            shown = re.search(r"https?://\S+", first)
            assert shown is not None, first
            try:
                yield process, shown[0]
            finally:
                process.kill()

    def stored_login(self) -> Any:
        (login,) = json.loads(Home(self.home).logins_file.read_text())["logins"].values()
        return login

    def let_token_expire(self) -> None:
        """Make the stored token look expired."""
        path = Home(self.home).logins_file
        file = json.loads(path.read_text())
        for login in file["logins"].values():
            login["expires_at"] = 0.0
        path.write_text(json.dumps(file))


def log_in_to_the_console(platform: Platform, provider: Provider, user: str) -> dict[str, Any]:
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


def settings_for(provider: Provider, folder: Path) -> dict[str, str]:
    (folder / "roles.toml").write_text(ROLES)
    return {
        "GPUFN_OIDC_ISSUER": provider.issuer,
        "GPUFN_OIDC_CLIENT_ID": CLIENT,
        "GPUFN_OIDC_ROLES": str(folder / "roles.toml"),
    }


@pytest.mark.parametrize("serving", [glewlwyd.serving, dex.serving], ids=["glewlwyd", "dex"])
def test_users_log_in_with_a_real_provider(
    serving: Callable[[Path, dict[str, str]], AbstractContextManager[Provider]], tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(APP)
    users = {"alice": "devs", "olga": "ops"}
    with (
        serving(tmp_path, users) as provider,
        running_platform(tmp_path / "home", environ=settings_for(provider, tmp_path)) as platform,
    ):
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
        before = alice.stored_login()
        alice.let_token_expire()
        renewed = alice.gpufn("whoami", "--json")
        assert renewed.returncode == (0 if provider.renews else 5), renewed.stderr
        if provider.renews:
            assert (json.loads(renewed.stdout)["id"], alice.gpufn("whoami").returncode) == (me["id"], 0)
            after = alice.stored_login()
            assert all(after[each] != before[each] for each in ("token", "refresh_token"))
        else:
            alice.log_in(provider)
        assert olga.gpufn("users", "revoke", me["id"]).returncode == 0
        assert alice.gpufn("whoami").returncode == 5
        assert olga.gpufn("logout").returncode == 0
        assert olga.gpufn("whoami").returncode == 5


def test_a_denied_login_ends_with_its_code(tmp_path: Path) -> None:
    """Dex reports a denial only to the browser."""
    with (
        dex.serving(tmp_path, {"alice": "devs"}, codes_valid_for="6s") as provider,
        running_platform(tmp_path / "home", environ=settings_for(provider, tmp_path)) as platform,
    ):
        alice = User("alice", platform, tmp_path / "home-alice")
        with alice.logging_in() as (process, url):
            provider.deny(url, "alice")
            assert process.wait(60) == 1
        assert not Home(alice.home).logins_file.exists()
