"""URLs and signatures of the origins of weights."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from gpufn_core.errors import ArtifactUnavailable
from gpufn_core.weights.hub import Hub
from gpufn_core.weights.s3 import Bucket

_KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
}
_2013_05_24 = 1369353600.0


def test_a_signature_is_that_of_the_example_in_awss_documentation() -> None:
    bucket = Bucket.from_env("examplebucket", {**_KEYS})
    url = "https://examplebucket.s3.amazonaws.com/test.txt"
    headers = bucket.sign("GET", url, _2013_05_24, {"range": "bytes=0-9"})
    assert headers["authorization"].endswith("f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41")
    assert headers["range"] == "bytes=0-9"
    assert "host" not in headers


def test_a_session_token_is_signed() -> None:
    bucket = Bucket.from_env("b", {**_KEYS, "AWS_SESSION_TOKEN": "t"})
    headers = bucket.sign("GET", bucket.object_url("k"), 0.0)
    assert headers["x-amz-security-token"] == "t"
    assert "x-amz-security-token" in headers["authorization"]


def test_without_credentials_requests_are_not_signed() -> None:
    bucket = Bucket.from_env("b", {})
    assert bucket.sign("GET", bucket.object_url("k"), 0.0) == {}


def test_a_bucket_is_a_host_of_aws_and_a_path_elsewhere() -> None:
    assert Bucket.from_env("b", {"AWS_REGION": "eu-west-1"}).object_url("a b/é") == (
        "https://b.s3.eu-west-1.amazonaws.com/a%20b/%C3%A9"
    )
    assert Bucket.from_env("b.c", {}).object_url("k") == "https://s3.us-east-1.amazonaws.com/b.c/k"
    assert Bucket.from_env("b", {"AWS_ENDPOINT_URL": "http://minio:9000/"}).object_url("k") == "http://minio:9000/b/k"


@pytest.mark.parametrize(
    "address", ["https://minio:443", "https://MinIO", "http://minio:80", "http://minio:9000", "https://[::1]:443"]
)
def test_the_signed_host_is_that_of_the_request(address: str) -> None:
    url = Bucket.from_env("b", {"AWS_ENDPOINT_URL": address}).object_url("k")
    sent = httpx.Request("GET", url).headers["host"]
    bucket = Bucket.from_env("b", _KEYS)
    assert bucket.sign("GET", url, 0.0) == bucket.sign("GET", f"plain://{sent}/b/k", 0.0)


def test_a_list_continues() -> None:
    url = Bucket.from_env("b", {"AWS_ENDPOINT_URL": "http://s"}).list_url("a b/", "t=/+")
    assert parse_qs(urlsplit(url).query) == {"list-type": ["2"], "prefix": ["a b/"], "continuation-token": ["t=/+"]}


def test_a_credential_is_in_no_representation() -> None:
    assert "secret" not in repr(Bucket.from_env("b", {**_KEYS, "AWS_SECRET_ACCESS_KEY": "secret"}))
    assert "hf_x" not in repr(Hub.from_env({"HF_TOKEN": "hf_x"}))


@pytest.mark.parametrize("text", ["hf_\u2013x", "hf_\nx", "hf_\udce9"])
def test_a_credential_that_no_header_can_carry_is_refused_and_not_shown(text: str) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        with pytest.raises(ArtifactUnavailable, match=name):
            Bucket.from_env("b", {name: text})
    with pytest.raises(ArtifactUnavailable) as caught:
        Hub.from_env({"HF_TOKEN": text})
    assert "hf_" not in caught.value.message


def test_the_hub_may_be_a_mirror() -> None:
    hub = Hub.from_env({"HF_ENDPOINT": "http://mirror/", "HF_TOKEN": "hf_x\n"})
    assert hub.file_url("org/model", "c" * 40, "a b.bin") == f"http://mirror/org/model/resolve/{'c' * 40}/a%20b.bin"
    assert hub.revision_url("org/model", "refs/pr/1").endswith("/revision/refs%2Fpr%2F1")
    assert hub.headers == {"authorization": "Bearer hf_x"}
    assert Hub.from_env({}).headers == {}
