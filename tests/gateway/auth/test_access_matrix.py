"""Every route, for every kind of key, on objects that the key's pattern names and on others, against `access_table`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from gpufn.cli import app
from gpufn_core.home import Home
from gpufn_core.spec.naming.patterns import matches
from gpufn_gateway.settings import GatewaySettings
from gpufn_platform.secrets.master_key import MasterKey
from tests.gateway.auth.access_table import COMMANDS, IN_PROTOCOL_TESTS, PATTERN, PRINCIPALS, ROUTES, RULES
from tests.gateway.auth.matrix import Matrix, objects, served
from tests.gateway.whole import gateway_on


def _rank(route: str) -> int:
    """Order the routes: an event stream ends only if its call was cancelled before."""
    return 2 if route.endswith(("/events", "/outcomes")) else int(route.startswith("DELETE"))


def test_the_table_is_complete() -> None:
    assert {len(getattr(rule, side).split()) for rule in RULES.values() for side in ("own", "foreign")} == {
        len(PRINCIPALS)
    }
    assert set(ROUTES.values()) == set(RULES)
    assert {route for routes in COMMANDS.values() for route in routes} <= set(ROUTES)


def test_each_command_of_the_cli_is_in_the_table() -> None:
    def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[str]:
        if not isinstance(command, click.Group):
            yield " ".join(path)
            return
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, (*path, name))

    assert set(commands(app)) == set(COMMANDS)


async def test_every_route_for_every_kind_of_key(nats: Any, tmp_path: Path) -> None:
    own, foreign = objects("prod/search"), objects("prod/ads")
    assert (matches(PATTERN, own.function), matches(PATTERN, foreign.function)) == (True, False)
    master_key = MasterKey.from_env({}, Home(tmp_path))
    master_key.create_file()
    settings = GatewaySettings(shared_memory_prefix="access-matrix-")
    history = tmp_path / "history"
    site = tmp_path / "site"
    (site / "static").mkdir(parents=True)
    (site / "index.html").write_text("<!doctype html>")
    async with gateway_on(nats, master_key=master_key, history=history, settings=settings, site=site) as gateway:
        matrix = Matrix(gateway, own, foreign)
        await matrix.prepare()
        differences: list[str] = []
        try:
            inference = ("POST /v2/models/{model}/infer", "POST /v2/models/{model}/versions/{version}/infer")
            assert {*matrix.documented, *served(gateway), *inference} - IN_PROTOCOL_TESTS == set(ROUTES)
            for route in sorted(ROUTES, key=_rank):
                rule = RULES[ROUTES[route]]
                for side, cells in (("own", rule.own), ("foreign", rule.foreign)):
                    for principal, expected in zip(PRINCIPALS, cells.split(), strict=True):
                        async with asyncio.timeout(10):
                            found = await matrix.response(route, side, principal, expected)
                        if found != expected:
                            differences.append(f"{route}, {side}, {principal}: {found}, not {expected}")
        finally:
            await matrix.clean()
        assert not differences, "\n".join(differences)
