"""Apps: the functions of one environment and app, and the rollback of all of them. Pure.

The revisions of a deploy have the same `deploy_id`. The rollback undoes the newest deploy that has something to go back
to: the newest by the gateway's clock, because ids contain the time of the client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from gpufn_core.domain.revision import Function, Revision, RevisionKey, RevisionState
from gpufn_core.spec.naming.names import Home, home_of

Revisions = Mapping[str, Mapping[int, Revision]]


class AppView(msgspec.Struct, frozen=True):
    """An app with its functions. `deployed_at`, in unix seconds, and `deploy_id` belong to its newest revision."""

    environment: str
    app: str
    functions: tuple[str, ...]
    deploy_id: str
    deployed_at: float | None


def views(functions: Iterable[Function], revisions: Revisions) -> list[AppView]:
    """Return the apps, sorted by environment and name."""
    by_home: dict[Home, list[Function]] = {}
    for function in functions:
        by_home.setdefault(home_of(function.name), []).append(function)
    return [_view(home, by_home[home], revisions) for home in sorted(by_home)]


def _view(home: Home, functions: list[Function], revisions: Revisions) -> AppView:
    active = [each for function in functions if (each := _active(function, revisions)) is not None]
    newest = max(active, key=lambda revision: revision.created_at, default=None)
    return AppView(
        home.env,
        home.app,
        tuple(sorted(function.name for function in functions)),
        newest.deploy_id if newest else "",
        newest.created_at if newest else None,
    )


def earlier_revisions(functions: Iterable[Function], revisions: Revisions) -> list[RevisionKey]:
    """Return the revisions to make active to undo the newest deploy of an app's `functions`. Empty if no function has
    an earlier revision."""
    candidates: list[tuple[Revision, Revision]] = []  # active and earlier
    for function in functions:
        active = _active(function, revisions)
        earlier = None if active is None else _before(active, revisions[function.name].values())
        if active is not None and earlier is not None:
            candidates.append((active, earlier))
    if not candidates:
        return []
    newest, _ = max(candidates, key=lambda candidate: candidate[0].created_at)
    return sorted(earlier.key for active, earlier in candidates if _is_same_deploy(active, newest))


def _active(function: Function, revisions: Revisions) -> Revision | None:
    return revisions.get(function.name, {}).get(function.active)


def _is_same_deploy(one: Revision, other: Revision) -> bool:
    """A revision of an earlier release or a plain HTTP client has no id: it counts as a separate deploy."""
    return one is other or (bool(one.deploy_id) and one.deploy_id == other.deploy_id)


def _before(active: Revision, revisions: Iterable[Revision]) -> Revision | None:
    """Return the last revision before the deploy of `active`."""
    earlier = (
        each
        for each in revisions
        if each.number < active.number and each.state is RevisionState.READY and not _is_same_deploy(each, active)
    )
    return max(earlier, key=lambda revision: revision.number, default=None)
