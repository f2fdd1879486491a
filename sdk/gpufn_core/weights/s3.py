"""URLs of an S3 store and signatures of requests (AWS Signature Version 4), from the variables of AWS. Pure.

Requests are signed in their headers. Without credentials, requests are not signed, as public buckets expect.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, quote, urlsplit

from gpufn_core.weights.credentials import header_value

_NO_BODY = hashlib.sha256(b"").hexdigest()
_UNRESERVED = "-_.~"
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


@dataclass(frozen=True)
class Bucket:
    """A bucket, as reached with:

    AWS_ENDPOINT_URL       the address of a store other than AWS's; AWS_ENDPOINT_URL_S3 comes first
    AWS_REGION             the region; AWS_DEFAULT_REGION is the second choice. Default: us-east-1
    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN
    """

    name: str
    url: str
    region: str
    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)

    @classmethod
    def from_env(cls, bucket: str, environ: Mapping[str, str]) -> Bucket:
        """Raises ArtifactUnavailable if a key is none."""
        region = header_value(environ, "AWS_REGION", header_value(environ, "AWS_DEFAULT_REGION", "us-east-1"))
        endpoint = (environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or "").rstrip("/")
        # A dot in the bucket's name would not fit the certificate of its host.
        host = (
            f"https://s3.{region}.amazonaws.com/{bucket}"
            if "." in bucket
            else f"https://{bucket}.s3.{region}.amazonaws.com"
        )
        return cls(
            bucket,
            f"{endpoint}/{bucket}" if endpoint else host,
            region,
            header_value(environ, "AWS_ACCESS_KEY_ID"),
            header_value(environ, "AWS_SECRET_ACCESS_KEY"),
            header_value(environ, "AWS_SESSION_TOKEN"),
        )

    def object_url(self, key: str) -> str:
        return f"{self.url}/{quote(key, safe=f'/{_UNRESERVED}')}"

    def list_url(self, prefix: str, continuation: str = "") -> str:
        query = {"list-type": "2", "prefix": prefix} | ({"continuation-token": continuation} if continuation else {})
        return f"{self.url}/?{_query(query)}"

    def sign(
        self, method: str, url: str, now: float, headers: Mapping[str, str] = {}, *, body_digest: str = ""
    ) -> dict[str, str]:
        """Return `headers` with the signature of the request. `now` is in unix seconds.

        `body_digest` is the sha256 of the body, "" for none. The store refuses another body."""
        if not self.access_key:
            return dict(headers)
        moment = datetime.datetime.fromtimestamp(now, datetime.UTC)
        stamp, day = f"{moment:%Y%m%dT%H%M%SZ}", f"{moment:%Y%m%d}"
        parts = urlsplit(url)
        content = body_digest or _NO_BODY
        token = {"x-amz-security-token": self.session_token} if self.session_token else {}
        signed = {**headers, **token, "host": _host(parts), "x-amz-content-sha256": content, "x-amz-date": stamp}
        names = sorted(signed)
        canonical = "\n".join(
            [method, parts.path or "/", parts.query, *(f"{name}:{signed[name].strip()}" for name in names), "",
             ";".join(names), content]
        )  # fmt: skip
        scope = f"{day}/{self.region}/s3/aws4_request"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        key = f"AWS4{self.secret_key}".encode()
        for part in (day, self.region, "s3", "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}".encode(), "sha256").hex()
        credential = f"AWS4-HMAC-SHA256 Credential={self.access_key}/{scope}"
        del signed["host"]  # the client sends it
        return {**signed, "authorization": f"{credential},SignedHeaders={';'.join(names)},Signature={signature}"}


def _host(url: SplitResult) -> str:
    """Return the header that clients send: without a user, and without the port if it is the default of the scheme."""
    return url.netloc.rpartition("@")[2].lower().removesuffix(_DEFAULT_PORTS.get(url.scheme, ""))


def _query(parameters: Mapping[str, str]) -> str:
    """Encode a query in the form that the signature needs: sorted, with each reserved character escaped."""
    return "&".join(
        f"{quote(name, safe=_UNRESERVED)}={quote(value, safe=_UNRESERVED)}"
        for name, value in sorted(parameters.items())
    )
