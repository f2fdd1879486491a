"""How the edge of the state machine executes actions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpufn_runtime.runner.attempts.settle import Settler
from tests.runtime.runner.node import Node, on_node


def test_an_action_that_fails_stops_no_other_and_its_log_has_no_arguments(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settle = Settler.settle

    def fail_once(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(Settler, "settle", settle)
        raise ValueError("a bug")

    async def test(node: Node) -> None:
        revision = await node.deploy("f")
        worker = await node.worker(revision)
        monkeypatch.setattr(Settler, "settle", fail_once)
        node.invoke(revision, b'"a secret"')
        worker.answer((await worker.run())[0], b'"a secret"')
        second = node.invoke(revision, b"2")
        await worker.echo(1)
        assert (await second.future)[1] == b"2"

    on_node(url, tmp_path, test)
    assert "cannot execute Settle" in caplog.text
    assert "a bug" in caplog.text
    assert "a secret" not in caplog.text
