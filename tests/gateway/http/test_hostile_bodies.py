"""Any body of a call, in any encoding, is served, or refused as the client's fault."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufn_core.encoding import media
from gpufn_core.errors import InvalidInput, PayloadTooLarge
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec, Packaging
from gpufn_core.spec.model_spec import ModelFile, ModelSpec
from gpufn_gateway.maps import chunks

DETECT = MethodSpec(
    parameters={
        "type": "object",
        "properties": {
            "image": {"type": "string", "contentEncoding": "base64"},
            "tags": {"type": "array", "items": {"type": "string"}, "default": []},
            "top": {"type": "integer", "default": 5},
        },
        "required": ["image"],
        "additionalProperties": False,
    },
    raw_parameter="image",
)
_NET = ModelSpec(parameter="net", files=(ModelFile("net.onnx", "0" * 64, 1),))
MODEL = FunctionSpec(name="net", entry=EntryPoint("", "", Packaging.MODEL), methods=(MethodSpec(),), models=(_NET,))

_names = st.sampled_from(["image", "tags", "top", "texts", "", "é"])
_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=5,
)
_part = st.tuples(_names, st.binary(max_size=6)).map(
    lambda part: b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (part[0].encode(), part[1])
)
_form = st.lists(_part | st.binary(max_size=8), max_size=3).map(lambda parts: b"".join(parts) + b"--b--\r\n")
_bodies = st.one_of(
    st.binary(max_size=40), _values.map(msgspec.json.encode), _values.map(msgspec.msgpack.encode), _form,
    st.binary(max_size=8).map(gzip.compress),
)  # fmt: skip
_types = st.sampled_from(
    [
        media.JSON, media.MSGPACK, media.NATIVE, media.PICKLED, media.TENSORS, "multipart/form-data; boundary=b",
        "multipart/form-data", "multipart/mixed; boundary=b", "image/png", "text/json; charset=x", "", ";", "\xff/\xe9",
    ]
)  # fmt: skip
_paths = st.sampled_from(["/v1/functions/detect/invoke", "/v1/functions/embed/invoke", "/v2/models/net/infer"])
_queries = st.lists(st.tuples(_names, st.binary(max_size=3)), max_size=2).map(urlencode)
_headers = st.fixed_dictionaries(
    {},
    optional={
        "content-encoding": st.sampled_from(["gzip", "deflate", "br", "identity"]),
        "inference-header-content-length": st.sampled_from(["0", "3", "-1", "x", "9" * 30]),
        "accept": st.sampled_from([media.JSON, media.NATIVE, "text/html", "*/*;q=x"]),
    },
)


def test_any_body_is_served_or_refused(gateway: Any, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    gateway.deploy(make.spec("detect", DETECT))
    gateway.deploy(MODEL)
    gateway.report(make.status(), make.status("detect"), make.status("net"))

    with asyncio.Runner() as runner:
        client = gateway.client()

        @settings(max_examples=200)
        @given(_paths, _queries, _types, _headers, _bodies)
        def check(path: str, query: str, content_type: str, headers: dict[str, str], body: bytes) -> None:
            fields = [(b"content-type", content_type.encode("latin-1")), *((k, v) for k, v in headers.items())]
            answer = runner.run(client.post(f"{path}?{query}", content=body, headers=fields))
            assert answer.status_code in (200, 400, 403, 413, 415, 422), answer.text

        check()
        assert gateway.queue.calls, "some are served"
        runner.run(client.aclose())
    assert not [record for record in caplog.records if record.name.startswith("gpufn")], "no incident"


@given(
    st.sampled_from([media.JSON, media.NATIVE, media.PICKLED]),
    st.one_of(
        st.binary(max_size=40),
        st.lists(st.binary(max_size=9), max_size=4).map(
            lambda items: b"".join(len(item).to_bytes(4, "big") + item for item in items)
        ),
    ),
)
def test_any_chunk_of_a_map_has_items_or_is_invalid(encoding: str, body: bytes) -> None:
    with contextlib.suppress(InvalidInput, PayloadTooLarge):
        items = chunks.split(encoding, memoryview(body))
        assert sum(map(len, items)) <= len(body)
