"""The adapter in the guide works, registered by an entry point."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.protocol.codec import encode
from gpufn_gateway.auth.access import new_key
from gpufn_gateway.protocols import registration
from gpufn_platform.bus.storage.key_value import Entry

GUIDE = Path(__file__).parents[3] / "docs/protocols/adding-one.md"


@pytest.fixture(name="lines")
def gateway_with_the_guides_adapter(make: Any, clock: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    code = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0]
    assert len(code.splitlines()) <= 100
    module = types.ModuleType("guide_lines")
    exec(compile(code, str(GUIDE), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "guide_lines", module)
    point = importlib.metadata.EntryPoint("lines", "guide_lines:Lines", registration.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [point])
    gateway = make.Gateway(clock)
    gateway.deploy(make.spec())
    gateway.report(make.status())
    return gateway


async def test_a_call_and_its_errors_are_in_the_protocols_form(lines: Any) -> None:
    called = await lines.post("/lines/embed", b"a\nb")
    assert (called.status_code, called.json()) == (200, {"texts": ["a", "b"]})
    unknown = await lines.post("/lines/none", b"a")
    assert (unknown.status_code, unknown.text.partition(":")[0]) == (404, "function_not_found")
    assert (await lines.get("/lines/embed")).headers["content-type"] == "text/plain"
    assert (await lines.post("/v1/functions/embed/invoke", b'{"texts": []}')).status_code == 200


async def test_the_key_is_where_the_protocol_has_it(lines: Any) -> None:
    key, secret = new_key("k", ("invoke:embed",), 0.0)
    lines.registry.on_key(key.id, Entry(key.id, encode(key), 1))
    assert (await lines.post("/lines/embed", b"a", x_token=secret)).status_code == 200
    refused = await lines.post("/lines/embed", b"a", x_token="wrong")
    assert (refused.status_code, refused.text.partition(":")[0]) == (401, "unauthorized")
