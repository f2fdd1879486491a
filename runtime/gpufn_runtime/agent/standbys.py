"""Which standby templates are worth their memory, and which one a worker forks from. Pure.

A template is its module set. A worker may fork from any: what the template lacks, the worker imports itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpufn.image import ImageSpec
from gpufn_runtime.agent.launchers.sandbox import Limits

ModuleSet = frozenset[str]
EMPTY: ModuleSet = frozenset()


@dataclass(frozen=True)
class Use:
    """A revision's modules and when it was last launched or deployed (unix seconds)."""

    modules: ModuleSet
    last_used_at: float


@dataclass(frozen=True)
class ContainerUse:
    """A revision whose workers live in containers. `bundle` is the folder of its files. No `limits` when they are not
    known before a worker is placed: which GPU it gets."""

    function: str
    revision: int
    image: ImageSpec
    bundle: str
    limits: Limits | None
    modules: ModuleSet
    last_used_at: float


def worth_having(uses: Iterable[Use], limit: int, refused: Iterable[ModuleSet] = ()) -> list[ModuleSet]:
    """At most `limit` module sets, in the order to make them: first the empty one, which serves any worker that has no
    modules and costs next to nothing, then those used last. A set that another one covers gets a template of its own
    only where there is room for all. `refused` cannot be had."""
    avoid = set(refused)
    newest_first = [use.modules for use in sorted(uses, key=lambda use: -use.last_used_at)]
    if newest_first:
        newest_first.insert(0, EMPTY)
    wanted = [modules for modules in dict.fromkeys(newest_first) if modules not in avoid]
    by_need = sorted(wanted, key=lambda modules: modules != EMPTY and any(modules < other for other in wanted))
    return [modules for modules in wanted if modules in by_need[: max(0, limit)]]


def closest(templates: Iterable[ModuleSet], modules: ModuleSet) -> ModuleSet | None:
    """The smallest of `templates` that has all of `modules`, else the one that has most of them and nothing more.

    Even the empty one saves the interpreter's start: 35 ms instead of 125 until the worker is on its socket.
    """
    have = list(templates)
    whole = min((one for one in have if modules <= one), key=len, default=None)
    return whole if whole is not None else max((one for one in have if one <= modules), key=len, default=None)
