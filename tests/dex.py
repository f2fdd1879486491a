"""A real OpenID provider on loopback: Dex, with users of its own, each with one group."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.openid_provider import CLIENT, PASSWORD, free_port, named_by, running

_PROGRAM = "GPUFN_TEST_DEX"  # the path of the program `dex`
_HASH = "$2b$10$SInR.pbKijOI/ppstuHkLeKAhma//GU0TwvE6uANw/vyN4oeLDZoa"  # bcrypt of PASSWORD


@dataclass
class Dex:
    issuer: str
    renews = True

    def approve(self, verification_url: str, user: str) -> None:
        with self._browser() as browser:
            asked = self._ask_for_approval(browser, self._enter_code(browser, verification_url), user)
            approved = _answer(browser, asked, "approve")
            assert approved.status_code == 200, approved.text
            assert approved.url.path.endswith("/device/callback"), approved.url

    def deny(self, verification_url: str, user: str) -> None:
        with self._browser() as browser:
            asked = self._ask_for_approval(browser, self._enter_code(browser, verification_url), user)
            assert "rejected" in _answer(browser, asked, "rejected").text

    def allow_redirect(self, address: str) -> None:
        """Do nothing: public clients without addresses of their own may use any address on loopback."""

    def log_in(self, url: str, user: str) -> str:
        with self._browser() as browser:
            approved = _answer(browser, self._ask_for_approval(browser, browser.get(url), user), "approve")
            assert approved.next_request is not None, approved.text
            return str(approved.next_request.url)

    def _browser(self) -> httpx.Client:
        return httpx.Client(base_url=self.issuer, trust_env=False, timeout=10)

    def _enter_code(self, browser: httpx.Client, verification_url: str) -> httpx.Response:
        shown = httpx.URL(verification_url)
        assert shown.params["user_code"] in browser.get(shown).text
        return browser.post("/device/auth/verify_code", data={"user_code": shown.params["user_code"]})

    def _ask_for_approval(self, browser: httpx.Client, response: httpx.Response, user: str) -> httpx.Response:
        """Log in. Return the page that asks for approval."""
        form = _followed(browser, response)
        login = browser.post(form.url, data={"login": f"{user}@example.org", "password": PASSWORD})
        return _followed(browser, login)


def _answer(browser: httpx.Client, asked: httpx.Response, approval: str) -> httpx.Response:
    assert asked.url.path.endswith("/approval"), asked.text
    data = {"req": asked.url.params["req"], "approval": approval}
    return _followed(browser, browser.post(asked.url, data=data))


def _followed(browser: httpx.Client, response: httpx.Response) -> httpx.Response:
    """Follow redirects as long as they stay at the provider."""
    while response.next_request is not None and response.next_request.url.netloc == browser.base_url.netloc:
        response = browser.send(response.next_request)
    return response


@contextlib.contextmanager
def serving(folder: Path, users: dict[str, str], *, codes_valid_for: str = "60s") -> Iterator[Dex]:
    """Run the provider. `users`: the group of each user."""
    program, address = named_by(_PROGRAM), f"127.0.0.1:{free_port()}"
    issuer = f"http://{address}/dex"
    config = {
        "issuer": issuer,
        "storage": {"type": "memory"},
        "web": {"http": address},
        "expiry": {"deviceRequests": codes_valid_for},
        "staticClients": [{"id": CLIENT, "name": CLIENT, "public": True}],
        "enablePasswordDB": True,
        "staticPasswords": [
            {"email": f"{name}@example.org", "username": name, "userID": name, "hash": _HASH, "groups": [group]}
            for name, group in users.items()
        ],
    }
    (folder / "dex.yaml").write_text(json.dumps(config))  # JSON is YAML
    with running([str(program), "serve", str(folder / "dex.yaml")], folder / "dex.log", f"{issuer}/healthz"):
        yield Dex(issuer)
