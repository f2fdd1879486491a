"""A real OpenID provider on loopback: Glewlwyd, with one client and one user per group."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from tests.openid_provider import CLIENT, PASSWORD, free_port, named_by, running

_FOLDER = "GPUFN_TEST_GLEWLWYD"  # the folder into which .ci/glewlwyd has unpacked it
_CONFIG = """
port={port}
bind_address="127.0.0.1"
external_url="{url}"
login_url="login.html"
api_prefix="api"
log_mode="console"
log_level="WARNING"
cookie_domain="127.0.0.1"
cookie_secure=0
session_expiration=3600
session_key="s"
admin_session_authentication="cookie"
profile_session_authentication="cookie"
login_api_enabled=true
admin_scope="g_admin"
profile_scope="g_profile"
user_module_path="{modules}/user"
user_middleware_module_path="{empty}"
client_module_path="{modules}/client"
user_auth_scheme_module_path="{modules}/scheme"
plugin_module_path="{modules}/plugin"
hash_algorithm="SHA512"
database = {{ type = "sqlite3" path = "{database}" }};
"""


@dataclass
class Glewlwyd:
    url: str
    renews = False

    @property
    def issuer(self) -> str:
        return f"{self.url}/api/oidc"

    def setup(self, users: dict[str, str]) -> None:
        with httpx.Client(base_url=f"{self.url}/api", trust_env=False, timeout=10) as admin:
            _send(admin, "POST", "/auth/", {"username": "admin", "password": PASSWORD})
            _send(admin, "PUT", "/mod/user/database", _user_module(_send(admin, "GET", "/mod/user/database").json()))
            _send(admin, "PUT", "/mod/user/database/reset", {})
            _send(admin, "POST", "/mod/plugin/", _plugin(self.issuer))
            _send(admin, "POST", "/client/", _CLIENT_RECORD)
            for name, group in users.items():
                record = {"username": name, "password": PASSWORD, "email": f"{name}@example.org", "enabled": True}
                _send(admin, "POST", "/user/", record | {"scope": ["openid", "g_profile"], "groups": [group]})

    def approve(self, verification_url: str, user: str) -> None:
        with httpx.Client(base_url=f"{self.url}/api", trust_env=False, timeout=10) as browser:
            _send(browser, "POST", "/auth/", {"username": user, "password": PASSWORD})
            _send(browser, "PUT", f"/auth/grant/{CLIENT}/", {"scope": "openid"})
            shown = browser.get(f"{verification_url}&g_continue")
            assert shown.status_code == 302, shown.text
            assert "deviceComplete" in shown.headers["location"], shown.headers["location"]

    def allow_redirect(self, address: str) -> None:
        with httpx.Client(base_url=f"{self.url}/api", trust_env=False, timeout=10) as admin:
            _send(admin, "POST", "/auth/", {"username": "admin", "password": PASSWORD})
            _send(admin, "PUT", f"/client/{CLIENT}", _CLIENT_RECORD | {"redirect_uri": [address]})

    def log_in(self, url: str, user: str) -> str:
        with httpx.Client(base_url=f"{self.url}/api", trust_env=False, timeout=10) as browser:
            _send(browser, "POST", "/auth/", {"username": user, "password": PASSWORD})
            _send(browser, "PUT", f"/auth/grant/{CLIENT}/", {"scope": "openid"})
            shown = browser.get(f"{url}&g_continue")
            assert shown.status_code == 302, shown.text
            return shown.headers["location"]


def _send(client: httpx.Client, method: str, path: str, body: Any = None) -> httpx.Response:
    answer = client.request(method, path, json=body)
    assert answer.status_code == 200, (method, path, answer.status_code, answer.text)
    return answer


def _user_module(module: dict[str, Any]) -> dict[str, Any]:
    module["parameters"]["data-format"]["groups"] = {"multiple": True, "read": True, "write": True}
    return module


_CLIENT_RECORD = {
    "client_id": CLIENT, "name": CLIENT, "confidential": False, "enabled": True, "scope": ["openid"],
    "redirect_uri": [], "authorization_type": ["code", "device_code", "device_authorization", "refresh_token"],
    "token_endpoint_auth_method": ["none"],
}  # fmt: skip


def _plugin(issuer: str) -> dict[str, Any]:
    key = rsa.generate_private_key(65537, 2048)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    groups = {"name": "groups", "user-property": "groups", "type": "string", "mandatory": True, "scope": []}
    parameters = {
        "iss": issuer, "jwt-type": "rsa", "jwt-key-size": "256", "key": private, "cert": public,
        "access-token-duration": 3600, "refresh-token-duration": 86400, "code-duration": 600,
        "refresh-token-rolling": True,
        "allow-non-oidc": False, "subject-type": "public", "jwks-show": True,
        **{f"auth-type-{kind}-enabled": False for kind in ("token", "none", "password", "client")},
        "auth-type-code-enabled": True, "pkce-allowed": True, "pkce-method-plain-allowed": False, "pkce-required": True,
        "auth-type-implicit-enabled": False, "auth-type-device-enabled": True, "auth-type-refresh-enabled": True,
        "device-authorization-expiration": 60, "device-authorization-interval": 1,
        "scope": [], "additional-parameters": [], "claims": [groups], "name-claim": "mandatory",
        "email-claim": "mandatory", "scope-claim": "no", "allowed-scope": ["openid"],
        "address-claim": {"type": "no"},
    }  # fmt: skip
    return {"module": "oidc", "name": "oidc", "display_name": "oidc", "parameters": parameters, "enabled": True}


@contextlib.contextmanager
def serving(folder: Path, users: dict[str, str]) -> Iterator[Glewlwyd]:
    """Run the provider. `users`: the group of each user."""
    root = named_by(_FOLDER)
    schema = (root / "usr/share/dbconfig-common/data/glewlwyd/install/sqlite3").read_text()
    with contextlib.closing(sqlite3.connect(folder / "glewlwyd.db")) as database:
        database.executescript(schema)
    port = free_port()
    url, modules = f"http://127.0.0.1:{port}", root / "usr/lib/glewlwyd"
    config = folder / "glewlwyd.conf"
    config.write_text(
        _CONFIG.format(port=port, url=url, modules=modules, empty=folder / "none", database=folder / "glewlwyd.db")
    )
    (folder / "none").mkdir()
    command = [str(root / "usr/bin/glewlwyd"), f"--config-file={config}"]
    environ = {"LD_LIBRARY_PATH": ":".join(map(str, (root / "usr/lib").glob("*-linux-gnu")))}
    with running(command, folder / "glewlwyd.log", f"{url}/config", environ):
        provider = Glewlwyd(url)
        provider.setup(users)
        yield provider
