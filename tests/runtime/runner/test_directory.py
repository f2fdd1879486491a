"""The runner's directory: which revision serves a function."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpufn_core.domain.team import Team
from gpufn_core.errors import FunctionNotFound
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_platform.process.clock import SystemClock
from gpufn_runtime.runner.directory import Directory
from gpufn_runtime.runner.variants import Variants
from tests.runtime.runner.node import Node, on_node


def test_a_function_finds_those_of_other_teams_that_let_it_call_them(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        ads = Team(name="ads", owns=("prod/ads/*",), callers=("prod/web/*",))
        for team in (ads, Team(name="search", owns=("prod/search/*",))):
            await node.teams.put(team.name, encode(team))
        for name in ("prod/ads/bid", "prod/search/bid", "prod/free/embed"):
            await node.deploy(name)
        directory = Directory(node.functions, node.revisions, node.teams, Variants(node.bus, SystemClock()))
        await directory.open()
        assert directory.find("bid", "prod/search/rank") == "prod/search/bid"
        assert directory.find("bid", "prod/web/page") == "prod/ads/bid"
        assert directory.find("embed", "prod/search/rank") == "prod/free/embed"
        for caller in ("prod/search/rank", "prod/free/embed"):
            with pytest.raises(FunctionNotFound):
                directory.find("prod/ads/bid", caller)
        for name in ("ads", "search"):
            await node.teams.delete(name)

    on_node(url, tmp_path, test)


def test_the_revisions_of_a_function_are_read_once_and_forgotten_with_it(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        directory = Directory(node.functions, node.revisions, node.teams, Variants(node.bus, SystemClock()))
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
