"""The runner's directory: which revision serves a function."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpufn_core.errors import FunctionNotFound
from gpufn_core.protocol import subjects
from gpufn_runtime.runner.directory import Directory
from tests.runtime.runner.node import Node, on_node


def test_the_revisions_of_a_function_are_read_once_and_forgotten_with_it(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        directory = Directory(node.functions, node.revisions)
        revision = await node.deploy("embed")
        await directory.open()
        assert await directory.serving("embed", "embed") == revision
        await node.revisions.delete(subjects.revision_key("embed", 1))
        assert await directory.serving("embed", "embed") == revision
        await node.functions.delete("embed")
        while True:
            try:
                await directory.serving("embed", "embed")
            except FunctionNotFound:
                break
            await asyncio.sleep(0.01)
        with pytest.raises(FunctionNotFound, match="embed@1"):
            await directory.revision("embed", 1)

    on_node(url, tmp_path, test)
