"""The runner's directory: which revision serves a function."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from gpufn_core.domain.revision import Check, CheckState, Function, Lease
from gpufn_core.domain.team import Team
from gpufn_core.domain.traffic import Split
from gpufn_core.errors import FunctionNotFound
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_platform.process.clock import SystemClock
from gpufn_runtime.runner.directory import Directory
from gpufn_runtime.runner.variants import Variants
from tests.runtime.runner.node import Node, on_node


def test_a_function_finds_functions_of_other_teams_that_permit_its_calls(url: str, tmp_path: Path) -> None:
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


def test_a_nested_call_means_the_deployed_function_beside_a_served_one(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        await node.deploy("prod/shop/twice")
        await node.deploy("dev-ada/shop/twice")
        lease = Lease("1", 30.0)
        served = Function(name="dev-ada/shop/twice", active=1, serving=1, latest=1, updated_at=0.0, lease=lease)
        await node.functions.put(served.name, encode(served))
        directory = Directory(node.functions, node.revisions, node.teams, Variants(node.bus, SystemClock()))
        await directory.open()
        assert directory.find("twice", "prod/ads/bid") == "prod/shop/twice"

    on_node(url, tmp_path, test)


def test_the_revisions_of_a_function_are_read_once_and_forgotten_with_it(url: str, tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        directory = Directory(node.functions, node.revisions, node.teams, Variants(node.bus, SystemClock()))
        revision = await node.deploy("embed")
        await directory.open()
        assert await directory.called("embed", "embed", b"key") == revision
        await node.revisions.delete(subjects.revision_key("embed", 1))
        assert await directory.called("embed", "embed", b"key") == revision
        await node.functions.delete("embed")
        while True:
            try:
                await directory.called("embed", "embed", b"key")
            except FunctionNotFound:
                break
            await asyncio.sleep(0.01)
        with pytest.raises(FunctionNotFound, match="embed@1"):
            await directory.revision("embed", 1)

    on_node(url, tmp_path, test)


def test_calls_of_a_split_function_follow_the_key_unless_that_revision_cannot_run_them(
    url: str, tmp_path: Path
) -> None:
    async def test(node: Node) -> None:
        first = await node.deploy("splits")
        pending = msgspec.structs.replace(first, number=2, check=Check(CheckState.PENDING))
        ready = msgspec.structs.replace(first, number=3)
        for revision in (pending, ready):
            await node.revisions.put(subjects.revision_key("splits", revision.number), encode(revision))
        split = Split(weights={1: 25, 2: 25, 3: 25, 4: 25}, set_at=1.0)  # the record of 4 is gone
        function = Function(name="splits", active=1, serving=1, latest=4, updated_at=0.0, traffic=split)
        await node.functions.put("splits", encode(function))
        directory = Directory(node.functions, node.revisions, node.teams, Variants(node.bus, SystemClock()))
        await directory.open()
        keys = [b"%d" % number for number in range(40)]
        chosen = [(await directory.called("splits", "a", key)).number for key in keys]
        assert set(chosen) == {1, 3}
        assert [(await directory.called("splits", "a", key)).number for key in keys] == chosen
        passed = msgspec.structs.replace(pending, check=Check(CheckState.PASSED))
        await node.revisions.put(subjects.revision_key("splits", 2), encode(passed))
        assert {(await directory.called("splits", "a", key)).number for key in keys} == {1, 2, 3}
        assert directory.is_split("splits")
        for number in (2, 3):
            await node.revisions.delete(subjects.revision_key("splits", number))

    on_node(url, tmp_path, test)
