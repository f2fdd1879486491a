"""Which standby templates are worth their memory, and which one a worker forks from. Pure.

A template is its Preload. A worker may fork from any that has not read another function's variables: what the template
lacks, the worker imports itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gpufn_core.spec.image_spec import ImageSpec
from gpufn_runtime.agent.launchers.containers.sandbox import Limits

READY_TIMEOUT_S: Final = 120.0  # to import its modules: torch on a cold disk takes 20 s and more
MOST_FAILURES: Final = 3  # of one kind, until it is given up: a few may be bad luck

ModuleSet = frozenset[str]


@dataclass(frozen=True)
class Preload:
    """What a template imports, and the variables that it has from its functions' `env` as it does so: modules read them
    when they are imported, HF_HOME for one, and never again."""

    modules: ModuleSet = frozenset()
    env: frozenset[tuple[str, str]] = field(default=frozenset(), repr=False)

    def __str__(self) -> str:
        """Without the variables: some are secrets."""
        return ",".join(sorted(self.modules))

    def is_part_of(self, other: Preload) -> bool:
        return self.env == other.env and self.modules < other.modules

    def suits(self, env: Mapping[str, str]) -> bool:
        """Whether a worker with `env` finds what it would have imported itself; that without modules has read none."""
        return not self.modules or self.env == frozenset(env.items())


EMPTY = Preload()


@dataclass(frozen=True)
class Use:
    """A revision's modules, its `env`, and when it was last launched or deployed (unix seconds)."""

    modules: ModuleSet
    last_used_at: float
    env: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def preload(self) -> Preload:
        return Preload(self.modules, frozenset(self.env.items())) if self.modules else EMPTY


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


def worth_having(uses: Iterable[Use], limit: int, refused: Iterable[Preload] = ()) -> list[Preload]:
    """At most `limit` of them, in the order to make them: first the empty one, which serves any worker that has no
    modules and costs next to nothing, then those used last. One that another one covers gets a template of its own
    only where there is room for all. `refused` cannot be had."""
    avoid = set(refused)
    newest_first = [use.preload for use in sorted(uses, key=lambda use: -use.last_used_at)]
    if newest_first:
        newest_first.insert(0, EMPTY)
    wanted = [preload for preload in dict.fromkeys(newest_first) if preload not in avoid]
    by_need = sorted(wanted, key=lambda one: one != EMPTY and any(one.is_part_of(other) for other in wanted))
    return [preload for preload in wanted if preload in by_need[: max(0, limit)]]


def closest(templates: Iterable[ModuleSet], modules: ModuleSet) -> ModuleSet | None:
    """The smallest of `templates` that has all of `modules`, else the one that has most of them and nothing more.

    Even the empty one saves the interpreter's start: 35 ms instead of 125 until the worker is on its socket.
    """
    have = list(templates)
    whole = min((one for one in have if modules <= one), key=len, default=None)
    return whole if whole is not None else max((one for one in have if one <= modules), key=len, default=None)
