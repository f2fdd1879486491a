"""An OpenID provider for tests: keys of its own, tokens of any content, the device flow, and the flow of browsers."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

CLIENT = "gpufn-cli"
_MAKE: dict[str, Callable[[], Any]] = {
    "RS256": lambda: rsa.generate_private_key(65537, 2048),
    "PS256": lambda: rsa.generate_private_key(65537, 2048),
    "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "ES384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate,
}
_JWK: dict[str, Callable[..., Any]] = {
    "RS256": jwt.algorithms.RSAAlgorithm.to_jwk,
    "PS256": jwt.algorithms.RSAAlgorithm.to_jwk,
    "ES256": jwt.algorithms.ECAlgorithm.to_jwk,
    "ES384": jwt.algorithms.ECAlgorithm.to_jwk,
    "EdDSA": jwt.algorithms.OKPAlgorithm.to_jwk,
}


class Key:
    def __init__(self, algorithm: str, id_: str) -> None:
        self.algorithm, self.id = algorithm, id_
        self.private = _MAKE[algorithm]()

    @property
    def public(self) -> dict[str, Any]:
        jwk: dict[str, Any] = _JWK[self.algorithm](self.private.public_key(), as_dict=True)
        return jwk | {"kid": self.id, "use": "sig", "alg": self.algorithm}


@dataclass
class StandInIssuer:
    """`replies[path]` replaces a document by (status, body). `polls` are the replies of the token endpoint to device
    codes; "" means success. `requests` are the paths that were requested."""

    url: str = ""
    keys: list[Key] = field(default_factory=lambda: [Key("ES256", "k1")])
    replies: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    polls: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    forms: list[dict[str, str]] = field(default_factory=list)
    subject: str = "alice"
    groups: tuple[str, ...] = ("devs",)
    codes: dict[str, dict[str, str]] = field(default_factory=dict)  # code → request for it
    claims: dict[str, Any] = field(default_factory=dict)  # override the claims of tokens for codes

    def token(self, key: Key | None = None, headers: dict[str, Any] | None = None, **claims: Any) -> str:
        """Sign a token. A claim of None is left out."""
        key = key or self.keys[0]
        now = int(time.time())
        own = {
            "iss": self.url, "aud": CLIENT, "sub": self.subject, "iat": now, "exp": now + 300,
            "groups": list(self.groups), "email": f"{self.subject}@example.org",
        } | claims  # fmt: skip
        payload = {name: value for name, value in own.items() if value is not None}
        return jwt.encode(payload, key.private, key.algorithm, {"kid": key.id} | (headers or {}))

    def reply(self, path: str, form: dict[str, str]) -> tuple[int, bytes]:
        self.requests.append(path)
        if path in self.replies:
            return self.replies[path]
        documents: dict[str, Callable[[], Any]] = {
            "/.well-known/openid-configuration": self._discovery,
            "/keys": lambda: {"keys": [key.public for key in self.keys]},
            "/device": self._device,
        }
        if path in documents:
            return 200, json.dumps(documents[path]()).encode()
        if path == "/token":
            self.forms.append(form)
            if form.get("grant_type") == "authorization_code":
                return self._redeem(form)
            error = self.polls.pop(0) if self.polls else ""
            if error:
                status = 401 if error == "authorization_pending" else 400  # as Dex does
                return status, json.dumps({"error": error}).encode()
            return 200, json.dumps({"id_token": self.token(), "refresh_token": "r1", "expires_in": 300}).encode()
        return 404, b""

    def authorize(self, url: str) -> str:
        """Approve a login in the browser. Return the address to which the browser is sent."""
        request = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(url).query))
        assert (request["response_type"], request["client_id"]) == ("code", CLIENT)
        code = f"c{len(self.codes)}"
        self.codes[code] = request
        return f"{request['redirect_uri']}?{urllib.parse.urlencode({'code': code, 'state': request['state']})}"

    def _redeem(self, form: dict[str, str]) -> tuple[int, bytes]:
        request = self.codes.pop(form["code"], None)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).rstrip(b"=")
        expected = {"redirect_uri": form["redirect_uri"], "code_challenge": challenge.decode()}
        expected["code_challenge_method"] = "S256"
        if request is None or not expected.items() <= request.items():
            return 400, json.dumps({"error": "invalid_grant"}).encode()
        token = self.token(**({"nonce": request["nonce"]} | self.claims))
        return 200, json.dumps({"id_token": token, "access_token": "a", "token_type": "Bearer"}).encode()

    def _discovery(self) -> dict[str, Any]:
        return {
            "issuer": self.url,
            "jwks_uri": f"{self.url}/keys",
            "device_authorization_endpoint": f"{self.url}/device",
            "token_endpoint": f"{self.url}/token",
            "authorization_endpoint": f"{self.url}/authorize",
            "scopes_supported": ["openid", "email", "groups", "offline_access", "phone"],
        }

    def _device(self) -> dict[str, Any]:
        return {
            "device_code": "d1", "user_code": "ABCD-EFGH", "verification_uri": f"{self.url}/verify",
            "verification_uri_complete": f"{self.url}/verify?code=ABCD-EFGH", "expires_in": 60, "interval": 0,
        }  # fmt: skip


@contextlib.contextmanager
def serving() -> Iterator[StandInIssuer]:
    issuer = StandInIssuer()

    class Handler(http.server.BaseHTTPRequestHandler):
        def _serve(self) -> None:
            if self.path.startswith("/authorize?"):
                self.send_response(302)
                self.send_header("location", issuer.authorize(self.path))
                self.send_header("content-length", "0")
                self.end_headers()
                return
            body = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
            status, reply = issuer.reply(self.path, dict(urllib.parse.parse_qsl(body)))
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client may have disconnected
                self.wfile.write(reply)

        do_GET = do_POST = _serve  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        issuer.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield issuer
        server.shutdown()
        thread.join()
